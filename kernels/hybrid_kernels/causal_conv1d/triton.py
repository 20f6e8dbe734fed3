# SPDX-License-Identifier: Apache-2.0
"""Triton convolution: prefill in two launches, decode and verify in one."""
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"
# mypy: disable-error-code="untyped-decorator,import-untyped"

from __future__ import annotations

import torch
import triton
import triton.language as tl

_TOKENS = 32
_CHANNELS = 128
_STEP_CHANNELS = 256
_STEP_WARPS = 4


@triton.jit
def _sequence_of(token, cu_seqlens, sequences, search_steps):
    """The sequence that holds each token, by bisection over the running sums."""
    low = tl.zeros_like(token)
    high = low + sequences
    for _ in range(search_steps):
        middle = (low + high) // 2
        below = tl.load(cu_seqlens + middle) <= token
        low = tl.where(below, middle, low)
        high = tl.where(below, high, middle)
    return low


@triton.jit
def _prefill_kernel(
    x,
    weight,
    bias,
    cu_seqlens,
    pool,
    slots,
    has_initial,
    out,
    tokens,
    channels,
    sequences,
    search_steps,
    x_token,
    x_channel,
    weight_channel,
    weight_tap,
    pool_slot,
    pool_channel,
    pool_input,
    out_token,
    out_channel,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    SILU: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    live = channel < channels
    sequence = _sequence_of(token, cu_seqlens, sequences, search_steps)
    start = tl.load(cu_seqlens + sequence).to(tl.int32)
    valid = token < tl.load(cu_seqlens + sequences)
    slot = tl.load(slots + sequence).to(tl.int64)
    stateful = valid & (slot >= 0)
    if HAS_INITIAL:
        stateful = stateful & (tl.load(has_initial + sequence) != 0)

    total = tl.zeros((TOKENS, CHANNELS), tl.float32)
    if HAS_BIAS:
        total += tl.load(bias + channel, mask=live, other=0.0).to(tl.float32)[None, :]
    for tap in tl.static_range(WIDTH):
        source = token - (WIDTH - 1) + tap
        inside = valid & (source >= start)
        value = tl.load(
            x + source[:, None].to(tl.int64) * x_token + channel[None, :] * x_channel,
            mask=inside[:, None] & live[None, :],
            other=0.0,
        ).to(tl.float32)
        before = stateful & (source < start)
        column = source - start + (WIDTH - 1)
        value += tl.load(
            pool
            + slot[:, None] * pool_slot
            + channel[None, :] * pool_channel
            + column[:, None] * pool_input,
            mask=before[:, None] & live[None, :],
            other=0.0,
        ).to(tl.float32)
        scale = tl.load(
            weight + channel * weight_channel + tap * weight_tap, mask=live, other=0.0
        ).to(tl.float32)
        total += value * scale[None, :]
    if SILU:
        total = total / (1.0 + tl.exp(-total))
    total = tl.where(valid[:, None], total, 0.0)
    tl.store(
        out + token[:, None].to(tl.int64) * out_token + channel[None, :] * out_channel,
        total.to(out.dtype.element_ty),
        mask=(token < tokens)[:, None] & live[None, :],
    )


@triton.jit
def _state_kernel(
    x,
    cu_seqlens,
    pool,
    slots,
    has_initial,
    boundary_slots,
    channels,
    boundaries,
    every,
    x_token,
    x_channel,
    pool_slot,
    pool_channel,
    pool_input,
    boundary_row,
    WIDTH: tl.constexpr,
    INPUTS: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Write the state at one boundary (``part < boundaries``) or at the end."""
    sequence = tl.program_id(0) // (boundaries + 1)
    part = tl.program_id(0) % (boundaries + 1)
    start = tl.load(cu_seqlens + sequence).to(tl.int64)
    length = tl.load(cu_seqlens + sequence + 1).to(tl.int64) - start
    initial = tl.load(slots + sequence).to(tl.int64)
    target = initial
    end = length
    if part < boundaries:
        end = ((part + 1) * every).to(tl.int64)
        target = tl.load(boundary_slots + sequence * boundary_row + part).to(tl.int64)
    stateful = (initial >= 0).to(tl.int32)
    if HAS_INITIAL:
        stateful *= tl.load(has_initial + sequence)

    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    column = tl.arange(0, INPUTS)
    # Conditions on the whole program are folded into the bounds.
    columns = tl.where((target >= 0) & (end <= length), WIDTH - 1, 0)
    mask = (channel < channels)[:, None] & (column < columns)[None, :]
    source = end - (WIDTH - 1) + column
    kept = source < tl.where(stateful != 0, 0, -WIDTH)
    place = channel[:, None].to(tl.int64) * pool_channel
    value = tl.load(
        x + (start + source)[None, :] * x_token + channel[:, None] * x_channel,
        mask=mask & (source >= 0)[None, :],
        other=0.0,
    ).to(pool.dtype.element_ty)
    old = tl.load(
        pool + initial * pool_slot + place + (source + WIDTH - 1)[None, :] * pool_input,
        mask=mask & kept[None, :],
        other=0.0,
    )
    # A short sequence shifts its own state: every thread reads before any writes.
    tl.debug_barrier()
    value = tl.where((source < 0)[None, :], old, value)
    tl.store(
        pool + target * pool_slot + place + column[None, :] * pool_input,
        value,
        mask=mask,
    )


@triton.jit
def _column(
    pool, slot, offset, stride, mask, NUMBER: tl.constexpr, WIDTH: tl.constexpr
):
    """Input `NUMBER` of a state; zeros where the state is shorter or masked."""
    place = pool + slot + offset
    if NUMBER < WIDTH - 1:
        place += NUMBER * stride
    else:
        mask = mask & (offset < 0)
    return tl.load(place, mask=mask, other=0.0)


@triton.jit
def _step_kernel(
    x,
    weight,
    bias,
    pool,
    slots,
    draft_slots,
    parents,
    out,
    channels,
    drafts,
    x_row,
    x_draft,
    x_channel,
    weight_channel,
    weight_tap,
    pool_slot,
    pool_channel,
    pool_input,
    draft_slots_row,
    draft_slots_draft,
    parents_row,
    parents_draft,
    out_row,
    out_draft,
    out_channel,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_PARENTS: tl.constexpr,
    SILU: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """The last up to four inputs live in ``past0`` (oldest) to ``past3``."""
    row = tl.program_id(0)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    live = channel < channels
    offset = channel.to(tl.int64) * pool_channel
    main = tl.load(slots + row).to(tl.int64)
    slot = main * pool_slot
    known = channel < tl.where(main >= 0, channels, 0)
    past0 = _column(pool, slot, offset, pool_input, known, 0, WIDTH)
    past1 = _column(pool, slot, offset, pool_input, known, 1, WIDTH)
    past2 = _column(pool, slot, offset, pool_input, known, 2, WIDTH)
    past3 = _column(pool, slot, offset, pool_input, known, 3, WIDTH)
    tap = channel * weight_channel
    tap0 = _column(weight, 0, tap, weight_tap, live, 0, WIDTH).to(tl.float32)
    tap1 = _column(weight, 0, tap, weight_tap, live, 1, WIDTH).to(tl.float32)
    tap2 = _column(weight, 0, tap, weight_tap, live, 2, WIDTH).to(tl.float32)
    tap3 = _column(weight, 0, tap, weight_tap, live, 3, WIDTH).to(tl.float32)
    newest = tl.load(weight + tap + (WIDTH - 1) * weight_tap, mask=live, other=0.0)
    newest = newest.to(tl.float32)
    base = tl.zeros((CHANNELS,), tl.float32)
    if HAS_BIAS:
        base += tl.load(bias + channel, mask=live, other=0.0).to(tl.float32)

    for draft in range(drafts):
        if HAS_PARENTS:
            parent = tl.load(parents + row * parents_row + draft * parents_draft)
            if (parent != draft - 1) | (draft == 0):
                # Other threads of this program may have written that slot.
                tl.debug_barrier()
                entry = tl.maximum(parent, 0) * draft_slots_draft
                origin = tl.load(draft_slots + row * draft_slots_row + entry)
                origin = tl.where(parent < 0, main, origin.to(tl.int64))
                slot = origin * pool_slot
                known = channel < tl.where(origin >= 0, channels, 0)
                past0 = _column(pool, slot, offset, pool_input, known, 0, WIDTH)
                past1 = _column(pool, slot, offset, pool_input, known, 1, WIDTH)
                past2 = _column(pool, slot, offset, pool_input, known, 2, WIDTH)
                past3 = _column(pool, slot, offset, pool_input, known, 3, WIDTH)
        value = tl.load(
            x + row.to(tl.int64) * x_row + draft * x_draft + channel * x_channel,
            mask=live,
            other=0.0,
        )
        total = base + past0.to(tl.float32) * tap0
        if WIDTH > 2:
            total += past1.to(tl.float32) * tap1
        if WIDTH > 3:
            total += past2.to(tl.float32) * tap2
        if WIDTH > 4:
            total += past3.to(tl.float32) * tap3
        total += value.to(tl.float32) * newest
        if SILU:
            total = total / (1.0 + tl.exp(-total))
        tl.store(
            out
            + row.to(tl.int64) * out_row
            + draft * out_draft
            + channel * out_channel,
            total.to(out.dtype.element_ty),
            mask=live,
        )
        fresh = value.to(pool.dtype.element_ty)
        past0 = past1 if WIDTH > 2 else fresh
        if WIDTH > 2:
            past1 = past2 if WIDTH > 3 else fresh
        if WIDTH > 3:
            past2 = past3 if WIDTH > 4 else fresh
        if WIDTH > 4:
            past3 = fresh
        entry = draft_slots + row * draft_slots_row + draft * draft_slots_draft
        target = tl.load(entry).to(tl.int64)
        place = pool + target * pool_slot + offset
        keep = channel < tl.where(target >= 0, channels, 0)
        tl.store(place, past0, mask=keep)
        if WIDTH > 2:
            tl.store(place + pool_input, past1, mask=keep)
        if WIDTH > 3:
            tl.store(place + 2 * pool_input, past2, mask=keep)
        if WIDTH > 4:
            tl.store(place + 3 * pool_input, past3, mask=keep)


def prefill(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    cu_seqlens: torch.Tensor,
    pool: torch.Tensor,
    slots: torch.Tensor,
    has_initial: torch.Tensor | None,
    activation: str | None,
    boundary_slots: torch.Tensor | None,
    boundary_every: int,
    out: torch.Tensor,
) -> None:
    """Convolve, then write states: a program may not write what another reads."""
    tokens, channels = x.shape
    sequences = slots.numel()
    if sequences == 0 or channels == 0:
        out.zero_()
        return
    if has_initial is not None:
        has_initial = has_initial.view(torch.uint8)
    blocks = triton.cdiv(channels, _CHANNELS)
    if tokens:
        _prefill_kernel[(triton.cdiv(tokens, _TOKENS), blocks)](
            x,
            weight,
            bias,
            cu_seqlens,
            pool,
            slots,
            has_initial,
            out,
            tokens,
            channels,
            sequences,
            sequences.bit_length(),
            *x.stride(),
            *weight.stride(),
            *pool.stride(),
            *out.stride(),
            WIDTH=weight.shape[1],
            HAS_BIAS=bias is not None,
            HAS_INITIAL=has_initial is not None,
            SILU=activation == "silu",
            TOKENS=_TOKENS,
            CHANNELS=_CHANNELS,
        )
    count = 0 if boundary_slots is None else boundary_slots.shape[1]
    _state_kernel[(sequences * (count + 1), blocks)](
        x,
        cu_seqlens,
        pool,
        slots,
        has_initial,
        # Never read if there are none, but the kernel wants a pointer.
        slots if boundary_slots is None else boundary_slots,
        channels,
        count,
        boundary_every,
        *x.stride(),
        *pool.stride(),
        0 if boundary_slots is None else boundary_slots.stride(0),
        WIDTH=weight.shape[1],
        INPUTS=4,
        HAS_INITIAL=has_initial is not None,
        CHANNELS=_CHANNELS,
    )


def step(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    pool: torch.Tensor,
    slots: torch.Tensor,
    draft_slots: torch.Tensor,
    parents: torch.Tensor | None,
    activation: str | None,
    out: torch.Tensor,
) -> None:
    """One or more tokens per sequence, each behind its parent's state."""
    rows, drafts, channels = x.shape
    if rows == 0 or drafts == 0:
        return
    _step_kernel[(rows, triton.cdiv(channels, _STEP_CHANNELS))](
        x,
        weight,
        bias,
        pool,
        slots,
        draft_slots,
        parents,
        out,
        channels,
        drafts,
        *x.stride(),
        *weight.stride(),
        *pool.stride(),
        *draft_slots.stride(),
        *((0, 0) if parents is None else parents.stride()),
        *out.stride(),
        WIDTH=weight.shape[1],
        HAS_BIAS=bias is not None,
        HAS_PARENTS=parents is not None,
        SILU=activation == "silu",
        CHANNELS=_STEP_CHANNELS,
        num_warps=_STEP_WARPS,
    )
