# SPDX-License-Identifier: Apache-2.0
"""Elastic pools in vLLM: whether memory moves, which memory, and in what granules.

Every process of an engine comes to the same answers from the configuration:
the workers, which take the memory, and the engine core, which plans for it.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import torch

from hybrid_plugin.config import ConfigError, HybridConfig
from hybrid_plugin.core import host_arena
from hybrid_plugin.core.elastic_plan import ElasticPlan, plan_elastic
from hybrid_plugin.core.host_arena import HostArena
from hybrid_plugin.core.virtual import VirtualArena
from hybrid_plugin.vllm.activation import logger, read_options

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from hybrid_plugin.core.layout import CacheLayout

_CUDA_BLOCK = 2 << 20
"""What NVIDIA's drivers map at a time; `CudaArena` checks it."""
_HOST_BLOCK = 16 << 10
_HOST_BLOCKS = 8192
"""Host memory comes in about so many blocks: each may cost the kernel a record."""


def is_wanted(vllm_config: VllmConfig) -> bool:
    """Whether the pools of this engine share their memory, if the model allows.

    Raises:
        ConfigError: if the options ask for it and the system cannot do it.
    """
    options = read_options(vllm_config)
    if not options.is_elastic:
        return False
    obstacle = _obstacle()
    if obstacle is not None and options.elastic:
        raise ConfigError(f"hybrid-plugin: elastic pools {obstacle}")
    return obstacle is None


def block_bytes(budget: int) -> int:
    """Bytes that this platform's memory is mapped in, for a budget."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return _CUDA_BLOCK
    size = _HOST_BLOCK
    while size < _CUDA_BLOCK and size * _HOST_BLOCKS < budget:
        size *= 2
    return size


def take_memory(
    vllm_config: VllmConfig, available: int, device: torch.device
) -> VirtualArena:
    """Take this rank's cache memory from the system, or as much as there is.

    Args:
        vllm_config: of the engine.
        available: bytes that vLLM found free.
        device: of this rank.
    """
    budget = limited(available, read_options(vllm_config))
    size = block_bytes(budget)
    if device.type == "cpu":
        memory: VirtualArena = HostArena(budget, size)
    else:
        from hybrid_plugin.core.cuda_arena import CudaArena

        memory = CudaArena(budget, device, size)
    refusal = memory.hold(memory.usable, partly=True)
    if refusal is not None:
        logger.warning(
            "hybrid-plugin: %s; the cache goes on with %.1f MiB.",
            refusal,
            memory.held / 2**20,
        )
    return memory


def limited(available: int, options: HybridConfig) -> int:
    """Bytes for both pools together, of those that are free."""
    if options.gpu_memory_budget is None:
        return available
    return min(available, options.gpu_memory_budget)


def plan(
    vllm_config: VllmConfig, layout: CacheLayout, available: int
) -> ElasticPlan | None:
    """How both pools share the memory; None where each gets its own.

    Raises:
        ConfigError: if the options ask for elastic pools that do not fit.
    """
    if not is_wanted(vllm_config):
        return None
    options = read_options(vllm_config)
    budget = limited(available, options)
    size = block_bytes(budget)
    try:
        return plan_elastic(
            layout,
            budget // size * size - size,
            block_bytes=size,
            max_model_len=vllm_config.model_config.max_model_len,
            max_sequences=vllm_config.scheduler_config.max_num_seqs,
            pages_floor=options.kv_pages_floor or 0,
            slots_floor=options.state_slots_floor or 0,
        )
    except ValueError as error:
        if options.elastic:
            raise ConfigError(
                f"hybrid-plugin: elastic pools do not fit: {error}; give the cache "
                "more memory, or set elastic to false."
            ) from error
        logger.info("hybrid-plugin gives each pool its own memory: %s.", error)
        return None


def _obstacle() -> str | None:
    """Why memory cannot move on this machine, to follow "elastic pools"."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        if host_arena.is_available():
            return None
        return "need Linux on a CPU; set elastic to false."
    try:
        found = importlib.util.find_spec("cuda.bindings")
    except ImportError:
        found = None
    if found is None:
        return "need NVIDIA's cuda-bindings; install it, or set elastic to false."
    return None
