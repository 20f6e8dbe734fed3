# SPDX-License-Identifier: Apache-2.0
"""Triton Mamba-1 selective scan: one program walks a block of channels.

Decay differs per channel and state dimension, so no matrix product applies and the
walk over a sequence is serial; parallelism comes from channels and sequences.
"""
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"
# mypy: disable-error-code="untyped-decorator,import-untyped"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hybrid_kernels._common.linear_chunk import boundary_table, flags, rounds
from hybrid_kernels._common.linear_step import sigmoid, softplus
from hybrid_kernels._common.tables import CHUNK, Drafts, Sequences
from hybrid_kernels.selective_scan.reference import Operands

_CHANNELS = 32


@triton.jit
def _token(
    state, x, dt, b, c, gate, out, rates, bias, skip, live, mask, HAS_GATE: tl.constexpr
):
    """One token: new state; the output is stored. Operands point at the token."""
    value = tl.load(x, mask=live, other=0.0).to(tl.float32)
    time = softplus(tl.load(dt, mask=live, other=0.0).to(tl.float32) + bias)
    entry = tl.load(b, mask=mask, other=0.0).to(tl.float32)
    query = tl.load(c, mask=mask, other=0.0).to(tl.float32)
    # Written as single instructions, so that no variant of a kernel rounds twice
    # where another rounds once: verify must give the bits of update.
    state = tl.fma(
        state, tl.exp(time[:, None] * rates), (time * value)[:, None] * entry[None, :]
    )
    result = tl.fma(value, skip, tl.sum(state * query[None, :], axis=1))
    if HAS_GATE:
        z = tl.load(gate, mask=live, other=0.0).to(tl.float32)
        result *= z * sigmoid(z)
    tl.store(out, result.to(out.dtype.element_ty), mask=live)
    return state


@triton.jit
def _vector(pointer, channel, live, GIVEN: tl.constexpr, CHANNELS: tl.constexpr):
    """An optional per-channel vector; zeros if it is not given."""
    result = tl.zeros((CHANNELS,), tl.float32)
    if GIVEN:
        result += tl.load(pointer + channel, mask=live, other=0.0).to(tl.float32)
    return result


@triton.jit(do_not_specialize=["boundaries"])
def _prefill_kernel(
    x,
    dt,
    a,
    b,
    c,
    skip,
    gate,
    bias,
    cu_seqlens,
    pool,
    slots,
    has_initial,
    boundary_slots,
    out,
    channels,
    depth,
    boundaries,
    x_token,
    dt_token,
    a_channel,
    b_token,
    c_token,
    gate_token,
    pool_slot,
    pool_channel,
    pool_depth,
    boundary_row,
    out_token,
    SIZE: tl.constexpr,
    CHANNELS: tl.constexpr,
    DEPTH: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    HAS_GATE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    ROUND: tl.constexpr,
):
    sequence = tl.program_id(1).to(tl.int64)
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    column = tl.arange(0, DEPTH)
    live = channel < channels
    mask = column < depth
    tile = live[:, None] & mask[None, :]
    start = tl.load(cu_seqlens + sequence).to(tl.int64)
    tokens = tl.load(cu_seqlens + sequence + 1).to(tl.int64) - start
    slot = tl.load(slots + sequence).to(tl.int64)
    stateful = (slot >= 0).to(tl.int32)
    if HAS_INITIAL:
        stateful *= tl.load(has_initial + sequence)
    rates = tl.load(
        a + channel[:, None] * a_channel + column[None, :], mask=tile, other=0.0
    ).to(tl.float32)
    shift = _vector(bias, channel, live, HAS_BIAS, CHANNELS)
    direct = _vector(skip, channel, live, HAS_SKIP, CHANNELS)
    within = channel[:, None].to(tl.int64) * pool_channel
    within += column[None, :] * pool_depth
    known = (channel < tl.where(stateful != 0, channels, 0))[:, None] & mask[None, :]
    state = tl.load(pool + slot * pool_slot + within, mask=known, other=0.0)
    state = state.to(tl.float32)
    for index in range(tokens):
        token = start + index
        state = _token(
            state,
            x + token * x_token + channel,
            dt + token * dt_token + channel,
            b + token * b_token + column,
            c + token * c_token + column,
            gate + token * gate_token + channel if HAS_GATE else x + channel,
            out + token * out_token + channel,
            rates,
            shift,
            direct,
            live,
            mask,
            HAS_GATE,
        )
        if (index + 1) % SIZE == 0:
            if ROUND:
                state = state.to(pool.dtype.element_ty).to(tl.float32)
            chunk = index // SIZE
            if chunk < boundaries:
                entry = boundary_slots + sequence * boundary_row + chunk
                target = tl.load(entry).to(tl.int64)
                keep = channel < tl.where(target >= 0, channels, 0)
                tl.store(
                    pool + target * pool_slot + within,
                    state.to(pool.dtype.element_ty),
                    mask=keep[:, None] & mask[None, :],
                )
    keep = channel < tl.where(slot >= 0, channels, 0)
    tl.store(
        pool + slot * pool_slot + within,
        state.to(pool.dtype.element_ty),
        mask=keep[:, None] & mask[None, :],
    )


@triton.jit
def _step_kernel(
    x,
    dt,
    a,
    b,
    c,
    skip,
    gate,
    bias,
    pool,
    slots,
    draft_slots,
    parents,
    out,
    channels,
    depth,
    drafts,
    x_row,
    x_draft,
    dt_row,
    dt_draft,
    a_channel,
    b_row,
    b_draft,
    c_row,
    c_draft,
    gate_row,
    gate_draft,
    pool_slot,
    pool_channel,
    pool_depth,
    draft_slots_row,
    draft_slots_draft,
    parents_row,
    parents_draft,
    out_row,
    out_draft,
    CHANNELS: tl.constexpr,
    DEPTH: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    HAS_GATE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_PARENTS: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    column = tl.arange(0, DEPTH)
    live = channel < channels
    mask = column < depth
    tile = live[:, None] & mask[None, :]
    rates = tl.load(
        a + channel[:, None] * a_channel + column[None, :], mask=tile, other=0.0
    ).to(tl.float32)
    shift = _vector(bias, channel, live, HAS_BIAS, CHANNELS)
    direct = _vector(skip, channel, live, HAS_SKIP, CHANNELS)
    within = channel[:, None].to(tl.int64) * pool_channel
    within += column[None, :] * pool_depth
    main = tl.load(slots + row).to(tl.int64)
    known = (channel < tl.where(main >= 0, channels, 0))[:, None] & mask[None, :]
    state = tl.load(pool + main * pool_slot + within, mask=known, other=0.0)
    state = state.to(tl.float32)
    for draft in range(drafts):
        if HAS_PARENTS:
            parent = tl.load(parents + row * parents_row + draft * parents_draft)
            if (parent != draft - 1) & (draft > 0):
                # Other threads of this program may have written that slot.
                tl.debug_barrier()
                entry = tl.maximum(parent, 0) * draft_slots_draft
                origin = tl.load(draft_slots + row * draft_slots_row + entry)
                origin = tl.where(parent < 0, main, origin.to(tl.int64))
                rows = tl.where(origin >= 0, channels, 0)
                known = (channel < rows)[:, None] & mask[None, :]
                source = pool + origin * pool_slot + within
                state = tl.load(source, mask=known, other=0.0).to(tl.float32)
        place = gate + row * gate_row + draft * gate_draft if HAS_GATE else x
        state = _token(
            state,
            x + row * x_row + draft * x_draft + channel,
            dt + row * dt_row + draft * dt_draft + channel,
            b + row * b_row + draft * b_draft + column,
            c + row * c_row + draft * c_draft + column,
            place + channel,
            out + row * out_row + draft * out_draft + channel,
            rates,
            shift,
            direct,
            live,
            mask,
            HAS_GATE,
        )
        entry = draft_slots + row * draft_slots_row + draft * draft_slots_draft
        target = tl.load(entry).to(tl.int64)
        keep = channel < tl.where(target >= 0, channels, 0)
        rounded = state.to(pool.dtype.element_ty)
        tl.store(
            pool + target * pool_slot + within,
            rounded,
            mask=keep[:, None] & mask[None, :],
        )
        state = rounded.to(tl.float32)


def prefill(operands: Operands, sequences: Sequences, out: torch.Tensor) -> None:
    """One launch."""
    x, gate, pool = operands.x, operands.gate, sequences.pool
    channels = x.shape[1]
    if sequences.count == 0 or channels == 0:
        return
    table, boundaries, boundary_row = boundary_table(sequences)
    _prefill_kernel[(triton.cdiv(channels, _CHANNELS), sequences.count)](
        *_tensors(operands),
        sequences.cu_seqlens,
        pool,
        sequences.slots,
        flags(sequences),
        table,
        out,
        channels,
        pool.shape[2],
        boundaries,
        x.stride(0),
        operands.dt.stride(0),
        operands.a.stride(0),
        operands.b.stride(0),
        operands.c.stride(0),
        0 if gate is None else gate.stride(0),
        *pool.stride(),
        boundary_row,
        out.stride(0),
        SIZE=CHUNK,
        CHANNELS=_CHANNELS,
        DEPTH=triton.next_power_of_2(pool.shape[2]),
        HAS_SKIP=operands.skip is not None,
        HAS_GATE=gate is not None,
        HAS_BIAS=operands.bias is not None,
        HAS_INITIAL=sequences.has_initial is not None,
        ROUND=rounds(sequences),
        num_warps=1,
    )


def steps(operands: Operands, drafts: Drafts, out: torch.Tensor) -> None:
    """Run ``[N, L]`` tokens, each from its parent's state; one launch."""
    x, gate, parents, pool = operands.x, operands.gate, drafts.parents, drafts.pool
    rows, count, channels = x.shape
    if rows == 0 or count == 0 or channels == 0:
        return
    _step_kernel[(triton.cdiv(channels, _CHANNELS), rows)](
        *_tensors(operands),
        pool,
        drafts.slots,
        drafts.draft_slots,
        parents,
        out,
        channels,
        pool.shape[2],
        count,
        *x.stride()[:2],
        *operands.dt.stride()[:2],
        operands.a.stride(0),
        *operands.b.stride()[:2],
        *operands.c.stride()[:2],
        *((0, 0) if gate is None else gate.stride()[:2]),
        *pool.stride(),
        *drafts.draft_slots.stride(),
        *((0, 0) if parents is None else parents.stride()),
        *out.stride()[:2],
        CHANNELS=_CHANNELS,
        DEPTH=triton.next_power_of_2(pool.shape[2]),
        HAS_SKIP=operands.skip is not None,
        HAS_GATE=gate is not None,
        HAS_BIAS=operands.bias is not None,
        HAS_PARENTS=parents is not None,
        num_warps=1,
    )


def _tensors(operands: Operands) -> tuple[torch.Tensor | None, ...]:
    return (
        operands.x,
        operands.dt,
        operands.a,
        operands.b,
        operands.c,
        operands.skip,
        operands.gate,
        operands.bias,
    )
