# SPDX-License-Identifier: Apache-2.0
"""The host tier's memory on each of SGLang's ranks."""

from __future__ import annotations

import torch
from sglang.srt.runtime_context import get_parallel

from hybrid_plugin.config import ConfigError, HybridConfig
from hybrid_plugin.core.cache import HybridCache
from hybrid_plugin.device.executor import Executor
from hybrid_plugin.device.host.ring import rings_for
from hybrid_plugin.engine import host_memory
from hybrid_plugin.sglang import elastic, pipeline
from hybrid_plugin.sglang.log import logger


def device_bytes(options: HybridConfig, device: torch.device) -> int:
    """Bytes of GPU memory that copies to the host and back pass through.

    Args:
        options: of the plugin.
        device: of the rank.  A CPU's own memory is not short.
    """
    if options.host_memory is None or device.type == "cpu":
        return 0
    return rings_for(device).bytes


def room(options: HybridConfig) -> int | None:
    """Bytes that the host memory of every rank may have, if no option says how many.

    Args:
        options: of the plugin.
    """
    here = get_parallel()
    ranks = here.launch_world_size * here.dp_size // here.nnodes
    own = host_memory.room_for(options, max(ranks, 1))
    return None if own is None else elastic.least_of_all_ranks(own)


def attach(cache: HybridCache, executor: Executor) -> None:
    """Take the memory on this rank, and find how fast it is loaded on the slowest one.

    Args:
        cache: with a host tier.
        executor: of all pools of this rank, those of a draft model too.

    Raises:
        ConfigError: if the memory cannot be had, or a page or slot has more bytes than
            were planned.
    """
    assert cache.host is not None and cache.rates is not None, "there is a host tier"
    try:
        copies = executor.attach_host(cache.host.plan)
    except MemoryError as error:
        raise ConfigError(f"host_memory: {error}; lower it.") from error
    except ValueError as error:
        raise ConfigError(f"host_memory: {error}; leave it out.") from error
    found = copies.measure()
    if pipeline.speaks():
        logger.info(
            "hybrid-plugin copies %.1f GB to host memory in a second, and %.1f GB "
            "back.",
            found.store_bytes_per_second / 1e9,
            found.load_bytes_per_second / 1e9,
        )
    least = elastic.least_of_all_ranks(int(found.load_bytes_per_second))
    cache.rates.load_bytes_per_second = least
