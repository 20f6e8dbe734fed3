# SPDX-License-Identifier: Apache-2.0
"""Triton kernel: a program for a part of a token's row."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"
# mypy: disable-error-code="untyped-decorator,import-untyped"
# ruff: noqa: N803

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from hybrid_kernels.part_norm import Three


@triton.jit
def _part(p_x, weight, p_out, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """One part; pointers are at its first channel."""
    channel = tl.arange(0, BLOCK)
    live = channel < WIDTH
    b_x = tl.load(p_x + channel, mask=live, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(b_x * b_x, axis=0) / WIDTH + eps)
    b_normed = (b_x * scale).to(p_x.dtype.element_ty).to(tl.float32)
    b_weight = tl.load(weight + channel, mask=live, other=0.0).to(tl.float32)
    b_out = (b_normed * b_weight).to(p_out.dtype.element_ty)
    tl.store(p_out + channel, b_out, mask=live)


@triton.jit
def _rms_norms_kernel(
    x,
    weight_0,
    weight_1,
    weight_2,
    out_0,
    out_1,
    out_2,
    eps,
    x_token,
    WIDTH_0: tl.constexpr,
    WIDTH_1: tl.constexpr,
    WIDTH_2: tl.constexpr,
    BLOCK_0: tl.constexpr,
    BLOCK_1: tl.constexpr,
    BLOCK_2: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    p_x = x + token * x_token
    if part == 0:
        _part(p_x, weight_0, out_0 + token * WIDTH_0, eps, WIDTH_0, BLOCK_0)
    elif part == 1:
        p_x += WIDTH_0
        _part(p_x, weight_1, out_1 + token * WIDTH_1, eps, WIDTH_1, BLOCK_1)
    else:
        p_x += WIDTH_0 + WIDTH_1
        _part(p_x, weight_2, out_2 + token * WIDTH_2, eps, WIDTH_2, BLOCK_2)


def rms_norms(x: torch.Tensor, weights: Three, eps: float) -> Three:
    """See `hybrid_kernels.part_norm.rms_norms`; one launch."""
    widths = [len(one) for one in weights]
    first, second, third = (x.new_empty(len(x), width) for width in widths)
    if x.numel():
        _rms_norms_kernel[(len(x), len(widths))](
            x,
            *weights,
            first,
            second,
            third,
            eps,
            x.stride(0),
            *widths,
            *(max(triton.next_power_of_2(width), 1) for width in widths),
            num_warps=1,
        )
    return first, second, third
