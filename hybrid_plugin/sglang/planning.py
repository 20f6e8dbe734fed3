# SPDX-License-Identifier: Apache-2.0
"""How SGLang's cache memory is divided, and what is built on it."""

from __future__ import annotations

from typing import Any

import msgspec
import torch
from sglang.srt.model_executor.pool_configurator import create_memory_pool_configurator
from sglang.srt.runtime_context import get_context, get_schedule, get_server_args

from hybrid_plugin.config import ConfigError, HybridConfig
from hybrid_plugin.core.cache import HybridCache
from hybrid_plugin.core.memory.cache_pools import CachePools, FixedPools
from hybrid_plugin.core.memory.layout import AttentionGroup, CacheLayout, StateGroup
from hybrid_plugin.core.memory.pools import PagePool, SlotPool
from hybrid_plugin.core.policy.eviction import LeastRecentlyUsed
from hybrid_plugin.core.policy.message_boundaries import Delimiters
from hybrid_plugin.engine import chat_template
from hybrid_plugin.engine.elastic_memory import limited
from hybrid_plugin.sglang import known_pools
from hybrid_plugin.sglang.allocator import (
    HybridSlotAllocator,
    HybridTokenAllocator,
    most_slots,
)
from hybrid_plugin.sglang.elastic import SharedPools
from hybrid_plugin.sglang.log import logger
from hybrid_plugin.sglang.pool_memory import PoolMemory
from hybrid_plugin.sglang.pool_rows import (
    bytes_of_rows,
    kv_tensors,
    page_rows,
    slot_rows,
)

_GIB = 1 << 30


def reserve_slots(
    configurator: Any, memory_gib: float, options: HybridConfig, memory: PoolMemory
) -> float:
    """Decide how many state slots there are, or how both pools share the memory.

    Args:
        configurator: SGLang's `KVCacheConfigurator`.
        memory_gib: what there is for slots and pages together.
        options: of the plugin.
        memory: learns what was planned.

    Returns:
        What is left for pages, in GiB.

    Raises:
        ConfigError: if one sequence of the greatest length does not fit, or elastic
            pools are asked for that cannot be had.
    """
    layout = _layout(configurator)
    token_bytes = layout.page_bytes // layout.page_size
    budget = limited(int(memory_gib * _GIB), options)
    shared = memory.share(configurator, budget, token_bytes, options)
    if shared is not None:
        slots = shared.plan.sizes.slots
        get_context().override("hybrid_plugin.slots", max_mamba_cache_size=slots - 1)
        return shared.plan.sizes.pages * layout.page_bytes / _GIB
    # SGLang counts without the slot that takes the writes of padded rows.
    named: int | None = get_schedule().max_mamba_cache_size
    if named is not None:
        slots = named + 1
    else:
        try:
            slots = layout.split(
                budget,
                max_model_len=configurator.model_config.context_len,
                state_memory_ratio=options.state_memory_ratio,
            ).slots
        except ValueError as error:
            raise ConfigError(str(error)) from error
    get_context().override("hybrid_plugin.slots", max_mamba_cache_size=slots - 1)
    return (budget - slots * layout.slot_bytes) / _GIB


def _layout(configurator: Any) -> CacheLayout:
    params = configurator.mambaish_config.mamba2_cache_params
    page_size = get_schedule().page_size
    token_bytes = create_memory_pool_configurator(configurator)._cell_size
    return CacheLayout(
        page_size=page_size,
        attention=(AttentionGroup(("all attention layers",), token_bytes * page_size),),
        states=(StateGroup(("all state layers",), params.mamba_cache_per_req),),
        slot_alignment=1,
    )


def limit_tokens(tokens: int, memory: PoolMemory) -> int:
    """Tokens the KV pool is to hold, of the `tokens` that fit beside the slots."""
    return tokens if memory.shared is None else memory.shared.tokens


def take_over(pools: Any, options: HybridConfig, memory: PoolMemory) -> Any:
    """Put the core in charge of pools that SGLang has just built.

    Args:
        pools: SGLang's `_InitializedPools`.
        options: of the plugin.
        memory: what they were built on.

    Returns:
        The same pools, with allocators that read from one `HybridCache`.

    Raises:
        ConfigError: for pools that keep more than the cache's commands copy.
    """
    stock = pools.token_to_kv_pool_allocator
    states = pools.req_to_token_pool
    known_pools.require(stock.get_kvcache(), states, _copied(stock, states))
    executor = memory.executor(stock.get_kvcache(), states.mamba_pool, stock.page_size)
    cache = _build(stock, states, options, memory.shared)
    states.mamba_allocator = HybridSlotAllocator(cache, stock.device)
    allocator = HybridTokenAllocator(cache, stock, executor)
    return msgspec.structs.replace(pools, token_to_kv_pool_allocator=allocator)


def _build(
    stock: Any, states: Any, options: HybridConfig, shared: SharedPools | None
) -> HybridCache:
    """The core, in charge of as many pages and slots as there are."""
    pools: CachePools
    if shared is None:
        pools = FixedPools(
            PagePool(stock.size // stock.page_size + 1),
            SlotPool(states.mamba_pool.size + 1),
        )
    else:
        pools = shared.plan.build()
    cache = HybridCache(
        pages=pools.pages,
        slots=pools.slots,
        windows=pools.windows,
        broker=pools.broker,
        page_size=stock.page_size,
        policy=options.snapshot_policy(stock.page_size, _delimiters(options)),
        eviction=_eviction(stock, states, options),
    )
    if shared is not None:
        states.mamba_pool.count_with(lambda: most_slots(cache) + cache.slots.running)
    return cache


def _delimiters(options: HybridConfig) -> Delimiters | None:
    server = get_server_args()
    return chat_template.delimiters(
        options,
        server.tokenizer_path or server.model_path,
        revision=server.revision,
        trust_remote_code=server.trust_remote_code,
        logger=logger,
        server_template=server.chat_template,
    )


def _eviction(stock: Any, states: Any, options: HybridConfig) -> LeastRecentlyUsed:
    """The policy that was asked for, by the sizes of the pools' tensors."""
    pages = page_rows(stock.get_kvcache().full_kv_pool, stock.page_size)
    return options.eviction(
        token_bytes=bytes_of_rows(pages) // stock.page_size,
        slot_bytes=bytes_of_rows(slot_rows(states.mamba_pool)),
    )


def _copied(stock: Any, states: Any) -> list[torch.Tensor]:
    """All tensors that the cache's commands copy.

    Raises:
        ConfigError: for a kind of KV cache that is not known.
    """
    kv_pool, kept = stock.get_kvcache(), states.mamba_pool.mamba_cache
    pages = kv_tensors(getattr(kv_pool, "full_kv_pool", kv_pool))
    return [*pages, *kept.conv, kept.temporal]
