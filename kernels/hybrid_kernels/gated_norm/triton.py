# SPDX-License-Identifier: Apache-2.0
"""Triton kernel: one program for a few heads of a token."""
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
