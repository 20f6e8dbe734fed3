# SPDX-License-Identifier: Apache-2.0
"""Models with full attention and windows: the core in charge of SGLang's two pools.

SGLang gives the window layers a pool of their own, by `--swa-full-tokens-ratio`.  Its
sizes are kept; memory does not move between the two.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import torch
from sglang.srt.model_executor.pool_configurator import create_memory_pool_configurator
from sglang.srt.runtime_context import attention_backends, get_schedule

from hybrid_plugin.config import ConfigError, HybridConfig
from hybrid_plugin.core.memory.attention_windows import (
    FULL_ATTENTION,
    AttentionWindow,
    ChunkedLocal,
    SlidingWindow,
)
from hybrid_plugin.core.memory.layout import AttentionGroup, CacheLayout
from hybrid_plugin.engine import elastic_memory
from hybrid_plugin.engine.cache_assembly import build_cache
from hybrid_plugin.engine.host_memory import plan_tier
from hybrid_plugin.engine.refusals import cannot_serve
from hybrid_plugin.engine.sizing import CachePlan
from hybrid_plugin.sglang import host_copies, known_pools
from hybrid_plugin.sglang.allocator import HybridWindowAllocator
from hybrid_plugin.sglang.log import logger
from hybrid_plugin.sglang.planning import delimiters
from hybrid_plugin.sglang.pool_memory import PoolMemory
from hybrid_plugin.sglang.pool_rows import kv_tensors, page_rows

_ELASTIC = "do not hold SGLang's window pools yet; set elastic to false."
_KEEP_TO_CHUNKS = ("fa3", "fa4")
"""Attention backends that look back no further than a local chunk reaches."""


def limited(configurator: Any, available: int, options: HybridConfig) -> int:
    """Bytes that SGLang divides between both pools; it adds a page to each of them.

    Args:
        configurator: SGLang's `KVCacheConfigurator`.
        available: bytes that every rank has.
        options: of the plugin.
    """
    device = torch.device(configurator.device)
    available -= host_copies.device_bytes(options, device)
    if options.gpu_memory_budget is None:
        return available
    pools = create_memory_pool_configurator(configurator)
    token_bytes: int = pools._full_cell_bytes() + pools._swa_cell_bytes()
    reserved = token_bytes * get_schedule().page_size
    return min(available, max(options.gpu_memory_budget - reserved, 0))


def take_over(
    configurator: Any, pools: Any, options: HybridConfig, memory: PoolMemory
) -> Any:
    """Put the core in charge of the two pools that SGLang has just built.

    Args:
        configurator: SGLang's `KVCacheConfigurator`.
        pools: its `_InitializedPools`.
        options: of the plugin.
        memory: learns what was planned.

    Returns:
        The same pools, with an allocator that reads from a `HybridCache`.

    Raises:
        ConfigError: for pools or an attention backend that the plugin does not know,
            for a window pool that is too small, or if elastic pools are asked for.
    """
    stock = pools.token_to_kv_pool_allocator
    _require_known(configurator, stock)
    elastic_memory.is_wanted(options, _ELASTIC, logger, states_alone=False)
    kv_pool = stock.get_kvcache()
    copied = [*kv_tensors(kv_pool.full_kv_pool), *kv_tensors(kv_pool.swa_kv_pool)]
    known_pools.require(kv_pool, pools.req_to_token_pool, copied)
    plan = _plan(configurator, stock)
    device_bytes = plan.layout.bytes_of(plan.sizes)
    host = plan_tier(plan.layout, options, device_bytes, host_copies.room(options))
    memory.plan = plan = replace(plan, host=host)
    for line in plan.describe():
        logger.info("%s", line)
    device = torch.device(stock.device).type
    cache = build_cache(plan, options, delimiters(options), device)
    executor = memory.executor(kv_pool, None, stock.page_size)
    allocator = HybridWindowAllocator(cache, stock, executor)
    return msgspec.structs.replace(pools, token_to_kv_pool_allocator=allocator)


def window_of(configurator: Any) -> AttentionWindow:
    """How far the window layers look back.

    SGLang's own number does not count the token itself.

    Args:
        configurator: SGLang's `KVCacheConfigurator`.

    Raises:
        ConfigError: for local chunks with a backend that does not keep to them.
    """
    model = configurator.model_config
    if not model.is_local_attention_model:
        return SlidingWindow(configurator.sliding_window_size + 1)
    for backend in attention_backends():
        if backend not in _KEEP_TO_CHUNKS:
            raise cannot_serve(
                f"SGLang's attention backend {backend} reads beyond local chunks; use "
                "--attention-backend fa3."
            )
    return ChunkedLocal(model.attention_chunk_size)


def _require_known(configurator: Any, stock: Any) -> None:
    """Refuse pools whose places SGLang hands out in a way that is not known here.

    Raises:
        ConfigError: naming it.
    """
    if configurator.post_capture_kv_active:
        raise cannot_serve(
            "window pools that are sized after graphs are captured are not supported; "
            "unset SGLANG_ENABLE_POST_CAPTURE_KV_SIZING."
        )
    name = type(stock).__name__
    if name != "SWATokenToKVPoolAllocator":
        raise cannot_serve(f"window pools of the kind {name} are not supported yet.")


def _plan(configurator: Any, stock: Any) -> CachePlan:
    """The two pools as SGLang sized them.

    Raises:
        ConfigError: if the window pool does not hold one sequence.
    """
    size, kv_pool = stock.page_size, stock.get_kvcache()
    window = window_of(configurator)
    layout = CacheLayout(
        page_size=size,
        attention=(
            *_groups("full", page_rows(kv_pool.full_kv_pool, size), FULL_ATTENTION),
            *_groups("window", page_rows(kv_pool.swa_kv_pool, size), window),
        ),
        states=(),
    )
    # SGLang counts without the page that takes the writes of padding.
    pages, window_pages = stock.size_full // size + 1, stock.size_swa // size + 1
    longest = min(configurator.model_config.context_len, stock.size_full)
    least = layout.least(longest, get_schedule().chunked_prefill_size)
    if window_pages < least.windows[0]:
        raise ConfigError(
            f"the pool of {window} holds {window_pages} pages, and one sequence of "
            f"{longest} tokens takes up to {least.windows[0]}, the reserved one "
            "included: raise "
            "--swa-full-tokens-ratio, or give the cache more memory."
        )
    return CachePlan(layout, replace(least, pages=pages, windows=(window_pages,)))


def _groups(
    kind: str, rows: list[torch.Tensor], window: AttentionWindow
) -> tuple[AttentionGroup, ...]:
    """One for each tensor: keys and values of a layer may differ in size."""
    return tuple(
        AttentionGroup((f"{kind} {index}",), tensor.shape[1], window)
        for index, tensor in enumerate(rows)
    )
