# SPDX-License-Identifier: Apache-2.0
"""Worker side: allocates the pools and gives each layer its view of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.worker.utils import create_kv_cache_views

from hybrid_plugin.core.commands import Pool, PoolId
from hybrid_plugin.device.arena import Arena, ElasticArena
from hybrid_plugin.device.executor import Executor
from hybrid_plugin.device.interior import InteriorSnapshots
from hybrid_plugin.device.virtual_arena import AddressRange, VirtualArena
from hybrid_plugin.sizes import gib
from hybrid_plugin.vllm.activation import logger
from hybrid_plugin.vllm.bundle_layouts import layouts_of, page_form
from hybrid_plugin.vllm.planning import HybridKVCacheConfig, PoolTensor, pools_of
from hybrid_plugin.vllm.specs import is_page_spec

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheLayout

    from hybrid_plugin.tiers.bundle import Layouts


class PoolMemory:
    """The memory of one worker's pools, and what works on it; the worker owns it."""

    def __init__(self) -> None:
        self._shared: VirtualArena | None = None
        self._executor: Executor | None = None
        self._order: KVCacheLayout | None = None
        self._blocks: list[int] | None = None

    def layouts(
        self, config: HybridKVCacheConfig, layers: Mapping[str, Any]
    ) -> Layouts:
        """How the rows of the pools lie, once vLLM's layers have their views.

        Args:
            config: of the pools.
            layers: of the model, by name.
        """
        assert self._order is not None, "the pools were allocated"
        blocks: list[int | None] = [None] * len(config.kv_cache_groups)
        if self._blocks is not None:
            blocks = list(self._blocks)
        forms = {
            name: page_form(layers[name], block)
            for group, block in zip(config.kv_cache_groups, blocks, strict=True)
            if is_page_spec(group.kv_cache_spec)
            for name in group.layer_names
        }
        return layouts_of(config, self._order, forms)

    @property
    def executor(self) -> Executor:
        """Runs commands on the pools.

        Raises:
            RuntimeError: if vLLM did not ask for our pools.
        """
        if self._executor is None:
            raise RuntimeError(
                "vLLM allocated its own KV cache in place of the pools of "
                "hybrid-plugin. Check that VLLM_PLUGINS lets the plugin load in the "
                "workers."
            )
        return self._executor

    def release(self) -> None:
        """Give the memory of elastic pools back while the engine sleeps."""
        freed = self.executor.release()
        if freed:
            logger.info("hybrid-plugin released %s of its pools.", gib(freed))

    def restore(self) -> None:
        """Take it again.

        Raises:
            MemoryError: if the system has it no more.
        """
        self.executor.restore()

    def close(self) -> None:
        """Give host memory back, if there is some; nothing runs after."""
        if self._executor is not None and self._executor.host is not None:
            self._executor.host.close()

    def share(self, memory: VirtualArena) -> None:
        """Take memory that all pools may share, if the engine core plans so."""
        self._shared = memory

    def allocate(
        self,
        config: HybridKVCacheConfig,
        device: torch.device,
        layout: KVCacheLayout,
        kernel_block_sizes: list[int] | None = None,
    ) -> dict[str, torch.Tensor]:
        """Allocate the pools, zeroed; returns vLLM's `[B, H, N, C]` view per layer.

        Memory to share that the engine core did not plan with is given back.

        Args:
            config: what to allocate.
            device: of this rank.
            layout: vLLM's, of a layer's pages.
            kernel_block_sizes: tokens of a block of each group's attention kernels.
        """
        self._order, self._blocks = layout, kernel_block_sizes
        places: dict[PoolId, AddressRange] = {}
        if config.shared is not None:
            assert self._shared is not None, "the worker took it before"
            places = _reserve(config, self._shared)
        elif self._shared is not None:
            self._shared.close()
            self._shared = None
        memory = {pool: place.memory for pool, place in places.items()}
        for tensor in _tensors(config):
            if tensor.pool not in memory:
                memory[tensor.pool] = torch.zeros(
                    tensor.size, dtype=torch.int8, device=device
                )
        rows = {pool: _rows(config, pool, part) for pool, part in memory.items()}
        # Without a layer on this rank, pages and slots are but numbers.
        for pool in {Pool.KV, *pools_of(config.kv_cache_groups)} - rows.keys():
            ids = config.plan.sizes.of(pool)
            rows[pool] = [torch.zeros((ids, 0), dtype=torch.int8)]
        if self._shared is None:
            arenas = {pool: Arena(parts) for pool, parts in rows.items()}
        else:
            arenas = _map_start(config, rows, places, self._shared)
        interior = InteriorSnapshots(device) if config.interior else None
        self._executor = Executor(arenas, interior)
        return _views(config, memory, layout, kernel_block_sizes)


def _tensors(config: HybridKVCacheConfig) -> Iterator[PoolTensor]:
    for tensor in config.kv_cache_tensors:
        assert isinstance(tensor, PoolTensor)
        yield tensor


def _views(
    config: HybridKVCacheConfig,
    memory: Mapping[PoolId, torch.Tensor],
    layout: KVCacheLayout,
    kernel_block_sizes: list[int] | None,
) -> dict[str, torch.Tensor]:
    """What each layer sees of its pool."""
    views: dict[str, torch.Tensor] = {}
    for tensor in _tensors(config):
        group_id = next(
            i
            for i, group in enumerate(config.kv_cache_groups)
            if tensor.layers[0] in group.layer_names
        )
        kernel_block_size = (
            kernel_block_sizes[group_id]
            if kernel_block_sizes is not None and tensor.pool != Pool.STATE
            else None
        )
        layer_views = create_kv_cache_views(
            memory[tensor.pool],
            config.kv_cache_groups[group_id].kv_cache_spec,
            tensor.ids,
            layout,
            tensor,
            kernel_block_size=kernel_block_size,
        )
        views.update(zip(tensor.layers, layer_views, strict=True))
    return views


def _reserve(
    config: HybridKVCacheConfig, memory: VirtualArena
) -> dict[PoolId, AddressRange]:
    """Addresses of each pool."""
    places: dict[PoolId, AddressRange] = {}
    for tensor in _tensors(config):
        if tensor.pool not in places:
            places[tensor.pool] = memory.reserve(tensor.size)
    return places


def _map_start(
    config: HybridKVCacheConfig,
    rows: Mapping[PoolId, list[torch.Tensor]],
    places: Mapping[PoolId, AddressRange],
    memory: VirtualArena,
) -> dict[PoolId, Arena]:
    """Arenas with the memory that the scheduler takes for granted at the start."""
    shared = config.shared
    assert shared is not None
    memory.lower(shared.budget)
    arenas: dict[PoolId, Arena] = {}
    for pool, plan in shared.pools.items():
        arena = ElasticArena(rows[pool], places[pool], memory, plan.per_granule)
        refusal = arena.map(range(plan.start))
        if refusal is not None:
            raise MemoryError(str(refusal))
        arenas[pool] = arena
    return arenas


def _rows(
    config: HybridKVCacheConfig, pool: PoolId, memory: torch.Tensor
) -> list[torch.Tensor]:
    """`[ids, bytes]` matrices: one of whole slots or pages, or one per layer."""
    plan = config.plan
    if pool == Pool.STATE or plan.layout.packed:
        return [memory.view(plan.sizes.of(pool), -1)]
    rows = []
    for tensor in _tensors(config):
        if tensor.pool != pool:
            continue
        for layer in range(len(tensor.layers)):
            start = tensor.offset + layer * tensor.layer_stride
            part = memory[start : start + tensor.layer_stride]
            rows.append(part.view(tensor.ids, tensor.block_stride))
    return rows
