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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from hybrid_plugin.core.policy.divergence import Divergences
from hybrid_plugin.core.policy.message_boundaries import Delimiters
from hybrid_plugin.core.tree.snapshot import SnapshotKind
from hybrid_plugin.core.tree.tokens import Tokens

Repays = Callable[[SnapshotKind, int], bool]
"""Whether a snapshot of a kind that saves so many tokens is worth a forward pass."""


def always(kind: SnapshotKind, saved: int) -> bool:
    """Every snapshot is."""
    return True


@dataclass(frozen=True, slots=True)
class SnapshotPolicy:
    """Plans the positions at which a prefill pauses for a snapshot.

    Every pause costs an additional forward pass, which the snapshot has to repay.
    """

    page_size: int
    chunk_end_min_tokens: int = 1024
    """Minimum distance of a chunk end from any earlier snapshot.  It adds no forward
    pass, but costs a copy."""
    divergences: Divergences = field(default_factory=Divergences)
    """Where prompts part: determines the position of the body snapshot."""
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
        wanted: Mapping[int, SnapshotKind] | None = None,
        prompt_end: int | None = None,
        repays: Repays = always,
    ) -> dict[int, SnapshotKind]:
        """Return the positions where the prefill of a sequence pauses, ascending.

        Args:
            length: tokens of the sequence.
            hit: tokens that are restored, not computed.
            kv_length: tokens whose KV the tree has (`Match.kv_length`).
            wanted: requested positions, from outside the policy, and their kinds.
            prompt_end: end of the last message; by default the end of the sequence.
            repays: whether a snapshot of a kind that saves so many tokens is worth a
                forward pass.
        """
        # At least one token must be left to compute when a sequence resumes.
        last = self._floor(length - 1)
        planned: dict[int, SnapshotKind] = {}
        branch = min(self._floor(kv_length), last)
        if _exists(branch, hit) and repays(SnapshotKind.BRANCH, branch - hit):
            planned[branch] = SnapshotKind.BRANCH
        for asked, kind in (wanted or {}).items():
            position = self._floor(asked)
            if position <= last and _exists(position, hit):
                planned.setdefault(position, kind)
        end = last if prompt_end is None else min(self._floor(prompt_end), last)
        for position, kind in (
            (self._body(length, last, max(planned, default=hit)), SnapshotKind.BODY),
            (end, SnapshotKind.PROMPT_END),
        ):
            before = max(planned, default=hit)
            if _exists(position, before) and repays(kind, position - before):
                planned[position] = kind
        return dict(sorted(planned.items()))

    def snapshot_positions_of(
        self,
        tokens: Tokens,
        *,
        hit: int,
        kv_length: int,
        snapshot_at: Sequence[int] = (),
        repays: Repays = always,
    ) -> dict[int, SnapshotKind]:
        """Return the positions of a sequence, including those from its messages.

        Args:
            tokens: of the sequence.
            hit: tokens that are restored, not computed.
            kv_length: tokens whose KV the tree has (`Match.kv_length`).
            snapshot_at: positions at which the application asks for a snapshot.
            repays: as for `prefill_positions`.
        """
        wanted = dict.fromkeys(snapshot_at, SnapshotKind.REQUESTED)
        prompt_end = None
        if self.delimiters is not None:
            ends = self.delimiters.ends(tokens)
            system_end = self.delimiters.system_end(tokens, ends)
            if system_end - hit >= self.system_min_tokens:
                wanted.setdefault(system_end, SnapshotKind.SYSTEM)
            prompt_end = ends[-1] if ends else None
        return self.prefill_positions(
            length=len(tokens),
            hit=hit,
            kv_length=kv_length,
            wanted=wanted,
            prompt_end=prompt_end,
            repays=repays,
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
        return on_page and position - last >= self.chunk_end_min_tokens

    def _body(self, length: int, last: int, before: int) -> int:
        """Where later prompts will most likely part; 0 if not behind `before`."""
        if self._floor(self.divergences.last_position(length)) <= before:
            return 0
        return min(self._floor(self.divergences.best_position(length)), last)

    def _floor(self, position: int) -> int:
        return position // self.page_size * self.page_size


def _exists(position: int, before: int) -> bool:
    """Whether a prefill that starts at `before` can pause at `position`."""
    # Some kernels take a first chunk of one token for a decode step.
    return position >= 2 and position > before
