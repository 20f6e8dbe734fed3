# SPDX-License-Identifier: Apache-2.0
"""Eviction policies: the order in which cached KV and snapshots are evicted.

A policy assigns priorities, and the lowest priority is evicted first.  The tree asks
for the priority when a node or snapshot is used, and again before it evicts.  The
second value counts only if it is higher than the first.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from hybrid_plugin.core.tree.node import ADMISSION, Node, Snapshot


class LeastRecentlyUsed:
    """Plain recency; the base class of all policies."""

    segments = 1
    """Number of snapshot groups, each with its own order."""

    def leaf(self, node: Node) -> float:
        """Priority of the KV of an unlocked leaf."""
        return node.used_at

    def snapshot(self, node: Node, snapshot: Snapshot) -> float:
        """Priority of a snapshot within its segment."""
        return -math.inf if snapshot.is_superseded else snapshot.used_at

    def segment(self, snapshot: Snapshot) -> int:
        """Index of the segment that a snapshot belongs to."""
        return 0

    def next_segment(self, sizes: tuple[int, ...]) -> int:
        """The segment from which the next snapshot is evicted.

        Args:
            sizes: unlocked snapshots per segment.  If the chosen segment is empty,
                the tree takes another.
        """
        return 0

    def evicted(self, node: Node, now: int) -> None:
        """Called when a snapshot was evicted to make room, at time `now`."""


class UsedFirst(LeastRecentlyUsed):
    """Evicts snapshots that were never resumed from before reused ones.

    Most snapshots are never reused, while a reused one is likely to be reused again.
    The ends of many short sequences must not evict the prompt that they share.
    Snapshots that were not reused yet keep a quarter of the slots.
    """

    segments = 2

    def segment(self, snapshot: Snapshot) -> int:
        """0 for snapshots that were never resumed from, 1 for the others."""
        return 1 if snapshot.hits else 0

    def next_segment(self, sizes: tuple[int, ...]) -> int:
        """The reused ones only if they hold more than three quarters."""
        unused, used = sizes
        return 1 if used > 3 * unused else 0


class FlopAware(LeastRecentlyUsed):
    """Recency plus the weighted computation that a snapshot saves per byte.

    After Marconi (Pan et al., MLSys 2025), which adds alpha times the saved operations
    per byte to the recency of an entry.  A snapshot saves the computation from the
    nearest earlier snapshot to its own position.  It costs its slot and the KV after
    that snapshot which no other path shares, because this KV is useless without it.
    (The last segment alone would be too small a cost: a short segment at the end of a
    long path would always look cheap.)

    The logarithm of the saving is used: if the probability of reuse halves in equal
    times, the entries with the largest saving x probability are those with the largest
    recency + constant x log(saving).  KV without a snapshot after it is evicted first.
    """

    def __init__(
        self,
        cost: Callable[[float], float],
        *,
        token_bytes: float,
        slot_bytes: float,
        alpha: float = 0.5,
    ) -> None:
        """Create the policy.

        Args:
            cost: operations (or seconds, or tokens) to compute the first n tokens of
                a sequence, as an increasing function of n.
            token_bytes: KV of a token.
            slot_bytes: states of a sequence.
            alpha: the weight: e times the saving per byte counts as much as being
                used `alpha` snapshot lifetimes later; 0 is plain recency.  See
                `AlphaTuner`.
        """
        self.cost = cost
        self.token_bytes = token_bytes
        self.slot_bytes = slot_bytes
        self.alpha = alpha
        self._lifetime = float(_FIRST_LIFETIME * ADMISSION)
        self._usual = math.log(cost(_USUAL) / self._bytes(_USUAL))

    def with_alpha(self, alpha: float) -> FlopAware:
        """A policy for the same model with another weight and initial estimates."""
        return FlopAware(
            self.cost,
            token_bytes=self.token_bytes,
            slot_bytes=self.slot_bytes,
            alpha=alpha,
        )

    def leaf(self, node: Node) -> float:
        """As `snapshot`; leaves without a snapshot are evicted first."""
        if node.snapshot is None:
            return node.used_at - _FAR
        return node.used_at + self._worth(node)

    def snapshot(self, node: Node, snapshot: Snapshot) -> float:
        """Recency and the logarithm of the saving per byte."""
        if snapshot.is_superseded:
            return super().snapshot(node, snapshot)
        return snapshot.used_at + self._worth(node)

    def evicted(self, node: Node, now: int) -> None:
        """Update the average lifetime of snapshots."""
        if node.snapshot is not None:
            age = now - node.snapshot.used_at
            self._lifetime += (age - self._lifetime) / _LIFETIMES_REMEMBERED

    def _worth(self, node: Node) -> float:
        """The weighted saving per byte, in units of the tree's clock."""
        if not self.alpha:
            return 0.0
        saving = self.cost(node.end) - self.cost(node.resume_before())
        # Zero for a typical sequence, so that it does not depend on the lifetime.
        per_byte = math.log(saving / self._bytes(node.alone())) - self._usual
        return self.alpha * self._lifetime * per_byte

    def _bytes(self, tokens: float) -> float:
        return max(self.slot_bytes + self.token_bytes * tokens, 1.0)


_FIRST_LIFETIME = 50
"""Assumed lifetime of a snapshot, in admissions, before the first eviction."""
_LIFETIMES_REMEMBERED = 50
_USUAL = 4096.0
"""Tokens of a sequence with a typical saving per byte."""
_FAR = 1 << 60
"""Larger than any value of the clock."""
