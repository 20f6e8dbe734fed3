# SPDX-License-Identifier: Apache-2.0
"""In which order cached KV and snapshots go when room is needed.

A policy gives what is cached a priority, and the least goes first.  The tree
asks for it when a node or a snapshot is used, and once more before it evicts:
a priority that has grown meanwhile counts, one that has shrunk does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from hybrid_plugin.core.tree.node import ADMISSION, Node, Snapshot


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
    """Recency, weighed with the computation that a snapshot saves per byte.

    After Marconi (Pan et al., MLSys 2025), which adds to the recency of an entry
    alpha times the operations that it saves per byte.  A snapshot saves what it
    takes to get there from the nearest one before it.  It costs its slot and the
    KV behind that one which no other path shares: without the snapshot that KV
    resumes nothing.  (The last segment alone would be too little: a short one at
    the end of a long path would look like a bargain for ever.)

    The logarithm counts: if the chance of being used again falls by half in equal
    times, what is to be kept is what has the greatest saving x chance, and that is
    an order by recency + constant x log(saving).  KV that no snapshot lies behind
    goes before any other.
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
            cost: operations (or seconds, or tokens) that it takes to compute the
                first so many tokens of a sequence; it must grow.
            token_bytes: KV of a token.
            slot_bytes: states of a sequence.
            alpha: lifetimes of a snapshot that e times the saving per byte are
                worth; 0 is plain recency.  See `AlphaTuner`.
        """
        self.cost = cost
        self.token_bytes = token_bytes
        self.slot_bytes = slot_bytes
        self.alpha = alpha
        self._lifetime = float(_FIRST_LIFETIME * ADMISSION)
        self._usual = math.log(cost(_USUAL) / self._bytes(_USUAL))

    def with_alpha(self, alpha: float) -> FlopAware:
        """A policy for the same model with another weight, and nothing learnt."""
        return FlopAware(
            self.cost,
            token_bytes=self.token_bytes,
            slot_bytes=self.slot_bytes,
            alpha=alpha,
        )

    def leaf(self, node: Node) -> float:
        """As `snapshot`, behind all leaves without one."""
        if node.snapshot is None:
            return node.used_at - _FAR
        return node.used_at + self._worth(node)

    def snapshot(self, node: Node, snapshot: Snapshot) -> float:
        """Recency and the logarithm of the saving per byte."""
        if snapshot.is_superseded:
            return super().snapshot(node, snapshot)
        return snapshot.used_at + self._worth(node)

    def evicted(self, node: Node, now: int) -> None:
        """Follow how long snapshots last."""
        if node.snapshot is not None:
            age = now - node.snapshot.used_at
            self._lifetime += (age - self._lifetime) / _LIFETIMES_REMEMBERED

    def _worth(self, node: Node) -> float:
        """What the saving per byte is worth, in units of the tree's clock."""
        if not self.alpha:
            return 0.0
        saving = self.cost(node.end) - self.cost(node.resume_before())
        # Of a usual sequence it is 0, so that it keeps when lifetimes change.
        per_byte = math.log(saving / self._bytes(node.alone())) - self._usual
        return self.alpha * self._lifetime * per_byte

    def _bytes(self, tokens: float) -> float:
        return max(self.slot_bytes + self.token_bytes * tokens, 1.0)


_FIRST_LIFETIME = 50
"""Admissions that a snapshot is taken to last before any was evicted."""
_LIFETIMES_REMEMBERED = 50
_USUAL = 4096.0
"""Tokens of a sequence whose saving per byte is nothing special."""
_FAR = 1 << 60
"""More than any clock shows."""
