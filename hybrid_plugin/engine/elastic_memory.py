# SPDX-License-Identifier: Apache-2.0
"""Which memory the pools of an engine share, if they do: equal for every engine.

Messages are without a prefix; adapters put their own before them.
"""

from __future__ import annotations

import sys
from logging import Logger
from typing import TYPE_CHECKING

from hybrid_plugin.config import ConfigError, HybridConfig
from hybrid_plugin.core.commands import Pool
from hybrid_plugin.core.memory.elastic_plan import ElasticPlan
from hybrid_plugin.engine import driver_bindings
from hybrid_plugin.engine.memory_blocks import block_bytes

if TYPE_CHECKING:  # plans are made without PyTorch
    import torch

    from hybrid_plugin.device.virtual_arena import VirtualArena

__all__ = [
    "block_bytes",
    "bound",
    "describe",
    "is_wanted",
    "limited",
    "obstacle",
    "take",
]


def obstacle(device_type: str) -> str | None:
    """Why memory cannot move on this machine, to follow "elastic pools".

    Args:
        device_type: "cpu" or "cuda", as torch calls it.
    """
    if device_type == "cpu":
        if sys.platform == "linux":  # which takes memory back when it is told to
            return None
        return "need Linux on a CPU; set elastic to false."
    if device_type != "cuda":
        return f"are not for devices of the type {device_type}; set elastic to false."
    if not driver_bindings.are_installed():
        return "need NVIDIA's cuda-bindings; install it, or set elastic to false."
    return None


def is_wanted(
    options: HybridConfig,
    hindrance: str | None,
    log: Logger | None = None,
    *,
    states_alone: bool,
) -> bool:
    """Whether pools share their memory.

    A model of states alone has one pool, which has all the memory: there is nothing to
    share, whatever the options ask for.

    Args:
        options: of the plugin.
        hindrance: what the machine or the engine has against it, if anything.
        log: where to say what stands against it, if it was not asked for.
        states_alone: whether no layer of the model attends, and some keep states.

    Raises:
        ConfigError: if the options ask for what cannot be done.
    """
    if states_alone or not options.is_elastic:
        return False
    if hindrance is not None and options.elastic:
        raise ConfigError(f"elastic pools {hindrance}")
    if hindrance is not None and log is not None:
        log.info(
            "hybrid-plugin gives each pool its own memory: elastic pools %s", hindrance
        )
    return hindrance is None


def bound(options: HybridConfig, *known: int | None) -> int:
    """Bytes that no rank's budget exceeds.

    Args:
        options: of the plugin.
        known: the device's memory and limits of the engine's own, if any.
    """
    limits = (options.gpu_memory_budget, *known)
    return min(limit for limit in limits if limit is not None)


def limited(available: int, options: HybridConfig) -> int:
    """Bytes for both pools together, of those that are free."""
    if options.gpu_memory_budget is None:
        return available
    return min(available, options.gpu_memory_budget)


def take(
    available: int,
    options: HybridConfig,
    device: torch.device,
    *,
    block_bytes: int,
    log: Logger,
    stages: int = 1,
) -> VirtualArena:
    """Take a rank's cache memory from the system, or as much of it as there is.

    Args:
        available: bytes that the engine found free.
        options: of the plugin.
        device: of this rank.
        block_bytes: of the memory, equal on every rank.
        log: where to say how much less there was.
        stages: of a pipeline.  With several, streams beside the model's wait for other
            ranks, and none of them uses the pools: `host_memory` is not served there.

    Raises:
        ConfigError: if there is next to none.
    """
    budget = limited(available, options)
    if budget < 2 * block_bytes:
        raise ConfigError(
            f"There are {budget / 2**20:.1f} MiB for the cache, less than two blocks "
            f"of {block_bytes / 2**20:.1f} MiB: give the engine more of the device's "
            "memory."
        )
    memory: VirtualArena
    if device.type == "cpu":
        from hybrid_plugin.device.host_arena import HostArena

        memory = HostArena(budget, block_bytes)
    else:
        from hybrid_plugin.device.cuda_arena import CudaArena

        memory = CudaArena(budget, device, block_bytes)
    memory.waits_for_stream = stages > 1
    refusal = memory.hold(memory.usable, partly=True)
    if refusal is not None:
        log.warning(
            "hybrid-plugin: %s; the cache goes on with %.1f MiB.",
            refusal,
            memory.held / 2**20,
        )
    return memory


def describe(plan: ElasticPlan) -> str:
    """The plan in one line, for the log."""
    granules = ", ".join(
        f"{pool.per_granule} {Pool.noun(name)} of {name} "
        f"({pool.granule_bytes / 2**20:.1f} MiB)"
        for name, pool in plan.pools.items()
    )
    lie = "side by side" if plan.layout.packed else "apart"
    return (
        f"hybrid-plugin pools share {plan.budget / 2**20:.1f} MiB: memory moves in "
        f"granules of {granules}; a page holds {plan.layout.page_size} tokens, and "
        f"its layers lie {lie}"
    )
