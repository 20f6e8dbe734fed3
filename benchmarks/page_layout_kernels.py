# SPDX-License-Identifier: Apache-2.0
"""The kernels of `page_layout`: what each reads or writes in one layer's pages.

Every entry of `KERNELS` makes one call for a layer of a cache that lies either way, or
raises where it cannot be imported or does not run on the device.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.page_layout_cache import Batch, Cache

Call = Callable[[int], torch.Tensor]
"""Works on the layer of that number; returns the output, or what was written."""


def vllm_flash_attention(batch: Batch, cache: Cache) -> Call:
    from vllm.v1.attention.backends.fa_utils import get_flash_attn_version
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    output, version = torch.empty_like(batch.query), get_flash_attn_version()

    def call(layer: int) -> torch.Tensor:
        keys, values = cache.layer(layer)
        flash_attn_varlen_func(
            q=batch.query,
            k=keys,
            v=values,
            out=output,
            cu_seqlens_q=batch.starts,
            max_seqlen_q=batch.load.new,
            seqused_k=batch.lengths,
            max_seqlen_k=batch.load.context,
            softmax_scale=batch.scale,
            causal=True,
            block_table=batch.table,
            fa_version=version,
        )
        return output

    return call


def vllm_triton(batch: Batch, cache: Cache) -> Call:
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention

    output = torch.empty_like(batch.query)
    one = torch.ones((batch.load.sequences, batch.shape.kv_heads), device=batch.device)

    def call(layer: int) -> torch.Tensor:
        keys, values = cache.layer(layer)
        unified_attention(
            q=batch.query,
            k=keys,
            v=values,
            out=output,
            cu_seqlens_q=batch.starts,
            max_seqlen_q=batch.load.new,
            seqused_k=batch.lengths,
            max_seqlen_k=batch.load.context,
            softmax_scale=batch.scale,
            causal=True,
            window_size=(-1, -1),
            block_table=batch.table,
            softcap=0.0,
            q_descale=None,
            k_descale=one,
            v_descale=one,
        )
        return output

    return call


def vllm_write(batch: Batch, cache: Cache) -> Call:
    from vllm import _custom_ops as ops

    one = torch.ones((), device=batch.device)

    def call(layer: int) -> torch.Tensor:
        keys, values = cache.layer(layer)
        ops.reshape_and_cache_flash(
            batch.key, batch.value, keys, values, batch.fresh, "auto", one, one
        )
        return keys

    return call


def sglang_decode(batch: Batch, cache: Cache) -> Call:
    from sglang.kernels.ops.attention.decode_attention import decode_attention_fwd

    if batch.load.new != 1:
        raise NotImplementedError("decodes one token of each sequence")
    output, splits, sequences = torch.empty_like(batch.query), 8, batch.load.sequences
    starts = batch._steps(batch.load.context)
    places = batch.tokens.reshape(-1).contiguous()
    partial = torch.empty(
        (sequences, batch.shape.query_heads, splits, batch.shape.width),
        device=batch.device,
    )
    sums = torch.empty(partial.shape[:3], device=batch.device)
    each = torch.full((sequences,), splits, dtype=torch.int32, device=batch.device)

    def call(layer: int) -> torch.Tensor:
        keys, values = cache.layer(layer)
        decode_attention_fwd(
            batch.query,
            keys,
            values,
            output,
            starts,
            places,
            partial,
            sums,
            each,
            splits,
            batch.scale,
            1.0,
            1.0,
        )
        return output

    return call


def sglang_extend(batch: Batch, cache: Cache) -> Call:
    from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd

    if batch.load.new == 1:
        raise NotImplementedError("extends sequences by a chunk")
    output = torch.empty_like(batch.query)
    starts, places = batch.prefix()

    def call(layer: int) -> torch.Tensor:
        keys, values = cache.layer(layer)
        extend_attention_fwd(
            batch.query,
            batch.key,
            batch.value,
            output,
            keys,
            values,
            batch.starts,
            starts,
            places,
            None,
            True,
            None,
            batch.load.new,
            1.0,
            1.0,
            sm_scale=batch.scale,
        )
        return output

    return call


def sglang_flash_attention(batch: Batch, cache: Cache) -> Call:
    from sglang.kernels.ops.attention.flash_attention_v3 import flash_attn_with_kvcache

    size = batch.shape.page_size

    def call(layer: int) -> torch.Tensor:
        keys, values = (part.unflatten(0, (-1, size)) for part in cache.layer(layer))
        found = flash_attn_with_kvcache(
            batch.query,
            keys,
            values,
            cache_seqlens=batch.lengths,
            page_table=batch.table,
            cu_seqlens_q=batch.starts,
            max_seqlen_q=batch.load.new,
            softmax_scale=batch.scale,
            causal=True,
        )
        assert isinstance(found, torch.Tensor)
        return found

    return call


def sglang_write(batch: Batch, cache: Cache) -> Call:
    from sglang.kernels.ops.kvcache.kvcache import store_cache

    row = batch.shape.kv_heads * batch.shape.width

    def call(layer: int) -> torch.Tensor:
        keys, values = cache.layer(layer)
        store_cache(
            batch.key.view(-1, row),
            batch.value.view(-1, row),
            keys.view(-1, row),
            values.view(-1, row),
            batch.fresh,
        )
        return keys

    return call


def torch_attention(batch: Batch, cache: Cache) -> Call:
    """A gather, then dense attention, much like SGLang's PyTorch backend."""
    groups = batch.shape.query_heads // batch.shape.kv_heads
    load = batch.load
    mask = torch.ones(load.new, load.context, dtype=torch.bool, device=batch.device)
    mask = mask.tril(load.context - load.new)

    def call(layer: int) -> torch.Tensor:
        keys, values = (
            part[batch.tokens].transpose(1, 2).repeat_interleave(groups, 1)
            for part in cache.layer(layer)
        )
        query = batch.query.unflatten(0, (load.sequences, load.new)).transpose(1, 2)
        return torch.nn.functional.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, scale=batch.scale
        )

    return call


def torch_write(batch: Batch, cache: Cache) -> Call:
    def call(layer: int) -> torch.Tensor:
        keys, values = cache.layer(layer)
        keys[batch.fresh], values[batch.fresh] = batch.key, batch.value
        return keys

    return call


KERNELS: dict[str, tuple[Callable[[Batch, Cache], Call], bool]] = {
    "vLLM FlashAttention": (vllm_flash_attention, True),
    "vLLM Triton attention": (vllm_triton, True),
    "vLLM KV write": (vllm_write, True),
    "SGLang Triton decode": (sglang_decode, False),
    "SGLang Triton extend": (sglang_extend, False),
    "SGLang FlashAttention 3": (sglang_flash_attention, False),
    "SGLang KV write": (sglang_write, False),
}
"""How each is made, and whether it takes pages, or tokens."""
CPU_KERNELS: dict[str, tuple[Callable[[Batch, Cache], Call], bool]] = {
    "PyTorch attention": (torch_attention, False),
    "PyTorch KV write": (torch_write, False),
}
"""Those that run without a GPU, likewise."""
