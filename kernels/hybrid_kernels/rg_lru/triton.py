# SPDX-License-Identifier: Apache-2.0
"""Triton real-gated linear recurrent unit.

Prefill scans a chunk at a time, cut as `hybrid_kernels._common.chunk_kernels` has them,
with the associative form of ``h -> a h + b``; one program walks a sequence for a block
of channels.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"
# mypy: disable-error-code="untyped-decorator,import-untyped"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hybrid_kernels._common.chunk_kernels import cut, ends_at_boundary, how_many
from hybrid_kernels._common.linear_chunk import boundary_table, flags, rounds
from hybrid_kernels._common.linear_step import sigmoid
from hybrid_kernels._common.tables import CHUNK, Drafts, Sequences, two_strides
from hybrid_kernels.rg_lru.reference import Operands

_CHANNELS = 32
_STEP_CHANNELS = 256


@triton.jit
def _gates(x, input_gate, recurrence_gate, b_A, mask):
    """The decay ``a``, the gated input and its factor ``sqrt(1 - a^2)``."""
    b_x = tl.load(x, mask=mask, other=0.0).to(tl.float32)
    b_input_gate = tl.load(input_gate, mask=mask, other=0.0).to(tl.float32)
    b_recurrence_gate = tl.load(recurrence_gate, mask=mask, other=0.0).to(tl.float32)
    b_a = tl.exp(b_A * sigmoid(b_recurrence_gate))
    factor = tl.sqrt(tl.maximum(1.0 - b_a * b_a, 0.0))
    return b_a, b_x * sigmoid(b_input_gate), factor


@triton.jit
def _join(left_decay, left, right_decay, right):
    return left_decay * right_decay, left * right_decay + right


@triton.jit(do_not_specialize=["boundaries"])
def _prefill_kernel(
    x,
    input_gate,
    recurrence_gate,
    A,
    cu_seqlens,
    offsets,
    pool,
    slots,
    has_initial,
    boundary_slots,
    out,
    channels,
    boundaries,
    x_token,
    input_gate_token,
    recurrence_gate_token,
    pool_slot,
    pool_channel,
    boundary_row,
    out_token,
    SIZE: tl.constexpr,
    CHANNELS: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    ROUND: tl.constexpr,
):
    sequence = tl.program_id(1).to(tl.int64)
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    live = channel < channels
    start = tl.load(cu_seqlens + sequence).to(tl.int64)
    tokens = tl.load(cu_seqlens + sequence + 1).to(tl.int64) - start
    slot = tl.load(slots + sequence).to(tl.int64)
    stateful = (slot >= 0).to(tl.int32)
    if HAS_INITIAL:
        stateful *= tl.load(has_initial + sequence)
    b_A = tl.load(A + channel, mask=live, other=0.0).to(tl.float32)
    within = channel.to(tl.int64) * pool_channel
    known = channel < tl.where(stateful != 0, channels, 0)
    b_state = tl.load(pool + slot * pool_slot + within, mask=known, other=0.0)
    b_state = b_state.to(tl.float32)
    position = tl.arange(0, SIZE)
    # The one token that enters with factor 1; none if there is a state.
    first_token = tl.where(stateful != 0, -1, 0)
    offset = 0
    if HAS_OFFSETS:
        offset = tl.load(offsets + sequence).to(tl.int64)
    for chunk in range(how_many(offset, tokens, SIZE, HAS_OFFSETS)):
        first, length = cut(chunk, offset, tokens, SIZE, HAS_OFFSETS)
        token = first + position
        mask = (position < length)[:, None] & live[None, :]
        o_token = (start + token)[:, None]
        b_a, b_x, factor = _gates(
            x + o_token * x_token + channel[None, :],
            input_gate + o_token * input_gate_token + channel[None, :],
            recurrence_gate + o_token * recurrence_gate_token + channel[None, :],
            b_A[None, :],
            mask,
        )
        factor = tl.where((token == first_token)[:, None], 1.0, factor)
        # Beyond the end the state stays as it is.
        b_a = tl.where(mask, b_a, 1.0)
        b_x = tl.where(mask, b_x * factor, 0.0)
        b_a, b_x = tl.associative_scan((b_a, b_x), 0, _join)
        b_o = b_a * b_state[None, :] + b_x
        o_out = (start + token)[:, None] * out_token + channel[None, :]
        tl.store(out + o_out, b_o.to(out.dtype.element_ty), mask=mask)
        final = (position == SIZE - 1)[:, None]
        b_state = tl.sum(tl.where(final, b_o, 0.0), axis=0)
        if ROUND:  # noqa: SIM102 - one is a constant
            if ends_at_boundary(first, length, offset, SIZE, HAS_OFFSETS):
                b_state = b_state.to(pool.dtype.element_ty).to(tl.float32)
        listed = chunk < boundaries
        if listed & ends_at_boundary(first, length, offset, SIZE, HAS_OFFSETS):
            entry = boundary_slots + sequence * boundary_row + chunk
            target = tl.load(entry).to(tl.int64)
            keep = channel < tl.where(target >= 0, channels, 0)
            rounded = b_state.to(pool.dtype.element_ty)
            tl.store(pool + target * pool_slot + within, rounded, mask=keep)
    keep = channel < tl.where(slot >= 0, channels, 0)
    rounded = b_state.to(pool.dtype.element_ty)
    tl.store(pool + slot * pool_slot + within, rounded, mask=keep)


@triton.jit
def _step_kernel(
    x,
    input_gate,
    recurrence_gate,
    A,
    pool,
    slots,
    draft_slots,
    parents,
    out,
    channels,
    drafts,
    x_row,
    x_draft,
    input_gate_row,
    input_gate_draft,
    recurrence_gate_row,
    recurrence_gate_draft,
    pool_slot,
    pool_channel,
    draft_slots_row,
    draft_slots_draft,
    parents_row,
    parents_draft,
    out_row,
    out_draft,
    CHANNELS: tl.constexpr,
    HAS_PARENTS: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    live = channel < channels
    within = channel.to(tl.int64) * pool_channel
    b_A = tl.load(A + channel, mask=live, other=0.0).to(tl.float32)
    main = tl.load(slots + row).to(tl.int64)
    known = channel < tl.where(main >= 0, channels, 0)
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
                known = channel < tl.where(origin >= 0, channels, 0)
                source = pool + origin * pool_slot + within
                b_state = tl.load(source, mask=known, other=0.0).to(tl.float32)
        b_a, b_x, factor = _gates(
            x + row * x_row + draft * x_draft + channel,
            input_gate + row * input_gate_row + draft * input_gate_draft + channel,
            recurrence_gate
            + row * recurrence_gate_row
            + draft * recurrence_gate_draft
            + channel,
            b_A,
            live,
        )
        b_state = b_a * b_state + b_x * factor
        o_out = row * out_row + draft * out_draft + channel
        tl.store(out + o_out, b_state.to(out.dtype.element_ty), mask=live)
        entry = draft_slots + row * draft_slots_row + draft * draft_slots_draft
        target = tl.load(entry).to(tl.int64)
        keep = channel < tl.where(target >= 0, channels, 0)
        rounded = b_state.to(pool.dtype.element_ty)
        tl.store(pool + target * pool_slot + within, rounded, mask=keep)
        b_state = rounded.to(tl.float32)


def prefill(operands: Operands, sequences: Sequences, out: torch.Tensor) -> None:
    """One launch."""
    x, pool = operands.x, sequences.pool
    channels = x.shape[1]
    if sequences.count == 0 or channels == 0:
        return
    table, boundaries, boundary_row = boundary_table(sequences)
    _prefill_kernel[(triton.cdiv(channels, _CHANNELS), sequences.count)](
        x,
        operands.input_gate,
        operands.recurrence_gate,
        operands.A,
        sequences.cu_seqlens,
        sequences.offsets,
        pool,
        sequences.slots,
        flags(sequences),
        table,
        out,
        channels,
        boundaries,
        x.stride(0),
        operands.input_gate.stride(0),
        operands.recurrence_gate.stride(0),
        *pool.stride(),
        boundary_row,
        out.stride(0),
        SIZE=CHUNK,
        CHANNELS=_CHANNELS,
        HAS_INITIAL=sequences.has_initial is not None,
        HAS_OFFSETS=sequences.offsets is not None,
        ROUND=rounds(sequences),
    )


def steps(operands: Operands, drafts: Drafts, out: torch.Tensor) -> None:
    """Run ``[N, L]`` tokens, each from its parent's state; one launch."""
    x, parents = operands.x, drafts.parents
    rows, count, channels = x.shape
    if rows == 0 or count == 0 or channels == 0:
        return
    _step_kernel[(triton.cdiv(channels, _STEP_CHANNELS), rows)](
        x,
        operands.input_gate,
        operands.recurrence_gate,
        operands.A,
        drafts.pool,
        drafts.slots,
        drafts.draft_slots,
        parents,
        out,
        channels,
        count,
        *x.stride()[:2],
        *operands.input_gate.stride()[:2],
        *operands.recurrence_gate.stride()[:2],
        *drafts.pool.stride(),
        *two_strides(drafts.draft_slots),
        *two_strides(parents),
        *out.stride()[:2],
        CHANNELS=_STEP_CHANNELS,
        HAS_PARENTS=parents is not None,
        num_warps=2,
    )
