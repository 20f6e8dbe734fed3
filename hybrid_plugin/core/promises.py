# SPDX-License-Identifier: Apache-2.0
"""Promises: gives them to snapshots, and takes them back when they are over.

An application that says when a conversation goes on promises one more use of what the
conversation leaves in the tree.  A promise is no lock: the eviction policy counts with
the use until it happened, or until the TTL ended without it.
"""

from __future__ import annotations

from hybrid_plugin.core.policy.aged_order import AgedOrder, Rank
from hybrid_plugin.core.policy.eviction import ConstantRates
from hybrid_plugin.core.stats import CacheStats
from hybrid_plugin.core.tree.node import Node
from hybrid_plugin.core.tree.promise import Promise
from hybrid_plugin.core.tree.radix import MambaRadixCache
from hybrid_plugin.core.tree.snapshot import Snapshot, SnapshotKind

_CONVERSATION = frozenset((SnapshotKind.TURN_END, SnapshotKind.PROMPT_END))
"""Kinds of snapshots that serve the conversation itself."""


def promise_for(
    promise: Promise | None, kind: SnapshotKind, position: int
) -> Promise | None:
    """A sequence's promise, if it holds for a snapshot of its own; None if not.

    It does for those that serve the conversation, and for those that it named; not for
    one that others asked for.

    Args:
        promise: of the sequence.
        kind: of the snapshot.
        position: the number of tokens that it was taken after.
    """
    if promise is None or kind in _CONVERSATION or position in promise.positions:
        return promise
    return None


class Promises:
    """All promises of one cache."""

    def __init__(self, tree: MambaRadixCache, stats: CacheStats) -> None:
        """Nothing is promised yet.

        Args:
            tree: with the snapshots.
            stats: where promises are counted that were kept or broken.
        """
        self.pace = tree.eviction.ttls.pace
        self._ttls = tree.eviction.ttls
        self._tree = tree
        self._stats = stats
        self._nodes: dict[Promise, list[Node]] = {}
        """Whose snapshots each promise holds for, if any."""
        self._ending: AgedOrder[Promise] = AgedOrder(ConstantRates())
        """Promises of requests that ended, which hold for a snapshot, by their end."""

    def pass_time(self, now: float) -> None:
        """Set the time; promises whose TTL ended count no more."""
        self.pace.pass_to(now)
        while (first := self._ending.first(0)) is not None:
            promise, until = first
            if until > self.pace.now:
                return
            self._stats.promises_broken += not promise.is_settled
            self._settle(promise, broken=1.0)
            for node in self.nodes_of(promise):
                self._take_back(promise, node)

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
            if before.ends(self.pace.now) > promise.ends(self.pace.now):
                return
            self._take_back(before, node)
        snapshot.promise = promise
        self._nodes.setdefault(promise, []).append(node)
        self._tree.rank(node)

    def begin_ttl(self, promise: Promise, end: Node | None) -> None:
        """Start the TTL: the request ended, and its tokens end at `end`.

        The promise holds for the snapshot there, for those that the request took, and
        for those at the positions that it named.  Their ages count from now on.
        """
        promise.until = self.pace.now + promise.ttl
        node = end
        while node is not None:
            if node is end or node.end in promise.positions:
                self.give(promise, node)
            node = node.parent
        for given in self.nodes_of(promise):
            self._tree.touch_snapshot(given)
            self._ending.put(promise, Rank(None, 0, promise.until), 0)

    def used(self, node: Node, *, resumed: bool) -> None:
        """Note that a sequence resumed from the snapshot of `node`, or builds on it.

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
            left = max(promise.ends(self.pace.now) - self.pace.now, 0.0)
            self._settle(promise, broken=1.0 - left / promise.ttl)

    def clear(self) -> None:
        """Forget what was promised of content that is about to be forgotten."""
        self._nodes.clear()
        self._ending = AgedOrder(ConstantRates())

    def _take_back(self, promise: Promise, node: Node) -> None:
        nodes = self._nodes[promise]
        nodes.remove(node)
        if node.snapshot is not None and node.snapshot.promise is promise:
            node.snapshot.promise = None
            self._tree.rank(node)
        if not nodes:
            del self._nodes[promise]
            self._ending.discard(promise, 0)

    def _settle(
        self, promise: Promise, *, kept: float = 0.0, broken: float = 0.0
    ) -> None:
        if not promise.is_settled:
            promise.is_settled = True
            self._ttls.trust(promise.magnitude).observe(kept=kept, broken=broken)
