# SPDX-License-Identifier: Apache-2.0
"""What is behind the host memory of one rank: its files, its peers, a store."""

from __future__ import annotations

from hybrid_plugin.device.executor import Executor
from hybrid_plugin.engine.rank_files import FilesOfWeights
from hybrid_plugin.engine.rank_peers import RankPeers
from hybrid_plugin.engine.rank_store import RankStore
from hybrid_plugin.tiers.agreement import Outcome, Reduce
from hybrid_plugin.tiers.disk import DiskTier
from hybrid_plugin.tiers.peers.tier import PeerTier
from hybrid_plugin.tiers.store.tier import StoreTier
from hybrid_plugin.tiers.transfers import RankTransfers, Source


class RankTiers:
    """Moves bundles between host rows of a rank and what is behind them."""

    def __init__(
        self,
        executor: Executor,
        all_reduce: Reduce,
        *,
        files: FilesOfWeights | None = None,
        peers: RankPeers | None = None,
        store: RankStore | None = None,
    ) -> None:
        """Have a rank's commands run.

        Args:
            executor: of the rank, with host memory.
            all_reduce: the greatest of all ranks, element by element.
            files: of the rank, where there is a disk.
            peers: of the rank, where there are any.
            store: of the rank, where one is shared, and no disk.
        """
        assert executor.host is not None, "it is behind host memory"
        sources: dict[str, Source] = {}
        if files is not None:
            sources[DiskTier.name] = files
        if peers is not None:
            sources[PeerTier.name] = peers.source
        if store is not None:
            files = sources[StoreTier.name] = store.files
        lender = None if peers is None else peers.leases
        self._files, self._peers, self._store = files, peers, store
        self._transfers = RankTransfers(
            executor.host,
            files,
            sources,
            lender=lender,
            decliner=None if peers is None else peers.source,
        )
        self._all_reduce = all_reduce
        self.updates = 0
        """Of the weights, since the start."""
        executor.transfers = self._transfers

    def weights_changed(self) -> None:
        """Note that the weights are no longer those that were loaded."""
        self.updates += 1
        if self._files is not None:
            self._files.updates += 1
        if self._peers is not None:
            self._peers.weights_changed()

    def settle(self) -> list[Outcome]:
        """What all ranks are done with since the last call; see `RankTransfers`."""
        return self._transfers.settle(self._all_reduce)

    def wait(self, seconds: float) -> None:
        """See `RankTransfers.wait`."""
        self._transfers.wait(seconds)

    def close(self) -> None:
        """Finish what is at hand; nothing touches host rows after."""
        if self._peers is not None:
            self._peers.stop()
        self._transfers.close()
        if self._peers is not None:
            self._peers.close()
        if self._store is not None:
            self._store.close()
