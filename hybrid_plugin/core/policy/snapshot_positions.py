# SPDX-License-Identifier: Apache-2.0
"""Positions in a sequence at which state snapshots are taken.

A state can be resumed only at the exact position where it was taken, so these positions
determine the possible hits.  There are four kinds (Marconi, MLSys 2025, uses the first
and the third):

* the *branch point*, where a new sequence diverges from an earlier one.  The next
  sequence with the same prefix, such as a system prompt, resumes there;
* the *prompt end*, for the same prompt sent again, and for a long prompt also its
  *body*: prompts with a long common prefix rarely share their end, so the second one
  needs a snapshot some distance before it;
* the *turn end*, where the next turn of a chat continues.  It is free: the finished
  sequence donates its slot;
* the *chunk end*, where the engine splits a long prefill anyway.  It costs a copy, and
  serves later sequences that share a long prefix.  The last chunk end of a prompt
  serves most of them; the earlier ones are evicted first.

Two kinds come from outside: positions requested by the *application*, and the end of
the *system message*, found by the delimiters of the chat template, so that the second
chat with it already hits.

All positions but the turn end are rounded down to a page end.  Two prompts may agree by
chance on a few tokens after their common prefix; rounding ignores these, and whole
pages are shared without a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hybrid_plugin.core.policy.message_boundaries import Delimiters
from hybrid_plugin.core.tree.tokens import Tokens


@dataclass(frozen=True, slots=True)
class SnapshotPolicy:
    """Plans the positions at which a prefill pauses for a snapshot.

    Every pause costs an additional forward pass, so a snapshot must save a minimum
    number of tokens.
    """

    page_size: int
    branch_min_tokens: int = 256
    """Minimum distance of a branch point from the last usable snapshot; a quarter of
    that snapshot's own position is enough as well: the first shared page matters, one
    more hardly does."""
    prompt_end_min_tokens: int = 1024
    """The same minimum for a prompt end, which only an identical prompt can use,
    rarer than a branch."""
    chunk_end_min_tokens: int = 1024
    """The same minimum for a chunk end, counted from any earlier snapshot.  It adds no
    forward pass, but takes a slot."""
    body_share: float = 0.75
    """Position of the body snapshot as a share of the prompt; 0 for none.  It stands
    for the document that prompts share, before the question that differs."""
    delimiters: Delimiters | None = None
    """Message delimiters of the model's chat template, if known."""
    system_min_tokens: int = 64
    """Minimum distance from the hit to the end of the system message."""
    in_batch_prefix_min_tokens: int = 0
    """Minimum number of tokens that a sequence saves by waiting for another one to
    compute their common prefix; 0 disables waiting.  See `in_batch_sharing`."""

    def prefill_positions(
        self,
        *,
        length: int,
        hit: int,
        kv_length: int,
        wanted: Sequence[int] = (),
        prompt_end: int | None = None,
    ) -> tuple[int, ...]:
        """Return the positions where the prefill of a sequence pauses, ascending.

        Args:
            length: tokens of the sequence.
            hit: tokens that are restored, not computed.
            kv_length: tokens whose KV the tree has (`Match.kv_length`).
            wanted: requested positions, from outside the policy.
            prompt_end: end of the last message; by default the end of the sequence.
        """
        # At least one token must be left to compute when a sequence resumes.
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
        """Return the positions of a sequence, including those from its messages.

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

        A snapshot must lie at a page end; the rest of the page goes to the next chunk.
        """
        floored = self._floor(end)
        return floored if floored >= start + 2 else end

    def keeps_chunk_end(self, position: int, last: int) -> bool:
        """Whether a chunk end gets a snapshot; `last` is the previous snapshot."""
        on_page = position % self.page_size == 0
        return on_page and self._worthwhile(position, last, self.chunk_end_min_tokens)

    def _floor(self, position: int) -> int:
        return position // self.page_size * self.page_size

    def _worthwhile(self, position: int, hit: int, minimum: int) -> bool:
        # Some kernels take a first chunk of one token for a decode step.
        return position >= 2 and position - hit >= max(minimum, 1)
