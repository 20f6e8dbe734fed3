# SPDX-License-Identifier: Apache-2.0
"""Triton Mamba-1 selective scan: one program walks a block of channels.

Decay differs per channel and state dimension, so no matrix product applies and the
walk over a sequence is serial; parallelism comes from channels and sequences.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"
# mypy: disable-error-code="untyped-decorator,import-untyped"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hybrid_kernels._common.linear_chunk import boundary_table, flags, rounds
from hybrid_kernels._common.linear_step import sigmoid, softplus
from hybrid_kernels._common.tables import CHUNK, Drafts, Sequences, two_strides
from hybrid_kernels.selective_scan.reference import Operands

_CHANNELS = 32


@triton.jit
def _token(
    b_state,
    p_x,
    p_dt,
    p_B,
    p_C,
    p_gate,
    p_out,
    b_A,
    b_dt_bias,
    b_skip,
    live,
    mask,
    HAS_GATE: tl.constexpr,
):
    """One token: new state; the output is stored. Operands point at the token."""
    b_x = tl.load(p_x, mask=live, other=0.0).to(tl.float32)
    b_dt = softplus(tl.load(p_dt, mask=live, other=0.0).to(tl.float32) + b_dt_bias)
    b_B = tl.load(p_B, mask=mask, other=0.0).to(tl.float32)
    b_C = tl.load(p_C, mask=mask, other=0.0).to(tl.float32)
    # Written as single instructions, so that no variant of a kernel rounds twice
    # where another rounds once: verify must give the bits of update.
    b_state = tl.fma(
        b_state, tl.exp(b_dt[:, None] * b_A), (b_dt * b_x)[:, None] * b_B[None, :]
    )
    b_o = tl.fma(b_x, b_skip, tl.sum(b_state * b_C[None, :], axis=1))
    if HAS_GATE:
        b_gate = tl.load(p_gate, mask=live, other=0.0).to(tl.float32)
        b_o *= b_gate * sigmoid(b_gate)
    tl.store(p_out, b_o.to(p_out.dtype.element_ty), mask=live)
    return b_state


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
    A,
    B,
    C,
    skip,
    gate,
    dt_bias,
    cu_seqlens,
    offsets,
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
    A_channel,
    B_token,
    C_token,
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
    HAS_DT_BIAS: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
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
    b_A = tl.load(
        A + channel[:, None] * A_channel + column[None, :], mask=tile, other=0.0
    ).to(tl.float32)
    b_dt_bias = _vector(dt_bias, channel, live, HAS_DT_BIAS, CHANNELS)
    b_skip = _vector(skip, channel, live, HAS_SKIP, CHANNELS)
    within = channel[:, None].to(tl.int64) * pool_channel
    within += column[None, :] * pool_depth
    known = (channel < tl.where(stateful != 0, channels, 0))[:, None] & mask[None, :]
    b_state = tl.load(pool + slot * pool_slot + within, mask=known, other=0.0)
    b_state = b_state.to(tl.float32)
    offset = 0
    if HAS_OFFSETS:
        offset = tl.load(offsets + sequence).to(tl.int64)
    for index in range(tokens):
        token = start + index
        b_state = _token(
            b_state,
            x + token * x_token + channel,
            dt + token * dt_token + channel,
            B + token * B_token + column,
            C + token * C_token + column,
            gate + token * gate_token + channel if HAS_GATE else x + channel,
            out + token * out_token + channel,
            b_A,
            b_dt_bias,
            b_skip,
            live,
            mask,
            HAS_GATE,
        )
        if (offset + index + 1) % SIZE == 0:
            if ROUND:
                b_state = b_state.to(pool.dtype.element_ty).to(tl.float32)
            chunk = (offset + index) // SIZE
            if chunk < boundaries:
                entry = boundary_slots + sequence * boundary_row + chunk
                target = tl.load(entry).to(tl.int64)
                keep = channel < tl.where(target >= 0, channels, 0)
                tl.store(
                    pool + target * pool_slot + within,
                    b_state.to(pool.dtype.element_ty),
                    mask=keep[:, None] & mask[None, :],
                )
    keep = channel < tl.where(slot >= 0, channels, 0)
    tl.store(
        pool + slot * pool_slot + within,
        b_state.to(pool.dtype.element_ty),
        mask=keep[:, None] & mask[None, :],
    )


@triton.jit
def _step_kernel(
    x,
    dt,
    A,
    B,
    C,
    skip,
    gate,
    dt_bias,
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
    A_channel,
    B_row,
    B_draft,
    C_row,
    C_draft,
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
    HAS_DT_BIAS: tl.constexpr,
    HAS_PARENTS: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    column = tl.arange(0, DEPTH)
    live = channel < channels
    mask = column < depth
    tile = live[:, None] & mask[None, :]
    b_A = tl.load(
        A + channel[:, None] * A_channel + column[None, :], mask=tile, other=0.0
    ).to(tl.float32)
    b_dt_bias = _vector(dt_bias, channel, live, HAS_DT_BIAS, CHANNELS)
    b_skip = _vector(skip, channel, live, HAS_SKIP, CHANNELS)
    within = channel[:, None].to(tl.int64) * pool_channel
    within += column[None, :] * pool_depth
    main = tl.load(slots + row).to(tl.int64)
    known = (channel < tl.where(main >= 0, channels, 0))[:, None] & mask[None, :]
    b_state = tl.load(pool + main * pool_slot + within, mask=known, other=0.0)
    b_state = b_state.to(tl.float32)
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
                b_state = tl.load(source, mask=known, other=0.0).to(tl.float32)
        p_gate = gate + row * gate_row + draft * gate_draft if HAS_GATE else x
        b_state = _token(
            b_state,
            x + row * x_row + draft * x_draft + channel,
            dt + row * dt_row + draft * dt_draft + channel,
            B + row * B_row + draft * B_draft + column,
            C + row * C_row + draft * C_draft + column,
            p_gate + channel,
            out + row * out_row + draft * out_draft + channel,
            b_A,
            b_dt_bias,
            b_skip,
            live,
            mask,
            HAS_GATE,
        )
        entry = draft_slots + row * draft_slots_row + draft * draft_slots_draft
        target = tl.load(entry).to(tl.int64)
        keep = channel < tl.where(target >= 0, channels, 0)
        rounded = b_state.to(pool.dtype.element_ty)
        tl.store(
            pool + target * pool_slot + within,
            rounded,
            mask=keep[:, None] & mask[None, :],
        )
        b_state = rounded.to(tl.float32)


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
        sequences.offsets,
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
        operands.A.stride(0),
        operands.B.stride(0),
        operands.C.stride(0),
        0 if gate is None else gate.stride(0),
        *pool.stride(),
        boundary_row,
        out.stride(0),
        SIZE=CHUNK,
        CHANNELS=_CHANNELS,
        DEPTH=triton.next_power_of_2(pool.shape[2]),
        HAS_SKIP=operands.skip is not None,
        HAS_GATE=gate is not None,
        HAS_DT_BIAS=operands.dt_bias is not None,
        HAS_INITIAL=sequences.has_initial is not None,
        HAS_OFFSETS=sequences.offsets is not None,
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
        operands.A.stride(0),
        *operands.B.stride()[:2],
        *operands.C.stride()[:2],
        *((0, 0) if gate is None else gate.stride()[:2]),
        *pool.stride(),
        *two_strides(drafts.draft_slots),
        *two_strides(parents),
        *out.stride()[:2],
        CHANNELS=_CHANNELS,
        DEPTH=triton.next_power_of_2(pool.shape[2]),
        HAS_SKIP=operands.skip is not None,
        HAS_GATE=gate is not None,
        HAS_DT_BIAS=operands.dt_bias is not None,
        HAS_PARENTS=parents is not None,
        num_warps=1,
    )


def _tensors(operands: Operands) -> tuple[torch.Tensor | None, ...]:
    return (
        operands.x,
        operands.dt,
        operands.A,
        operands.B,
        operands.C,
        operands.skip,
        operands.gate,
        operands.dt_bias,
    )
