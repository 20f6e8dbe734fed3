# SPDX-License-Identifier: Apache-2.0
"""A worker's host memory: taken when the pools are there, and measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from vllm.distributed.parallel_state import get_tp_group

from hybrid_plugin.config import ConfigError
from hybrid_plugin.vllm.activation import logger

if TYPE_CHECKING:
    from hybrid_plugin.core.tiers.host_plan import HostPlan
    from hybrid_plugin.device.executor import Executor


def attach(executor: Executor, plan: HostPlan) -> float:
    """Take the host memory of this rank.  All ranks call it at once.

    Args:
        executor: of the pools.
        plan: of the rows.

    Returns:
        Bytes in a second that come from there to the device of any rank at least, while
        all of them copy.

    Raises:
        ConfigError: if there is no such memory.
    """
    try:
        host = executor.attach_host(plan)
    except MemoryError as error:
        raise ConfigError(f"host_memory: {error}; lower it.") from error
    found = host.measure()
    logger.info(
        "hybrid-plugin copies %.1f GB to host memory in a second, and %.1f GB back.",
        found.store_bytes_per_second / 1e9,
        found.load_bytes_per_second / 1e9,
    )
    least = torch.tensor(found.load_bytes_per_second, dtype=torch.float64)
    torch.distributed.all_reduce(
        least, torch.distributed.ReduceOp.MIN, group=get_tp_group().cpu_group
    )
    return float(least)
