# SPDX-License-Identifier: Apache-2.0
"""A worker's files: its folder is tried, and all ranks learn of each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.parallel_state import get_tp_group

from hybrid_plugin.engine.rank_files import (
    RankFiles,
    RanksOnDisk,
    describe,
    try_folder,
)
from hybrid_plugin.tiers.rates import DiskRates
from hybrid_plugin.vllm.activation import logger
from hybrid_plugin.vllm.bundle_identity import identity_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from hybrid_plugin.config import DiskOptions
    from hybrid_plugin.device.executor import Executor
    from hybrid_plugin.tiers.bundle import Layouts
    from hybrid_plugin.vllm.planning import HybridKVCacheConfig


def attach(
    executor: Executor,
    vllm_config: VllmConfig,
    config: HybridKVCacheConfig,
    disk: DiskOptions,
    layouts: Layouts,
) -> tuple[RankFiles, RanksOnDisk]:
    """Put files behind the host memory of this rank.  All ranks call it at once.

    Args:
        executor: of the pools, with host memory.
        vllm_config: of the engine.
        config: of the pools.
        disk: the option.
        layouts: of this rank's rows.

    Returns:
        What moves bundles, and what the scheduler has to know.

    Raises:
        ConfigError: if the folder cannot be used, or the model cannot be told from
            others.
    """
    group = get_tp_group()
    identity = identity_of(vllm_config, config, disk, group.rank_in_group)
    own = try_folder(disk, identity)
    everyone: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(
        everyone, (identity.rank_name, layouts, own), group=group.cpu_group
    )
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
    return RankFiles(executor, disk, identity, layouts, _greatest), ranks


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
