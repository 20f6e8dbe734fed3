# SPDX-License-Identifier: Apache-2.0
"""In which order cached KV and snapshots go when room is needed.

A policy gives what is cached a priority, and the least goes first.  The tree
asks for it when a node or a snapshot is used, and once more before it evicts:
a priority that has grown meanwhile counts, one that has shrunk does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from hybrid_plugin.core.node import ADMISSION, Node, Snapshot


class LeastRecentlyUsed:
    """Plain recency, and what every other policy builds on."""

    segments = 1
    """Groups of snapshots, each in an order of its own."""

    def leaf(self, node: Node) -> float:
        """Priority of the KV of an unlocked leaf."""
        return node.used_at

    def snapshot(self, node: Node, snapshot: Snapshot) -> float:
        """Priority of a snapshot among those of its segment."""
        return -math.inf if snapshot.is_superseded else snapshot.used_at

    def segment(self, snapshot: Snapshot) -> int:
        """Which segment a snapshot belongs to."""
        return 0

    def next_segment(self, sizes: tuple[int, ...]) -> int:
        """The segment that the next snapshot to go is taken from.

        Args:
            sizes: unlocked snapshots per segment; where the one that is chosen
                is empty, the tree takes another.
        """
        return 0

    def evicted(self, node: Node, now: int) -> None:
        """Hear that a snapshot was evicted for want of room, at the tree's clock."""


class UsedFirst(LeastRecentlyUsed):
    """Snapshots that were resumed from before outlive those that were not.

    Most snapshots are never resumed from, and those that were will be again:
    the ends of many short sequences must not drive out a prompt they share.
    New ones keep a quarter of the room, to have their chance.
    """

    segments = 2

    def segment(self, snapshot: Snapshot) -> int:
        """0 for those that nobody resumed from yet, 1 for the others."""
        return 1 if snapshot.hits else 0

    def next_segment(self, sizes: tuple[int, ...]) -> int:
        """The used ones only where they hold more than three quarters."""
        unused, used = sizes
        return 1 if used > 3 * unused else 0


class FlopAware(LeastRecentlyUsed):
    """Recency, weighed with the computation that a snapshot saves.

    After Marconi (Pan et al., MLSys 2025), which adds to the recency of an entry
    alpha times the operations that it saves per byte.  A snapshot saves what it
    takes to get there from the nearest one before it.  All take one slot, so
    bytes make no difference between them.

    The logarithm counts: if the chance of being used again falls by half in equal
    times, what is to be kept is what has the greatest saving x chance, and that is
    an order by recency + constant x log(saving).  KV that no snapshot lies behind
    resumes nothing, and goes before any other.
    """

    def __init__(self, cost: Callable[[float], float], alpha: float = 0.1) -> None:
        """Create the policy.

        Args:
            cost: operations (or seconds, or tokens) that it takes to compute the
                first so many tokens of a sequence; it must grow.
            alpha: lifetimes of a snapshot that e times the saving are worth;
                0 is plain recency.  See `AlphaTuner`.
        """
        self.cost = cost
        self.alpha = alpha
        self._lifetime = float(_FIRST_LIFETIME * ADMISSION)

    def leaf(self, node: Node) -> float:
        """Recency, behind all leaves without a snapshot."""
        return node.used_at if node.snapshot is not None else node.used_at - _FAR

    def snapshot(self, node: Node, snapshot: Snapshot) -> float:
        """Recency and the logarithm of the saving."""
        if snapshot.is_superseded or not self.alpha:
            return super().snapshot(node, snapshot)
        saving = self.cost(node.end) - self.cost(node.resume_before())
        return snapshot.used_at + self.alpha * self._lifetime * math.log(saving)

    def evicted(self, node: Node, now: int) -> None:
        """Follow how long snapshots last."""
        if node.snapshot is not None:
            age = now - node.snapshot.used_at
            self._lifetime += (age - self._lifetime) / _LIFETIMES_REMEMBERED


_FIRST_LIFETIME = 50
"""Admissions that a snapshot is taken to last before any was evicted."""
_LIFETIMES_REMEMBERED = 50
_FAR = 1 << 60
"""More than any clock shows."""
