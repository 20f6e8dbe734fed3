# SPDX-License-Identifier: Apache-2.0
"""Elastic pools in SGLang: one rank's pages and slots over one budget.

Slots become slot-major: all states of a slot lie together, so that a granule is a
few slots and not a few of every layer's rows.  So do pages, token by token, where the
attention backend takes it; elsewhere they stay as SGLang has them: each layer's keys,
and its values, are one contiguous tensor, in which a granule is a whole number of
blocks.  SGLang's own unified memory has the same layouts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.runtime_context import (
    get_disagg,
    get_exec,
    get_parallel,
    get_schedule,
    get_spec,
)

from hybrid_plugin.config import ConfigError
from hybrid_plugin.core.commands import Pool, PoolId
from hybrid_plugin.core.memory.elastic_plan import ElasticPlan
from hybrid_plugin.device.arena import Arena, ElasticArena
from hybrid_plugin.device.executor import Executor
from hybrid_plugin.device.interior import InteriorSnapshots
from hybrid_plugin.device.row_pool import RowTensor, place
from hybrid_plugin.device.virtual_arena import AddressRange, VirtualArena
from hybrid_plugin.engine import elastic_memory
from hybrid_plugin.sglang import page_layout
from hybrid_plugin.sglang.compressed_keys import has_compressed_keys
from hybrid_plugin.sglang.disaggregation import KEEPS_STILL
from hybrid_plugin.sglang.index_keys import has_index_keys

_STRIDED = ("triton", "flashinfer", None)
"""Backends of linear attention whose kernels take slot-major states."""


class SharedPools:
    """The memory of all pools of one rank."""

    def __init__(
        self,
        plan: ElasticPlan,
        memory: VirtualArena,
        rows: Sequence[RowTensor] = (),
    ) -> None:
        """Reserve addresses for as many ids as the plan has; all of them holes.

        Args:
            plan: equal on every rank.  Of its attention groups, the first is the
                model's; others are a draft model's.
            memory: at least the plan's budget of it is held.
            rows: tensors of the scratch, if the plan has one.
        """
        memory.lower(plan.budget)
        self.plan = plan
        self.memory = memory
        sizes, layout = plan.sizes, plan.layout
        self._pages = memory.reserve(sizes.pages * layout.page_bytes)
        self._slots = memory.reserve(sizes.slots * layout.slot_bytes)
        self._page_rows: list[torch.Tensor] = []
        self._placed = 0
        """Bytes of a token that have their tensors."""
        self.slot_rows = self._slots.memory.view(sizes.slots, layout.slot_bytes)
        """`[slots, bytes]`, int8."""
        self._scratch: AddressRange | None = None
        self._scratch_rows: list[torch.Tensor] = []
        self.scratch: list[torch.Tensor] = []
        """Tensors of the scratch, `[layers, rows, ...]`."""
        if layout.scratch is not None:
            count = plan.ids(Pool.SCRATCH)
            self._scratch = memory.reserve(count * layout.scratch.row_bytes)
            self.scratch, self._scratch_rows = place(
                self._scratch.memory, count, layout.scratch.together, rows
            )

    @property
    def tokens(self) -> int:
        """Tokens of the KV pool as SGLang counts them, page 0 left out."""
        return (self.plan.sizes.pages - 1) * self.plan.layout.page_size

    def place_keys_and_values(self, pool: Any) -> None:
        """Give SGLang's `MHATokenToKVPool` its buffers.

        A layer's values lie right behind its keys, for kernels that reach both
        from one address: those of the same token where pages are packed.

        Raises:
            ConfigError: if the pool needs other bytes than were planned.
        """
        shapes = pool._kv_buffer_shapes() * pool.layer_num
        tensors = self._place(shapes, pool.store_dtype)
        pool.k_buffer, pool.v_buffer = tensors[::2], tensors[1::2]

    def place_latents(self, pool: Any) -> None:
        """Give SGLang's `MLATokenToKVPool` its buffers.

        Raises:
            ConfigError: if the pool needs other bytes than were planned.
        """
        shape = (pool.size + pool.page_size, 1, pool.kv_cache_dim)
        pool.kv_buffer = self._place([shape] * pool.layer_num, pool.store_dtype)

    def _place(
        self, shapes: Sequence[Sequence[int]], dtype: torch.dtype
    ) -> list[torch.Tensor]:
        """One tensor of each shape, in the pages' addresses.

        Args:
            shapes: each `[tokens, ...]`, with page 0 counted in.
            dtype: of all.

        Raises:
            ConfigError: if the pool needs other bytes than were planned.
        """
        layout, pages = self.plan.layout, self.plan.sizes.pages
        tensors: list[torch.Tensor] | None
        used = sum(torch.Size(shape[1:]).numel() for shape in shapes) * dtype.itemsize
        if not self._is_planned(shapes, used, dtype):
            tensors = None
        elif layout.packed:
            rows = self._pages.memory.view(pages, -1)
            tensors = page_layout.views(
                rows, layout.page_size, shapes, dtype, self._placed
            )
            self._page_rows = [rows]
        else:
            tensors = self._place_apart(shapes, dtype)
        self._placed += used
        if tensors is None:
            raise ConfigError(
                "elastic pools were planned for another KV cache than SGLang builds; "
                "set elastic to false."
            )
        return tensors

    def _is_planned(
        self, shapes: Sequence[Sequence[int]], used: int, dtype: torch.dtype
    ) -> bool:
        """Whether tensors are those of the group whose turn it is."""
        groups = self.plan.layout.attention[self._placed > 0 :]
        if not groups or used * self.plan.layout.page_size != (
            groups[0].page_bytes * len(groups[0].layers)
        ):
            return False
        # The parts of a draft model are made before its tensors.
        size = groups[0].page_bytes // self.plan.layout.page_size
        return not self._placed or all(
            torch.Size(shape[1:]).numel() * dtype.itemsize == size for shape in shapes
        )

    @property
    def is_complete(self) -> bool:
        """Whether all KV that was planned has its tensors."""
        layout = self.plan.layout
        planned = layout.page_bytes - sum(layout.page_padding)
        return self._placed * layout.page_size == planned

    def _place_apart(
        self, shapes: Sequence[Sequence[int]], dtype: torch.dtype
    ) -> list[torch.Tensor] | None:
        """Tensors behind each other; None where they are not those planned for."""
        rows = torch.Size((self.plan.sizes.pages, self.plan.layout.page_size))
        tensors, start = [], self._placed * rows.numel()
        for shape in shapes:
            size = torch.Size(shape).numel() * dtype.itemsize
            part = self._pages.memory[start : start + size]
            if shape[0] != rows.numel() or part.numel() != size:
                break
            self._page_rows.append(part.view(rows[0], -1))
            tensors.append(part.view(dtype).view(*shape))
            start += size
        return tensors if len(tensors) == len(shapes) else None

    def _draft_rows(self) -> list[torch.Tensor]:
        """Parts of the pages for a draft model, whose pool is built later."""
        layout, pages = self.plan.layout, self.plan.sizes.pages
        if layout.packed:
            return []
        found, start = [], self._placed * pages * layout.page_size
        for group in layout.attention[1:]:
            for _ in group.layers:
                part = self._pages.memory[start : start + pages * group.page_bytes]
                found.append(part.view(pages, -1))
                start += part.numel()
        return found

    def start(self, interior: InteriorSnapshots | None = None) -> Executor:
        """Map what the plan has mapped at the start; the executor moves the rest.

        Args:
            interior: as for `Executor`.

        Raises:
            ConfigError: if SGLang built its KV cache elsewhere.
            MemoryError: if the system refuses memory that was held.
        """
        if not self._page_rows:
            raise ConfigError(
                "elastic pools are not for this kind of KV cache; set elastic to false."
            )
        arenas: dict[PoolId, Arena] = {}
        places = [
            (Pool.KV, [*self._page_rows, *self._draft_rows()], self._pages),
            (Pool.STATE, [self.slot_rows], self._slots),
        ]
        if self._scratch is not None:
            places.append((Pool.SCRATCH, self._scratch_rows, self._scratch))
        for pool, rows, addresses in places:
            planned = self.plan.pools[pool]
            arena = ElasticArena(rows, addresses, self.memory, planned.per_granule)
            refusal = arena.map(range(planned.start))
            if refusal is not None:
                raise MemoryError(str(refusal))
            arenas[pool] = arena
        return Executor(arenas, interior)


def hindrance(device_type: str) -> str | None:
    """What the machine or a flag has against elastic pools, to follow those words.

    Args:
        device_type: "cpu" or "cuda", as torch calls it.
    """
    found = elastic_memory.obstacle(device_type)
    if found is not None:
        return found
    if get_disagg().disaggregation_mode != "null":
        return KEEPS_STILL
    if get_schedule().max_mamba_cache_size is not None:
        return "have no fixed slots; drop --max-mamba-cache-size."
    if get_schedule().max_total_tokens is not None:
        return "have no fixed KV cache; drop --max-total-tokens."
    return None if device_type == "cpu" else _unstrided()


def hindrance_of_pools(configurator: Any) -> str | None:
    """What the pools that SGLang would build have against it."""
    if get_spec().speculative_algorithm is not None and configurator.attn_dp_size > 1:
        return (
            "hold the states after drafts for batches of this rank alone, and "
            "data-parallel attention pads them to those of others; drop "
            "--enable-dp-attention, or set elastic to false."
        )
    if configurator.post_capture_kv_active:
        return (
            "have memory before graphs are captured; unset "
            "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING."
        )
    if configurator._get_ple_req_pool_kwargs():
        return "hold no n-gram states beside the slots; set elastic to false."
    return hindrance_of_model(configurator.model_config)


def hindrance_of_model(model: Any) -> str | None:
    """What the model has against it.

    Args:
        model: SGLang's `ModelConfig`.
    """
    if has_index_keys(model):
        return "hold no index keys beside latents yet; set elastic to false."
    if has_compressed_keys(model):
        return "hold no compressed keys beside KV yet; set elastic to false."
    return None


def _unstrided() -> str | None:
    """Names a kernel backend that takes no slot-major states."""
    mamba = get_exec().mamba
    chosen = (
        mamba.linear_attn_backend,
        mamba.linear_attn_prefill_backend,
        mamba.linear_attn_decode_backend,
    )
    if any(backend not in _STRIDED for backend in chosen):
        return (
            "need --linear-attn-backend triton or flashinfer, whose kernels take "
            "their states."
        )
    if mamba.mamba_backend not in ("triton", None):
        return "need --mamba-backend triton, whose kernels take their states."
    if get_spec().speculative_algorithm is None:
        return None
    # Unset, it is flashinfer where decodes are: that one writes rows of no batch.
    verify = mamba.linear_attn_verify_backend
    if verify is None and "flashinfer" in (chosen[2] or chosen[0],):
        verify = "flashinfer"
    if verify not in ("triton", None):
        return (
            "need --linear-attn-verify-backend triton with drafts, whose kernels "
            "write no rows but those of a batch."
        )
    return None


def least_of_all_ranks(own: int) -> int:
    """What every rank has at least: all plan with equal memory in equal blocks."""
    if get_parallel().launch_world_size == 1:
        return own
    least = torch.tensor(own, dtype=torch.int64)
    torch.distributed.all_reduce(
        least,
        op=torch.distributed.ReduceOp.MIN,
        group=get_parallel().world_group.cpu_group,
    )
    return int(least.item())
