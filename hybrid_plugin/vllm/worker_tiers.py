# SPDX-License-Identifier: Apache-2.0
"""What is behind a worker's host memory: all ranks learn of each other's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import torch
from vllm.distributed.parallel_state import get_tp_group

from hybrid_plugin.engine.rank_files import (
    FilesOfWeights,
    RanksOnDisk,
    describe,
    files_of,
    try_folder,
)
from hybrid_plugin.engine.rank_peers import RankPeers, RanksWithPeers
from hybrid_plugin.engine.rank_peers import describe as describe_peers
from hybrid_plugin.engine.rank_store import RanksInStore, RankStore
from hybrid_plugin.engine.rank_store import describe as describe_store
from hybrid_plugin.engine.rank_tiers import RankTiers
from hybrid_plugin.tiers.rates import DiskRates
from hybrid_plugin.vllm.activation import logger
from hybrid_plugin.vllm.bundle_identity import identity_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from hybrid_plugin.config import (
        DiskOptions,
        HybridConfig,
        PeerOptions,
        StoreOptions,
    )
    from hybrid_plugin.device.executor import Executor
    from hybrid_plugin.tiers.bundle import Layouts
    from hybrid_plugin.vllm.planning import HybridKVCacheConfig


@dataclass(frozen=True, slots=True)
class Ranks:
    """What the scheduler has to know of all ranks."""

    disk: RanksOnDisk | None = None
    peers: RanksWithPeers | None = None
    store: RanksInStore | None = None


@dataclass(frozen=True, slots=True)
class _Rank:
    """One rank, before anything is behind its host memory."""

    executor: Executor
    vllm_config: VllmConfig
    config: HybridKVCacheConfig
    layouts: Layouts

    def files(self, disk: DiskOptions) -> tuple[FilesOfWeights, RanksOnDisk]:
        group = get_tp_group()
        identity = identity_of(self.vllm_config, self.config, disk, group.rank_in_group)
        own = try_folder(disk, identity)
        everyone = _of_all((identity.rank_name, self.layouts, own))
        least = DiskRates(
            min(rates.write_bytes_per_second for *_, rates in everyone),
            min(rates.read_bytes_per_second for *_, rates in everyone),
        )
        logger.info("%s", describe(disk, least, group.world_size))
        ranks = RanksOnDisk(
            identity,
            {name: of_rank for name, of_rank, _ in everyone},
            least.read_bytes_per_second,
        )
        assert self.executor.host is not None, "files are behind it"
        return files_of(self.executor.host, disk, identity, self.layouts), ranks

    def store(self, options: StoreOptions) -> tuple[RankStore, RanksInStore]:
        group = get_tp_group()
        rank = group.rank_in_group
        identity = identity_of(self.vllm_config, self.config, options, rank)
        assert self.executor.host is not None, "the store is behind it"
        store = RankStore(self.executor.host, options, identity, self.layouts)
        everyone = _of_all((identity.rank_name, self.layouts, store.rates))
        least = DiskRates(
            min(rates.write_bytes_per_second for *_, rates in everyone),
            min(rates.read_bytes_per_second for *_, rates in everyone),
        )
        logger.info("%s", describe_store(options, least, group.world_size))
        layouts = {name: of_rank for name, of_rank, _ in everyone}
        return store, RanksInStore(identity, layouts, least.read_bytes_per_second)

    def peers(self, options: PeerOptions) -> tuple[RankPeers, RanksWithPeers]:
        rank = get_tp_group().rank_in_group
        identity = identity_of(self.vllm_config, self.config, options, rank)
        assert self.executor.host is not None, "peers read from it"
        peers = RankPeers(self.executor.host, options, identity, self.layouts)
        everyone = _of_all((peers.port, uuid4().hex))
        ports = tuple(port for port, _ in everyone)
        logger.info("%s", describe_peers(options, ports))
        return peers, RanksWithPeers(identity, options.host, ports, everyone[0][1])


def attach(
    executor: Executor,
    vllm_config: VllmConfig,
    config: HybridKVCacheConfig,
    options: HybridConfig,
    layouts: Layouts,
) -> tuple[RankTiers, Ranks]:
    """Put what the options name behind the host memory of this rank.

    All ranks call it at once.

    Args:
        executor: of the pools, with host memory.
        vllm_config: of the engine.
        config: of the pools.
        options: of the plugin.
        layouts: of this rank's rows.

    Returns:
        What moves bundles, and what the scheduler has to know.

    Raises:
        ConfigError: if the folder, NIXL, the address or the store cannot be used, or
            the model cannot be told from others.
    """
    rank = _Rank(executor, vllm_config, config, layouts)
    files, on_disk = (None, None) if options.disk is None else rank.files(options.disk)
    peers, with_peers = (
        (None, None) if options.peers is None else rank.peers(options.peers)
    )
    store, in_store = (
        (None, None) if options.store is None else rank.store(options.store)
    )
    tiers = RankTiers(executor, _greatest, files=files, peers=peers, store=store)
    return tiers, Ranks(on_disk, with_peers, in_store)


def _of_all(own: Any) -> list[Any]:
    """What each rank gives, in their order; all call it at once."""
    group = get_tp_group()
    everyone: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(everyone, own, group=group.cpu_group)
    return everyone


def _greatest(numbers: list[int]) -> list[int]:
    """The greatest of all ranks, element by element."""
    group = get_tp_group()
    if group.world_size == 1:
        return numbers
    found = torch.tensor(numbers, dtype=torch.int64)
    torch.distributed.all_reduce(
        found, torch.distributed.ReduceOp.MAX, group=group.cpu_group
    )
    return [int(number) for number in found]
