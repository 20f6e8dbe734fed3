# SPDX-License-Identifier: Apache-2.0
"""SGLang's unified radix cache, with states, on its Python or its Rust core.

The calls are those of SGLang's scheduler for a hybrid model with
`extra_buffer`: a state is tracked at the prompt's last page end and at the end.
Writing a request's page table is the engine's work in all drivers, but SGLang's
tree reads pages from there, so the writing counts as *admit*.
"""

from __future__ import annotations

from array import array

import torch
from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateShape
from sglang.srt.environ import envs
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.common import (
    checkpoint_kv_cache,
    evict_from_tree_cache,
    release_kv_cache,
)
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, HybridReqToTokenPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

from benchmarks.host_cost.driver import PAGE, Laps

_REQUESTS = 8


class SglangTree:
    """One core behind SGLang's own pools, with tiny tensors on the CPU."""

    def __init__(self, kv_tokens: int, slots: int, longest: int, core: str) -> None:
        self.name = f"SGLang unified tree, {core} core (KV + states)"
        args = ServerArgs(model_path="dummy", page_size=PAGE, device="cpu")
        args._mamba_cache_chunk_size = 64
        set_global_server_args_for_scheduler(args)
        self._pool = _state_pool(slots, longest)
        kv = HybridLinearKVPool(
            size=kv_tokens,
            dtype=torch.bfloat16,
            page_size=PAGE,
            head_num=1,
            head_dim=8,
            full_attention_layer_ids=[1],
            device="cpu",
            enable_memory_saver=False,
            mamba_pool=self._pool.mamba_pool,
        )
        self._allocator = PagedTokenToKVPoolAllocator(
            size=kv_tokens,
            page_size=PAGE,
            dtype=torch.bfloat16,
            device="cpu",
            kvcache=kv,
            need_sort=False,
        )
        self._tree = UnifiedRadixCache(
            params=CacheInitParams(
                req_to_token_pool=self._pool,
                token_to_kv_pool_allocator=self._allocator,
                page_size=PAGE,
                disable=False,
                tree_components=(ComponentType.FULL, ComponentType.MAMBA),
                enable_mamba_extra_buffer=True,
                tree_core_backend=core,
            )
        )
        chosen = type(self._tree.tree_core).__name__
        if chosen.startswith("Rust") != (core == "rust"):
            raise RuntimeError(f"SGLang chose {chosen} instead of its {core} core.")
        self._parameters = SamplingParams(temperature=0, max_new_tokens=64)
        self._count = 0

    def serve(self, prompt: array[int], answer: array[int]) -> tuple[int, Laps]:
        """See `Driver`."""
        tree, pool, laps, length = self._tree, self._pool, Laps(), len(prompt)
        self._count += 1
        req = Req(
            rid=str(self._count),
            origin_input_text="",
            origin_input_ids=prompt,
            sampling_params=self._parameters,
        )
        laps.start()
        req.init_next_round_input(tree)
        laps.stop("match")
        hit = req.prefix_len
        req.lock = tree.lock(req.last_node)
        needed = -(-(length - hit) // PAGE) * PAGE
        prefix = tree.prefix_device_indices(req) if hit else None
        evict_from_tree_cache(tree, needed)
        pool.alloc([req])
        fresh = self._allocator.alloc(needed)
        row = req.kv.req_pool_idx
        if prefix is not None:
            pool.write((row, slice(0, hit)), prefix)
        pool.write((row, slice(hit, length)), fresh[: length - hit])
        req.kv.kv_allocated_len = req.kv.kv_committed_len = length
        laps.stop("admit")
        req.extend_end = length
        req.kv.mamba_last_track_seqlen = length // PAGE * PAGE
        req.kv.mamba_last_track_idx = 0
        req.kv.mamba_next_track_idx = pool.get_mamba_ping_pong_other_idx(0)
        laps.start()
        checkpoint_kv_cache(req, tree)
        laps.stop("commit")
        self._decode(req, length, answer)
        laps.start()
        release_kv_cache(req, tree, checkpoint=True)
        laps.stop("finish")
        return hit, laps

    def _decode(self, req: Req, length: int, answer: array[int]) -> None:
        """Give the answer its pages; nothing of this is measured."""
        computed = length + len(answer) - 1
        have = -(-length // PAGE) * PAGE
        more = -(-computed // PAGE) * PAGE - have
        row = req.kv.req_pool_idx
        evict_from_tree_cache(self._tree, more)
        last = int(self._pool.req_to_token[row, length - 1])
        rest = torch.arange(last + 1, last + 1 + have - length, dtype=torch.int32)
        fresh = self._allocator.alloc(more).to(torch.int32)
        ids = torch.cat([rest, fresh])[: computed - length]
        self._pool.write((row, slice(length, computed)), ids)
        req.output_ids = array("q", answer)
        req.kv.kv_allocated_len = req.kv.kv_committed_len = computed
        req.kv.mamba_last_track_seqlen = computed // PAGE * PAGE
        req.finished_reason = FINISH_LENGTH(length=len(answer))

    def entries(self) -> int | None:
        """Nodes of the tree; the Rust core does not tell."""
        try:
            stack = [self._tree.tree_core.root_node]
        except NotImplementedError:
            return None
        nodes = 0
        while stack:
            nodes += 1
            stack.extend(stack.pop().children.values())
        return nodes


def _state_pool(slots: int, longest: int) -> HybridReqToTokenPool:
    with envs.SGLANG_MAMBA_SSM_DTYPE.override("bfloat16"):
        shape = Mamba2StateShape.create(
            tp_world_size=1,
            intermediate_size=16,
            n_groups=1,
            num_heads=1,
            head_dim=16,
            state_size=1,
            conv_kernel=2,
        )
        parameters = Mamba2CacheParams(shape=shape, layers=[0])
    return HybridReqToTokenPool(
        size=_REQUESTS,
        mamba_size=slots,
        mamba_spec_state_size=_REQUESTS,
        max_context_len=longest,
        device="cpu",
        enable_memory_saver=False,
        cache_params=parameters,
        mamba_layer_ids=[0],
        enable_mamba_extra_buffer=True,
        speculative_num_draft_tokens=None,
    )
