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
  copy, and serves the next sequence that shares a long beginning.

All but the turn end are floored to a whole page.  Two prompts may agree by accident
on some tokens behind what they really share; flooring forgives that, and
pages up to a page end are shared without a copy.
"""

from __future__ import annotations

from dataclasses import dataclass


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

    @staticmethod
    def evicts_used(unused: int, used: int) -> bool:
        """Whether the next snapshot to go is one that was resumed from before.

        Most snapshots are never resumed from, and those that were will be again:
        the ends of many short sequences must not drive out a prompt they share.
        New ones keep a quarter of the room, to have their chance.
        """
        return used > 3 * unused

    def prefill_stops(
        self, *, length: int, hit: int, kv_length: int
    ) -> tuple[int, ...]:
        """Return where the prefill of one sequence should stop, ascending.

        Args:
            length: tokens of the sequence.
            hit: tokens that are restored, not computed.
            kv_length: tokens whose KV the tree has (`Match.kv_length`).
        """
        # Not behind the last token but one: resuming needs a token to compute.
        last = (length - 1) // self.page_size * self.page_size
        branch = min(kv_length // self.page_size * self.page_size, last)
        stops = []
        if self._worthwhile(branch, hit, min(self.branch_min_tokens, hit // 4)):
            stops.append(branch)
            hit = branch
        body = int(last * self.body_share) // self.page_size * self.page_size
        for position in (body, last):
            if self._worthwhile(position, hit, self.prompt_end_min_tokens):
                stops.append(position)
                hit = position
        return tuple(stops)

    def chunk_end(self, start: int, end: int) -> int:
        """Return where a chunk that the engine ends at `end` should end.

        A state inside a page could not be kept; the rest of the page goes to
        the next chunk.
        """
        floored = end // self.page_size * self.page_size
        return floored if floored >= start + 2 else end

    def keeps_chunk_end(self, position: int, last: int) -> bool:
        """Whether the end of a chunk gets a snapshot, `last` being the one before."""
        on_page = position % self.page_size == 0
        return on_page and self._worthwhile(position, last, self.chunk_end_min_tokens)

    def _worthwhile(self, position: int, hit: int, minimum: int) -> bool:
        # Some kernels take a first chunk of one token for a decode step.
        return position >= 2 and position - hit >= max(minimum, 1)
