# SPDX-License-Identifier: Apache-2.0
"""Hot snapshots: those that many sequences currently resume from."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from hybrid_plugin.core.tree.node import Node, Snapshot, admissions_between


class Retention:
    """Decides which snapshots are hot, and finds them without a search.

    A snapshot is hot if it is shared and was used within the last n admissions, where
    n is the number of live sequences at the last one.  Hot snapshots are evicted last.

    Nodes with a shared snapshot are kept in the order of their last use, so the hot
    ones are at one end.  Every change takes constant time.
    """

    def __init__(self) -> None:
        """No snapshot was used yet."""
        self.live = 0
        """Live sequences at the last admission, without the admitted one."""
        self._shared: OrderedDict[Node, None] = OrderedDict()

    def used(self, node: Node) -> None:
        """Record that the snapshot of `node` was taken, taken again or resumed from.

        Call it whenever `Snapshot.used_at` was set, in the order of these values.
        """
        self._shared.pop(node, None)
        if node.snapshot is not None and node.snapshot.is_shared:
            self._shared[node] = None

    def forget(self, node: Node) -> None:
        """Record that the snapshot of `node` left or is not expected to be reused."""
        self._shared.pop(node, None)

    def clear(self) -> None:
        """Record that all snapshots left."""
        self._shared.clear()

    def is_hot(self, snapshot: Snapshot, now: int) -> bool:
        """Whether a snapshot is hot at clock value `now`."""
        return snapshot.is_shared and self._is_recent(snapshot, now)

    def hot(self, now: int) -> Iterator[Node]:
        """Nodes with an unlocked hot snapshot, the most recently used first.

        Takes time linear in the nodes returned and in the locked hot snapshots, of
        which there is one for each admission in progress.

        Args:
            now: value of the tree's clock.
        """
        for node in reversed(self._shared):
            snapshot = node.snapshot
            assert snapshot is not None, "a node without one was forgotten"
            if not self._is_recent(snapshot, now):
                return
            if not node.state_lock:
                yield node

    def _is_recent(self, snapshot: Snapshot, now: int) -> bool:
        return admissions_between(snapshot.used_at, now) < self.live
