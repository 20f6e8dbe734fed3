# SPDX-License-Identifier: Apache-2.0
"""Triton kernel: one program for a request."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"
# mypy: disable-error-code="untyped-decorator,import-untyped"
# ruff: noqa: N803

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hybrid_kernels._common.tables import two_strides
from hybrid_kernels.stops.reference import NO_TOKEN, Ends

_NO_TOKEN = tl.constexpr(NO_TOKEN)


@triton.jit
def _cut_kernel(
    sampled,
    num_sampled,
    num_rejected,
    rows,
    stop_ids,
    lengths,
    computed,
    others,
    kept,
    rejected,
    width,
    stops,
    sampled_row,
    sampled_token,
    stop_row,
    stop_token,
    others_row,
    others_token,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_STOPS: tl.constexpr,
    HAS_OTHERS: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + request).to(tl.int64)
    place = tl.arange(0, BLOCK_TOKENS)
    number = tl.arange(0, BLOCK_STOPS)
    live = place < width
    token = tl.load(
        sampled + request * sampled_row + place * sampled_token, mask=live, other=0
    ).to(tl.int64)
    stop = tl.load(
        stop_ids + row * stop_row + number * stop_token,
        mask=number < stops,
        other=_NO_TOKEN,
    ).to(tl.int64)
    same = (token[:, None] == stop[None, :]).to(tl.int32)
    ends = tl.max(same, axis=1) > 0
    known = tl.load(computed + row).to(tl.int64) + 2 + place
    ends = ends | (known >= tl.load(lengths + row).to(tl.int64))
    if HAS_OTHERS:
        other = tl.load(
            others + request * others_row + place * others_token, mask=live, other=0
        )
        ends = ends | (other != 0)
    most = tl.min(tl.where(ends & live, place, width), axis=0) + 1
    count = tl.load(num_sampled + request).to(tl.int64)
    left = tl.minimum(count, most.to(tl.int64))
    before = tl.load(num_rejected + request).to(tl.int64)
    tl.store(kept + request, left.to(kept.dtype.element_ty))
    tl.store(rejected + request, (before + count - left).to(rejected.dtype.element_ty))


def cut(
    sampled: torch.Tensor,
    num_sampled: torch.Tensor,
    num_rejected: torch.Tensor,
    rows: torch.Tensor,
    ends: Ends,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `hybrid_kernels.stops.cut`."""
    (count, width), stops = sampled.shape, ends.stop_ids.shape[1]
    kept, rejected = torch.empty_like(num_sampled), torch.empty_like(num_rejected)
    if count == 0:
        return kept, rejected
    others = None if ends.others is None else ends.others.view(torch.uint8)
    _cut_kernel[(count,)](
        sampled,
        num_sampled,
        num_rejected,
        rows,
        ends.stop_ids,
        ends.lengths,
        ends.computed,
        others,
        kept,
        rejected,
        width,
        stops,
        *sampled.stride(),
        *ends.stop_ids.stride(),
        *two_strides(others),
        BLOCK_TOKENS=triton.next_power_of_2(width),
        BLOCK_STOPS=triton.next_power_of_2(max(stops, 1)),
        HAS_OTHERS=others is not None,
        num_warps=1,
    )
    return kept, rejected
