# SPDX-License-Identifier: Apache-2.0
"""Elastic pools in vLLM: which memory the workers take, in which blocks.

Every process of an engine comes to the same answers from the configuration:
the workers, which take the memory, and the engine core, which plans for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybrid_plugin.device.virtual_arena import VirtualArena
from hybrid_plugin.engine import elastic_memory
from hybrid_plugin.vllm.activation import keeps_states_alone, logger, read_options

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig


def is_wanted(vllm_config: VllmConfig) -> bool:
    """Whether the pools of this engine share their memory.

    Raises:
        ConfigError: if the options ask for it and the system cannot do it.
    """
    return elastic_memory.is_wanted(
        read_options(vllm_config),
        elastic_memory.obstacle(device_type()),
        states_alone=keeps_states_alone(vllm_config.model_config),
    )


def take_memory(
    vllm_config: VllmConfig, available: int, device: torch.device
) -> VirtualArena:
    """Take this rank's cache memory from the system, or as much as there is.

    Args:
        vllm_config: of the engine.
        available: bytes that vLLM found free.
        device: of this rank.
    """
    return elastic_memory.take(
        available,
        read_options(vllm_config),
        device,
        block_bytes=block_bytes(vllm_config),
        log=logger,
        stages=vllm_config.parallel_config.pipeline_parallel_size,
    )


def block_bytes(vllm_config: VllmConfig) -> int:
    """Bytes of a block of that memory, equal on every rank."""
    from vllm.platforms import current_platform

    bound = elastic_memory.bound(
        read_options(vllm_config),
        vllm_config.cache_config.kv_cache_memory_bytes,
        current_platform.get_device_total_memory(),
    )
    return elastic_memory.block_bytes(bound, device_type())


def most_cache_bytes(vllm_config: VllmConfig, weights: int) -> int:
    """Bytes that the cache of a rank has at most, before it is measured.

    Args:
        vllm_config: of the engine.
        weights: bytes of the rank's weights.
    """
    from vllm.platforms import current_platform

    cache = vllm_config.cache_config
    total = current_platform.get_device_total_memory()
    share = int(total * cache.gpu_memory_utilization) - weights
    said = cache.kv_cache_memory_bytes
    return elastic_memory.bound(read_options(vllm_config), said or share)


def device_type() -> str:
    """The platform's, as torch calls it: "cpu" or "cuda"."""
    from vllm.platforms import current_platform

    return str(current_platform.device_type)
