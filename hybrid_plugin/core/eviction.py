# SPDX-License-Identifier: Apache-2.0
"""In which order cached KV and snapshots go when room is needed.

A policy gives what is cached a priority, and the least goes first.  The tree
asks for it when a node or a snapshot is used, and once more before it evicts:
a priority that has grown meanwhile counts, one that has shrunk does not.
"""

from __future__ import annotations

import math

from hybrid_plugin.core.node import Node, Snapshot


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
