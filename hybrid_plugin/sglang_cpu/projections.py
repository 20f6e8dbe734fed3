# SPDX-License-Identifier: Apache-2.0
"""Taking apart the fused projections of a gated delta net layer."""

from __future__ import annotations

import torch


def split_interleaved(
    mixed_qkvz: torch.Tensor,
    mixed_ba: torch.Tensor,
    num_heads_qk: int,
    num_heads_v: int,
    head_qk: int,
    head_v: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sort projections that are stored key head by key head (Qwen3-Next).

    Args:
        mixed_qkvz: ``[T, H * (2 * K + 2 * R * V)]``; for each of the `H` key heads
            its query, its key, and values and gates of its `R` value heads.
        mixed_ba: ``[T, H * 2 * R]``; for each key head `b` and `a` of its value
            heads.
        num_heads_qk: `H`.
        num_heads_v: ``HV = H * R``.
        head_qk: `K`.
        head_v: `V`.

    Returns:
        ``[T, 2 * H * K + HV * V]``, all queries, keys and values;
        ``[T, HV, V]``, the output gates; ``[T, HV]``, `b`; ``[T, HV]``, `a`.
    """
    tokens = mixed_qkvz.shape[0]
    ratio = num_heads_v // num_heads_qk
    sizes = [head_qk, head_qk, ratio * head_v, ratio * head_v]
    heads = mixed_qkvz.view(tokens, num_heads_qk, -1)
    q, k, v, z = torch.split(heads, sizes, dim=-1)
    b, a = mixed_ba.view(tokens, num_heads_qk, 2 * ratio).chunk(2, dim=-1)
    qkv = torch.cat([part.reshape(tokens, -1) for part in (q, k, v)], dim=-1)
    return (
        qkv,
        z.reshape(tokens, num_heads_v, head_v),
        b.reshape(tokens, num_heads_v),
        a.reshape(tokens, num_heads_v),
    )


def split_kinds(
    mixed_qkvz: torch.Tensor,
    mixed_ba: torch.Tensor,
    num_heads_qk: int,
    num_heads_v: int,
    head_qk: int,
    head_v: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split projections that are stored kind by kind (Qwen3.5).

    Args:
        mixed_qkvz: ``[T, 2 * H * K + 2 * HV * V]``; all queries, keys, values, gates.
        mixed_ba: ``[T, 2 * HV]``; all `b`, then all `a`.
        num_heads_qk: `H`.
        num_heads_v: `HV`.
        head_qk: `K`.
        head_v: `V`.

    Returns:
        As `split_interleaved`.
    """
    tokens, gates = mixed_qkvz.shape[0], num_heads_v * head_v
    qkv, z = torch.split(mixed_qkvz, [2 * num_heads_qk * head_qk + gates, gates], -1)
    b, a = mixed_ba.chunk(2, dim=-1)
    z = z.contiguous().view(tokens, num_heads_v, head_v)
    return qkv.contiguous(), z, b.contiguous(), a.contiguous()
