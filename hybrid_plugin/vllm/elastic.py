# SPDX-License-Identifier: Apache-2.0
"""Elastic pools in vLLM: whether memory moves, which memory, and in what granules.

Every process of an engine comes to the same answers from the configuration:
the workers, which take the memory, and the engine core, which plans for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from logging import Logger
from typing import TYPE_CHECKING

from hybrid_plugin.config import ConfigError
from hybrid_plugin.core.memory.elastic_plan import ElasticPlan
from hybrid_plugin.device.virtual_arena import VirtualArena
from hybrid_plugin.engine import elastic_memory
from hybrid_plugin.engine.elastic_memory import limited
from hybrid_plugin.vllm.activation import logger, read_options

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig

    from hybrid_plugin.core.memory.layout import CacheLayout

__all__ = ["is_wanted", "limited", "plan", "take_memory"]


def is_wanted(vllm_config: VllmConfig, log: Logger | None = None) -> bool:
    """Whether the pools of this engine share their memory, if the model allows.

    Args:
        vllm_config: of the engine.
        log: where to say what stands against it.

    Raises:
        ConfigError: if the options ask for it and the system cannot do it.
    """
    with _named():
        return elastic_memory.is_wanted(
            read_options(vllm_config), elastic_memory.obstacle(device_type()), log
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
        block_bytes=_block_bytes(vllm_config),
        log=logger,
    )


def plan(
    vllm_config: VllmConfig,
    layout: CacheLayout,
    available: int,
    log: Logger = logger,
) -> ElasticPlan | None:
    """How both pools share the memory; None where each gets its own.

    Args:
        vllm_config: of the engine.
        layout: of the pages and the slots.
        available: bytes that every rank has for the cache.
        log: where to say why pools do not share, if they do not.

    Raises:
        ConfigError: if the options ask for elastic pools that do not fit, or for
            a model whose pools cannot share memory.
    """
    if not is_wanted(vllm_config, log):
        return None
    options = read_options(vllm_config)
    budget = limited(available, options)
    if not _can_share(layout):
        if options.elastic:
            raise ConfigError(
                "hybrid-plugin: elastic pools need layers with full attention, and "
                "layers with states or windows beside them; set elastic to false."
            )
        log.info(
            "hybrid-plugin gives each pool its own memory: elastic pools need layers "
            "with full attention, and layers with states or windows beside them"
        )
        return None
    with _named():
        return elastic_memory.plan(
            layout,
            budget,
            options,
            block_bytes=_block_bytes(vllm_config),
            max_model_len=vllm_config.model_config.max_model_len,
            max_sequences=vllm_config.scheduler_config.max_num_seqs,
            chunk=vllm_config.scheduler_config.max_num_batched_tokens,
            log=log,
        )


def refuse_slots_out_of_reach(vllm_config: VllmConfig, most: int) -> None:
    """Say why pools do not share their memory: kernels reach `most` slots only.

    Raises:
        ConfigError: if the options ask for elastic pools.
    """
    found = (
        f"have more than {most} state slots, and this model's kernels address no "
        "more; lower gpu_memory_budget, or set elastic to false."
    )
    with _named():
        elastic_memory.is_wanted(read_options(vllm_config), found, logger)


def _can_share(layout: CacheLayout) -> bool:
    """Whether there are several pools, and pages to move memory to."""
    return bool(layout.page_bytes and (layout.states or layout.attention_windows))


def _block_bytes(vllm_config: VllmConfig) -> int:
    from vllm.platforms import current_platform

    bound = elastic_memory.bound(
        read_options(vllm_config),
        vllm_config.cache_config.kv_cache_memory_bytes,
        current_platform.get_device_total_memory(),
    )
    return elastic_memory.block_bytes(bound, device_type())


def device_type() -> str:
    """The platform's, as torch calls it: "cpu" or "cuda"."""
    from vllm.platforms import current_platform

    return str(current_platform.device_type)


@contextmanager
def _named() -> Iterator[None]:
    """Say in every refusal whose it is."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"hybrid-plugin: {error}") from error
