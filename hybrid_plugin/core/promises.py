# SPDX-License-Identifier: Apache-2.0
"""Promises: gives them to snapshots, and takes them back when they are over.

An application that says when a conversation goes on promises one more use of what the
conversation leaves in the tree.  A promise is no lock: the eviction policy counts with
the use until it happened, or until the TTL ended without it.
"""

from __future__ import annotations

from collections.abc import Iterable

from hybrid_plugin.core.policy.pace import Pace
from hybrid_plugin.core.policy.priority_queue import PriorityOrder
from hybrid_plugin.core.stats import CacheStats
from hybrid_plugin.core.tree.node import Node
from hybrid_plugin.core.tree.promise import Promise
from hybrid_plugin.core.tree.radix import MambaRadixCache
from hybrid_plugin.core.tree.snapshot import Snapshot, SnapshotKind

PROMISED_KINDS = frozenset(
    (SnapshotKind.TURN_END, SnapshotKind.PROMPT_END, SnapshotKind.REQUESTED)
)
"""Kinds of snapshots that serve the conversation itself, or that it named."""


class Promises:
    """All promises of one cache, the time, and how many of them were kept."""

    def __init__(self, tree: MambaRadixCache, stats: CacheStats) -> None:
        """Nothing is promised yet.

        Args:
            tree: with the snapshots.
            stats: where promises are counted that were kept or broken.
        """
        self._certainty = tree.eviction.certainty
        self._tree = tree
        self._stats = stats
        self._nodes: dict[Promise, list[Node]] = {}
        """Whose snapshots each promise holds for, if any."""
        self._ending: PriorityOrder[Promise] = PriorityOrder()
        """Promises of requests that ended, which hold for a snapshot, by their end."""

    @property
    def pace(self) -> Pace:
        """The time, and how many admissions fit into it."""
        return self._certainty.pace

    def make(self, ttl: float, positions: Iterable[int]) -> Promise:
        """The promise of a request that begins.

        Args:
            ttl: seconds from the end of the request, above 0.
            positions: that it named, at page ends.
        """
        return Promise(ttl, self.pace, frozenset(positions))

    def pass_time(self, now: float) -> None:
        """Set the time; promises whose TTL ended count no more."""
        self.pace.pass_to(now)
        while (first := self._ending.first()) is not None and not first.holds:
            self._stats.promises_broken += not first.is_settled
            self._settle(first, broken=1.0)
            for node in self.nodes_of(first):
                self._take_back(first, node)

    def nodes_of(self, promise: Promise) -> tuple[Node, ...]:
        """Nodes whose snapshots a promise holds for."""
        return tuple(self._nodes.get(promise, ()))

    def give(self, promise: Promise, node: Node) -> None:
        """Have a promise hold for the snapshot of `node`, unless a longer one does."""
        snapshot = node.snapshot
        if snapshot is None or snapshot.promise is promise:
            return
        before = snapshot.promise
        if before is not None:
            if before.ends > promise.ends:
                return
            self._take_back(before, node)
        snapshot.promise = promise
        self._nodes.setdefault(promise, []).append(node)
        self._tree.rank_again(node)

    def begin_ttl(self, promise: Promise, end: Node | None) -> None:
        """Start the TTL: the request ended, and its tokens end at `end`.

        The promise holds for the snapshot there, for those that the request took, and
        for those at the positions that it named.
        """
        promise.until = self.pace.now + promise.ttl
        node = end
        while node is not None:
            if node is end or node.end in promise.positions:
                self.give(promise, node)
            node = node.parent
        for given in self.nodes_of(promise):
            self._tree.rank_again(given)
            self._ending.put(promise, promise.until)

    def used(self, node: Node, *, resumed: bool) -> None:
        """Note that a sequence resumed from the snapshot of `node`.

        Its promise is kept, and so are those of the same conversation before it.

        Args:
            node: with a snapshot.
            resumed: whether the sequence itself had left it, before a preemption.
        """
        promise = None if node.snapshot is None else node.snapshot.promise
        if promise is None:
            return
        if not resumed:
            self._stats.promised_hits += 1
            self._settle(promise, kept=1.0)
        above: Node | None = node
        while above is not None:
            if above.snapshot is not None and above.snapshot.promise is promise:
                self._take_back(promise, above)
            above = above.parent

    def evicted(self, node: Node, snapshot: Snapshot | None) -> None:
        """Note that `node` lost its snapshot, if it did.

        Whether a promise would have been kept is not known then, only for how long it
        was not.
        """
        promise = None if snapshot is None else snapshot.promise
        if promise is None:
            return
        self._take_back(promise, node)
        if promise not in self._nodes and not promise.is_settled:
            self._stats.promises_evicted += 1
            self._settle(promise, broken=promise.elapsed)

    def clear(self) -> None:
        """Forget what was promised of content that is about to be forgotten."""
        self._nodes.clear()
        self._ending = PriorityOrder()

    def _take_back(self, promise: Promise, node: Node) -> None:
        nodes = self._nodes[promise]
        nodes.remove(node)
        if node.snapshot is not None and node.snapshot.promise is promise:
            node.snapshot.promise = None
            self._tree.rank_again(node)
        if not nodes:
            del self._nodes[promise]
            self._ending.discard(promise)

    def _settle(
        self, promise: Promise, *, kept: float = 0.0, broken: float = 0.0
    ) -> None:
        if promise.is_settled:
            return
        promise.is_settled = True
        trust = self._certainty.trust(promise.magnitude)
        trust.observe(kept=kept, broken=broken)
