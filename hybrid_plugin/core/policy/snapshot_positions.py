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

A state that a forward pass leaves behind can be copied: the prefill pauses there, which
costs a pass.  Where the kernels keep states inside a pass too (*interior* snapshots),
they do so at multiples of their chunk, and a snapshot costs no pass.  Positions are
rounded down to such a multiple then, unless the tokens in between are worth a pause.

*Canonical* content has the same bits whatever else ran and however prompts were split:
what prefill computed in whole chunks.  A cache of canonical content takes snapshots at
multiples of the chunk only, ends passes there, and keeps nothing that decode wrote.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
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
    """Plans the positions of a prefill at which snapshots are taken.

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
    grid: int = 0
    """A forward pass can keep states at multiples of so many tokens; 0 if it cannot."""
    canonical: bool = False
    """Whether the cache keeps canonical content only; needs a grid."""

    def __post_init__(self) -> None:
        if self.canonical and self.grid < 2:
            raise ValueError("canonical content needs chunks of several tokens")

    @property
    def step(self) -> int:
        """Tokens between positions at which a snapshot costs least."""
        return math.lcm(self.page_size, self.grid) if self.grid else self.page_size

    def floors(self, position: int) -> tuple[int, ...]:
        """Where a snapshot that was asked for may lie: at the page end before the
        position, or where a forward pass can keep a state before it.
        """
        page_end, inside = self._floor(position), position // self.step * self.step
        return (page_end,) if page_end == inside else (inside, page_end)

    def is_interior(self, position: int) -> bool:
        """Whether a forward pass can keep the state at a position, without a pause."""
        return self.grid > 0 and position % self.step == 0

    def prefill_positions(
        self,
        *,
        length: int,
        hit: int,
        kv_length: int,
        wanted: Mapping[int, SnapshotKind] | None = None,
        prompt_end: int | None = None,
        repays: Repays = always,
        useless: Collection[SnapshotKind] = (),
    ) -> dict[int, SnapshotKind]:
        """Return the positions where a prefill's snapshots are taken, ascending.

        At those that are not `is_interior` it pauses.

        Args:
            length: tokens of the sequence.
            hit: tokens that are restored, not computed.
            kv_length: tokens whose KV the tree has (`Match.kv_length`).
            wanted: requested positions, from outside the policy, and their kinds.
            prompt_end: end of the last message; by default the end of the sequence.
            repays: whether a snapshot of a kind that saves so many tokens is worth a
                forward pass.
            useless: kinds of snapshots that nobody would use.
        """
        # At least one token must be left to compute when a sequence resumes.
        last = self._floor(length - 1)
        planned: dict[int, SnapshotKind] = {}
        branch = min(self._floor(kv_length), last)
        self._plan(planned, branch, SnapshotKind.BRANCH, hit, repays)
        for asked, kind in (wanted or {}).items():
            if self._floor(asked) <= last:
                # Without a pause it is cheap; the exact position has to repay one.
                asks = repays if self.grid else always
                self._plan(planned, self._floor(asked), kind, hit, asks)
        end = last if prompt_end is None else min(self._floor(prompt_end), last)
        body = self._body(length, last, max(planned, default=hit))
        for position, kind in (
            (body, SnapshotKind.BODY),
            (end, SnapshotKind.PROMPT_END),
        ):
            if kind not in useless:
                before = max(planned, default=hit)
                self._plan(planned, position, kind, before, repays)
        return dict(sorted(planned.items()))

    def snapshot_positions_of(
        self,
        tokens: Tokens,
        *,
        hit: int,
        kv_length: int,
        snapshot_at: Sequence[int] = (),
        repays: Repays = always,
        useless: Collection[SnapshotKind] = (),
    ) -> dict[int, SnapshotKind]:
        """Return the positions of a sequence, including those from its messages.

        Args:
            tokens: of the sequence.
            hit: tokens that are restored, not computed.
            kv_length: tokens whose KV the tree has (`Match.kv_length`).
            snapshot_at: positions at which the application asks for a snapshot.
            repays, useless: as for `prefill_positions`.
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
            useless=useless,
        )

    def align_chunk_end(self, start: int, end: int, length: int) -> int:
        """Return where a chunk that the engine ends at `end` should end.

        A snapshot must lie at a page end, and costs least at a multiple of `step`; the
        rest goes to the next chunk.

        Args:
            start: the chunk's first token.
            end: before the sequence's end.
            length: tokens of the sequence.
        """
        floored = end // self.step * self.step
        if not self.canonical:
            return floored if floored >= start + 2 else end
        if length - floored == 1:  # a pass of one token would be a decode step
            floored -= self.step
        return max(floored, start)

    def keeps_chunk_end(self, position: int, last: int) -> bool:
        """Whether a chunk end gets a snapshot; `last` is the previous snapshot."""
        on_page = position % self.page_size == 0
        return on_page and position - last >= self.chunk_end_min_tokens

    def _plan(
        self,
        planned: dict[int, SnapshotKind],
        position: int,
        kind: SnapshotKind,
        before: int,
        repays: Repays,
    ) -> None:
        """Add a snapshot at `position`, or where it can be had without a pause.

        Args:
            planned: what is planned so far.
            position: the page end that would serve best.
            kind: of the snapshot.
            before: the position that it would have to be resumed from without it.
            repays: as for `prefill_positions`.
        """
        inside = position // self.step * self.step
        free = self.grid > 0 and _exists(inside, before)
        if free:
            before = inside
        may_pause = not self.canonical or position == inside
        if _exists(position, before) and may_pause and repays(kind, position - before):
            planned.setdefault(position, kind)
        elif free:
            planned.setdefault(inside, kind)

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
