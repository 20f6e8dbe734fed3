# SPDX-License-Identifier: Apache-2.0
"""Triton kernels: a program for a few heads of a token, or for a group of channels."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"
# mypy: disable-error-code="untyped-decorator,import-untyped"
# ruff: noqa: N803

from __future__ import annotations

import torch
import triton
import triton.language as tl

_ELEMENTS = 512
"""Of a program: 16 for each thread of a warp, two loads of 16 bytes in half precision.
Independent of the tokens, as a row's bits have to be."""
_MOST_WARPS = 8
_WARPS_OF_GROUP = 16
"""The most: a group may be all of a layer's channels, and a pass may be one token."""


@triton.jit
def _rms_norm_kernel(
    x,
    gate,
    weight,
    out,
    heads,
    eps,
    x_token,
    x_head,
    gate_token,
    gate_head,
    out_token,
    out_head,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    SILU: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64) * HEADS + tl.arange(0, HEADS)[:, None]
    channel = tl.arange(0, BLOCK)[None, :]
    live = (head < heads) & (channel < WIDTH)
    p_x = x + token * x_token + head * x_head + channel
    p_gate = gate + token * gate_token + head * gate_head + channel
    b_x = tl.load(p_x, mask=live, other=0.0).to(tl.float32)
    b_gate = tl.load(p_gate, mask=live, other=0.0).to(tl.float32)
    b_weight = tl.load(weight + channel, mask=channel < WIDTH, other=0.0)
    scale = tl.rsqrt(tl.sum(b_x * b_x, axis=1) / WIDTH + eps)
    opened = tl.sigmoid(b_gate)
    if SILU:
        opened = b_gate * opened
    b_out = b_x * scale[:, None] * b_weight.to(tl.float32) * opened
    p_out = out + token * out_token + head * out_head + channel
    tl.store(p_out, b_out.to(out.dtype.element_ty), mask=live)


def rms_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    activation: str,
    out: torch.Tensor,
) -> None:
    """See `hybrid_kernels.gated_norm.rms_norm`; one launch."""
    tokens, heads, width = x.shape
    if x.numel() == 0:
        return
    block = triton.next_power_of_2(width)
    together = min(max(_ELEMENTS // block, 1), triton.next_power_of_2(heads))
    _rms_norm_kernel[(tokens, triton.cdiv(heads, together))](
        x,
        gate,
        weight,
        out,
        heads,
        eps,
        *x.stride()[:2],
        *gate.stride()[:2],
        *out.stride()[:2],
        WIDTH=width,
        HEADS=together,
        BLOCK=block,
        SILU=activation != "sigmoid",
        num_warps=min(max(block * together // _ELEMENTS, 1), _MOST_WARPS),
    )


@triton.jit
def _norm_of_gated_kernel(
    x,
    gate,
    weight,
    out,
    eps,
    x_token,
    x_group,
    gate_token,
    gate_group,
    weight_group,
    out_token,
    out_group,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1).to(tl.int64)
    channel = tl.arange(0, BLOCK)
    live = channel < WIDTH
    p_x = x + token * x_token + group * x_group + channel
    p_gate = gate + token * gate_token + group * gate_group + channel
    b_gate = tl.load(p_gate, mask=live, other=0.0).to(tl.float32)
    b_x = tl.load(p_x, mask=live, other=0.0).to(tl.float32)
    b_gated = b_x * (b_gate * tl.sigmoid(b_gate))
    scale = tl.rsqrt(tl.sum(b_gated * b_gated, axis=0) / WIDTH + eps)
    b_normed = (b_gated * scale).to(x.dtype.element_ty).to(tl.float32)
    b_weight = tl.load(weight + group * weight_group + channel, mask=live, other=0.0)
    p_out = out + token * out_token + group * out_group + channel
    b_out = b_normed * b_weight.to(tl.float32)
    tl.store(p_out, b_out.to(out.dtype.element_ty), mask=live)


def norm_of_gated(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
) -> None:
    """See `hybrid_kernels.gated_norm.norm_of_gated`; one launch."""
    tokens, groups, width = x.shape
    if x.numel() == 0:
        return
    block = triton.next_power_of_2(width)
    _norm_of_gated_kernel[(tokens, groups)](
        x,
        gate,
        weight,
        out,
        eps,
        *x.stride()[:2],
        *gate.stride()[:2],
        weight.stride(0),
        *out.stride()[:2],
        WIDTH=width,
        BLOCK=block,
        num_warps=min(max(block // _ELEMENTS, 1), _WARPS_OF_GROUP),
    )
