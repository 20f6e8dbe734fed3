# SPDX-License-Identifier: Apache-2.0
"""Where in a sequence a state snapshot is worth a slot.

A state can be resumed only at the exact position where it was taken, so the
positions decide what is ever hit.  Four kinds pay (Marconi, MLSys 2025,
names the first and the third):

* the *branch point*, where a new sequence leaves one seen before: the next
  one that shares the prefix, a system prompt say, resumes there;
* the *prompt end*, for the same prompt sent again, and in a long prompt its
  *body* too: prompts that share a long beginning rarely share the end, so the
  second one can resume only at a position some way before it;
* the *turn end*, where the next turn of a chat goes on.  It costs nothing: the
  sequence donates its slot when it finishes;
* the *chunk end*, where the engine pauses a long prefill anyway.  It costs a
  copy, and serves the next sequence that shares a long beginning.  The last one
  of a prompt serves most of those; the others are the first to go.

Two more come from outside: positions that the *application* asks to keep, and the
end of the *system message*, by the delimiters of the chat template, so that the
second chat that begins with it already hits.

All but the turn end are floored to a whole page.  Two prompts may agree by accident
on some tokens behind what they really share; flooring forgives that, and
pages up to a page end are shared without a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hybrid_plugin.core.policy.message_boundaries import Delimiters
from hybrid_plugin.core.tree.tokens import Tokens


@dataclass(frozen=True, slots=True)
class SnapshotPolicy:
    """Plans the positions at which a prefill pauses for a snapshot.

    Every pause costs one more forward pass for the tokens behind it, so a
    snapshot must be able to save a minimum of work.
    """

    page_size: int
    branch_min_tokens: int
    """A branch point must lie this far behind the last usable snapshot, or by a
    quarter of what that one saves already: the first page shared is worth much,
    one page more is not."""
    prompt_end_min_tokens: int
    """The same for a prompt end, which only an identical prompt can use."""
    chunk_end_min_tokens: int
    """The same for a chunk end, counted from any snapshot before it."""
    body_share: float = 0.0
    """Share of a prompt that is its body; 0 for no snapshot there."""
    delimiters: Delimiters | None = None
    """What ends a message in the model's chat template, if it is known."""
    system_min_tokens: int = 64
    """The end of a system message must lie this far behind the hit."""
    in_batch_prefix_min_tokens: int = 0
    """Tokens that a sequence must save by waiting for one that computes what it begins
    with; 0 for never to wait.  See `following`."""
    max_per_path: int | None = None
    """Snapshots on the path to a new one, itself included; beyond that the one worth
    least of them goes.  None for any number."""

    def prefill_positions(
        self,
        *,
        length: int,
        hit: int,
        kv_length: int,
        wanted: Sequence[int] = (),
        prompt_end: int | None = None,
    ) -> tuple[int, ...]:
        """Return where the prefill of one sequence should stop, ascending.

        Args:
            length: tokens of the sequence.
            hit: tokens that are restored, not computed.
            kv_length: tokens whose KV the tree has (`Match.kv_length`).
            wanted: positions that are worth keeping for reasons of their own.
            prompt_end: where what the sequence says ends; by default at its end.
        """
        # Not behind the last token but one: resuming needs a token to compute.
        last = self._floor(length - 1)
        branch = min(self._floor(kv_length), last)
        positions = [hit]
        if self._worthwhile(branch, hit, min(self.branch_min_tokens, hit // 4)):
            positions.append(branch)
        for position in map(self._floor, wanted):
            before = max(
                [one for one in positions if one <= position], default=position
            )
            if position <= last and self._worthwhile(position, before, 1):
                positions.append(position)
        body = self._floor(int(last * self.body_share))
        end = last if prompt_end is None else min(self._floor(prompt_end), last)
        for position in (body, end):
            if self._worthwhile(position, max(positions), self.prompt_end_min_tokens):
                positions.append(position)
        return tuple(sorted(positions[1:]))

    def snapshot_positions_of(
        self,
        tokens: Tokens,
        *,
        hit: int,
        kv_length: int,
        snapshot_at: Sequence[int] = (),
    ) -> tuple[int, ...]:
        """Return the positions of one sequence, what its messages tell included.

        Args:
            tokens: of the sequence.
            hit: tokens that are restored, not computed.
            kv_length: tokens whose KV the tree has (`Match.kv_length`).
            snapshot_at: positions at which the application asks for a snapshot.
        """
        if self.delimiters is None:
            return self.prefill_positions(
                length=len(tokens), hit=hit, kv_length=kv_length, wanted=snapshot_at
            )
        ends = self.delimiters.ends(tokens)
        system_end = self.delimiters.system_end(tokens, ends)
        if system_end - hit >= self.system_min_tokens:
            snapshot_at = (*snapshot_at, system_end)
        return self.prefill_positions(
            length=len(tokens),
            hit=hit,
            kv_length=kv_length,
            wanted=snapshot_at,
            prompt_end=ends[-1] if ends else None,
        )

    def align_chunk_end(self, start: int, end: int) -> int:
        """Return where a chunk that the engine ends at `end` should end.

        A state inside a page could not be kept; the rest of the page goes to
        the next chunk.
        """
        floored = self._floor(end)
        return floored if floored >= start + 2 else end

    def keeps_chunk_end(self, position: int, last: int) -> bool:
        """Whether the end of a chunk gets a snapshot, `last` being the one before."""
        on_page = position % self.page_size == 0
        return on_page and self._worthwhile(position, last, self.chunk_end_min_tokens)

    def _floor(self, position: int) -> int:
        return position // self.page_size * self.page_size

    def _worthwhile(self, position: int, hit: int, minimum: int) -> bool:
        # Some kernels take a first chunk of one token for a decode step.
        return position >= 2 and position - hit >= max(minimum, 1)
