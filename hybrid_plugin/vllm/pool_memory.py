# SPDX-License-Identifier: Apache-2.0
"""Worker side: allocates the two pools and gives each layer its view of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from vllm.v1.worker.utils import create_kv_cache_views

from hybrid_plugin.core.commands import Pool, PoolId
from hybrid_plugin.device.arena import Arena, ElasticArena
from hybrid_plugin.device.executor import Executor
from hybrid_plugin.device.virtual_arena import AddressRange, VirtualArena
from hybrid_plugin.vllm.planning import HybridKVCacheConfig, PoolTensor

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheLayout

_EXECUTOR = "hybrid_executor"
_MEMORY = "hybrid_memory"


def lend_memory(config: HybridKVCacheConfig, memory: VirtualArena) -> None:
    """Have `allocate_pools` share this memory between the pools of `config`."""
    setattr(config, _MEMORY, memory)


def allocate_pools(
    config: HybridKVCacheConfig,
    device: torch.device,
    layout: KVCacheLayout,
    kernel_block_sizes: list[int] | None = None,
) -> dict[str, torch.Tensor]:
    """Allocate both pools, zeroed; returns vLLM's `[B, H, N, C]` view per layer.

    The executor that works on them is kept with `config`, see `executor_of`.
    """
    places = _reserve(config) if config.shared is not None else {}
    memory = {is_state: place.memory for is_state, place in places.items()}
    views: dict[str, torch.Tensor] = {}
    for tensor in config.kv_cache_tensors:
        assert isinstance(tensor, PoolTensor)
        if tensor.is_state not in memory:
            memory[tensor.is_state] = torch.zeros(
                tensor.size, dtype=torch.int8, device=device
            )
        group_id = next(
            i
            for i, group in enumerate(config.kv_cache_groups)
            if tensor.layers[0] in group.layer_names
        )
        kernel_block_size = (
            kernel_block_sizes[group_id]
            if kernel_block_sizes is not None and not tensor.is_state
            else None
        )
        layer_views = create_kv_cache_views(
            memory[tensor.is_state],
            config.kv_cache_groups[group_id].kv_cache_spec,
            tensor.ids,
            layout,
            tensor,
            kernel_block_size=kernel_block_size,
        )
        views.update(zip(tensor.layers, layer_views, strict=True))
    rows = {
        Pool.KV: _page_rows(config, memory[False]),
        Pool.STATE: [memory[True].view(config.slots, -1)],
    }
    if config.shared is None:
        arenas = {pool: Arena(parts) for pool, parts in rows.items()}
    else:
        arenas = _map_start(config, rows, places)
    setattr(config, _EXECUTOR, Executor(arenas))
    return views


def _memory_of(config: HybridKVCacheConfig) -> VirtualArena:
    memory = getattr(config, _MEMORY, None)
    assert isinstance(memory, VirtualArena), "the worker lends it before"
    return memory


def _reserve(config: HybridKVCacheConfig) -> dict[bool, AddressRange]:
    """Addresses of the pages (False) and the slots (True)."""
    places: dict[bool, AddressRange] = {}
    for tensor in config.kv_cache_tensors:
        assert isinstance(tensor, PoolTensor)
        if tensor.is_state not in places:
            places[tensor.is_state] = _memory_of(config).reserve(tensor.size)
    return places


def _map_start(
    config: HybridKVCacheConfig,
    rows: dict[PoolId, list[torch.Tensor]],
    places: dict[bool, AddressRange],
) -> dict[PoolId, Arena]:
    """Arenas with the memory that the scheduler takes for granted at the start."""
    shared, memory = config.shared, _memory_of(config)
    assert shared is not None
    memory.lower(shared.budget)
    arenas: dict[PoolId, Arena] = {}
    for pool, plan in shared.pools.items():
        place = places[pool == Pool.STATE]
        arena = ElasticArena(rows[pool], place, memory, plan.per_granule)
        refusal = arena.map(range(plan.start))
        if refusal is not None:
            raise MemoryError(str(refusal))
        arenas[pool] = arena
    return arenas


def executor_of(config: object) -> Executor:
    """The executor on the memory that was allocated for `config`."""
    executor = getattr(config, _EXECUTOR, None)
    if not isinstance(executor, Executor):
        raise RuntimeError(
            "vLLM allocated its own KV cache in place of the pools of hybrid-plugin. "
            "Check that VLLM_PLUGINS lets the plugin load in the workers."
        )
    return executor


def _page_rows(config: HybridKVCacheConfig, memory: torch.Tensor) -> list[torch.Tensor]:
    """One `[pages, bytes]` matrix per attention layer."""
    rows = []
    for tensor in config.kv_cache_tensors:
        assert isinstance(tensor, PoolTensor)
        if tensor.is_state:
            continue
        for layer in range(len(tensor.layers)):
            start = tensor.offset + layer * tensor.layer_stride
            part = memory[start : start + tensor.layer_stride]
            rows.append(part.view(tensor.ids, tensor.block_stride))
    return rows
