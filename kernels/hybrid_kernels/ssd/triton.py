# SPDX-License-Identifier: Apache-2.0
"""Triton Mamba-2, on the kernels of the shared recurrence."""
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"
# mypy: disable-error-code="untyped-decorator,import-untyped"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hybrid_kernels._common import linear_chunk as chunk
from hybrid_kernels._common import linear_step


@triton.jit
def _times_kernel(
    dt,
    a,
    bias,
    times,
    decays,
    count,
    heads,
    dt_token,
    dt_head,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Softplus of the time steps, and the log decays; both float32, packed."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = index < count
    token = index // heads
    head = index % heads
    time = tl.load(dt + token * dt_token + head * dt_head, mask=mask, other=0.0)
    time = time.to(tl.float32)
    if HAS_BIAS:
        time += tl.load(bias + head, mask=mask, other=0.0).to(tl.float32)
    time = linear_step.softplus(time)
    speed = tl.load(a + head, mask=mask, other=0.0).to(tl.float32)
    tl.store(times + index, time, mask=mask)
    tl.store(decays + index, time * speed, mask=mask)


def prefill(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    skip: torch.Tensor | None,
    gate: torch.Tensor | None,
    bias: torch.Tensor | None,
    cu_seqlens: torch.Tensor,
    pool: torch.Tensor,
    slots: torch.Tensor,
    has_initial: torch.Tensor | None,
    boundary_slots: torch.Tensor | None,
    round_boundaries: bool,
    out: torch.Tensor,
) -> None:
    """Time steps, state passing, outputs."""
    if slots.numel() == 0:
        return
    batch = chunk.Batch(
        cu_seqlens, pool, slots, has_initial, boundary_slots, round_boundaries
    )
    offsets = chunk.chunk_offsets(cu_seqlens)
    time, g = _times(dt, a, bias)
    states = chunk.pass_states(b, x, g, time, None, batch, offsets)
    chunk.outputs(
        c,
        b,
        x,
        g,
        time,
        states,
        batch,
        offsets,
        out,
        scale=1.0,
        skip=skip,
        gate=gate,
    )


def steps(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    skip: torch.Tensor | None,
    gate: torch.Tensor | None,
    bias: torch.Tensor | None,
    pool: torch.Tensor,
    slots: torch.Tensor,
    draft_slots: torch.Tensor,
    parents: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """One or more tokens per sequence, each from its parent's state."""
    extras = linear_step.Extras(rate=a, bias=bias, scale_v=True, skip=skip, gate=gate)
    linear_step.launch(
        c,
        b,
        x,
        dt,
        None,
        pool,
        slots,
        draft_slots,
        parents,
        out,
        scale=1.0,
        normalise=False,
        extras=extras,
    )


def _times(
    dt: torch.Tensor, a: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    times = torch.empty(dt.shape, dtype=torch.float32, device=dt.device)
    decays = torch.empty_like(times)
    count = dt.numel()
    if count:
        _times_kernel[(triton.cdiv(count, 1024),)](
            dt,
            a,
            bias,
            times,
            decays,
            count,
            dt.shape[1],
            *dt.stride(),
            HAS_BIAS=bias is not None,
            BLOCK=1024,
        )
    return times, decays
