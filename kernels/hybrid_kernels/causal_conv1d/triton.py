# SPDX-License-Identifier: Apache-2.0
"""Triton convolution; prefill, decode and verify take one launch each."""
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"
# mypy: disable-error-code="untyped-decorator,import-untyped"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hybrid_kernels._common.chunk_kernels import find
from hybrid_kernels._common.linear_chunk import boundary_table, flags
from hybrid_kernels._common.linear_step import ancestor
from hybrid_kernels._common.tables import Drafts, Sequences, two_strides
from hybrid_kernels.causal_conv1d.reference import Operands

_TOKENS = 16
_CHANNELS = 256
_WARPS = 2
_STEP_CHANNELS = 256
_STEP_WARPS = 4


@triton.jit
def _write_state(
    x,
    pool,
    channel,
    live,
    start,
    end,
    initial,
    stateful,
    target,
    x_token,
    x_channel,
    pool_slot,
    pool_channel,
    pool_input,
    WIDTH: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """Write the state after `end` tokens of a sequence to the slot `target`."""
    column = tl.arange(0, INPUTS)
    mask = live[:, None] & (column < tl.where(target >= 0, WIDTH - 1, 0))[None, :]
    source = end - (WIDTH - 1) + column
    kept = source < tl.where(stateful, 0, -WIDTH)
    o_pool = channel[:, None].to(tl.int64) * pool_channel
    value = tl.load(
        x + (start + source)[None, :] * x_token + channel[:, None] * x_channel,
        mask=mask & (source >= 0)[None, :],
        other=0.0,
    ).to(pool.dtype.element_ty)
    old = tl.load(
        pool
        + initial * pool_slot
        + o_pool
        + (source + WIDTH - 1)[None, :] * pool_input,
        mask=mask & kept[None, :],
        other=0.0,
    )
    # A short sequence shifts its own state, and outputs came from it: every thread
    # reads before any writes.
    tl.debug_barrier()
    value = tl.where((source < 0)[None, :], old, value)
    o_pool += target * pool_slot
    tl.store(pool + o_pool + column[None, :] * pool_input, value, mask=mask)


@triton.jit
def _column(
    pool, slot, offset, stride, mask, NUMBER: tl.constexpr, WIDTH: tl.constexpr
):
    """Input `NUMBER` of a state; zeros where the state is shorter or masked."""
    p_pool = pool + slot + offset
    if NUMBER < WIDTH - 1:
        p_pool += NUMBER * stride
    else:
        mask = mask & (offset < 0)
    return tl.load(p_pool, mask=mask, other=0.0)


@triton.jit
def _tap(taps, NUMBER: tl.constexpr):
    """Column `NUMBER` of four; zeros if it is none of them."""
    return tl.sum(tl.where(tl.arange(0, 4)[None, :] == NUMBER, taps, 0.0), axis=1)


@triton.jit
def _before(
    x,
    state,
    channel,
    channels,
    first,
    stateful,
    x_token,
    x_channel,
    pool_channel,
    pool_input,
    NUMBER: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Input `NUMBER` of the `WIDTH` - 1 in front of `x`, float32.

    `x` is `first` tokens after the sequence's start; what is before that start is in
    the state, if there is one.
    """
    back: tl.constexpr = WIDTH - 1 - NUMBER
    wanted = tl.where(back > 0, channels, 0)
    given = channel < tl.where(first >= back, wanted, 0)
    p_x = x - back * x_token + channel * x_channel
    value = tl.load(p_x, mask=given, other=0.0).to(tl.float32)
    kept = channel < tl.where((first < back) & stateful, wanted, 0)
    p_state = state + channel.to(tl.int64) * pool_channel
    p_state += (first + NUMBER) * pool_input
    return value + tl.load(p_state, mask=kept, other=0.0).to(tl.float32)


@triton.jit
def _output(
    past0,
    past1,
    past2,
    past3,
    value,
    tap0,
    tap1,
    tap2,
    tap3,
    newest,
    base,
    WIDTH: tl.constexpr,
    SILU: tl.constexpr,
):
    """One token's output from its input and those before it, oldest first."""
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
    return total


@triton.jit
def _shift(past0, past1, past2, past3, fresh, WIDTH: tl.constexpr):
    """The inputs before the next token."""
    past0 = past1 if WIDTH > 2 else fresh
    if WIDTH > 2:
        past1 = past2 if WIDTH > 3 else fresh
    if WIDTH > 3:
        past2 = past3 if WIDTH > 4 else fresh
    if WIDTH > 4:
        past3 = fresh
    return past0, past1, past2, past3


@triton.jit
def _next_inputs(x, channel, channels, left, x_token, x_channel):
    """Four tokens' inputs; zeros for those beyond the `left` that there are."""
    p_x = x + channel * x_channel
    mask = channel < tl.where(left > 0, channels, 0)
    value0 = tl.load(p_x, mask=mask, other=0.0)
    mask = channel < tl.where(left > 1, channels, 0)
    value1 = tl.load(p_x + x_token, mask=mask, other=0.0)
    mask = channel < tl.where(left > 2, channels, 0)
    value2 = tl.load(p_x + 2 * x_token, mask=mask, other=0.0)
    mask = channel < tl.where(left > 3, channels, 0)
    value3 = tl.load(p_x + 3 * x_token, mask=mask, other=0.0)
    return value0, value1, value2, value3


@triton.jit(
    do_not_specialize=["tokens", "sequences", "search_steps", "boundaries", "every"]
)
def _prefill_kernel(
    x,
    weight,
    bias,
    cu_seqlens,
    offsets,
    pool,
    slots,
    has_initial,
    boundary_slots,
    out,
    tokens,
    channels,
    sequences,
    search_steps,
    boundaries,
    every,
    x_token,
    x_channel,
    weight_tap,
    pool_slot,
    pool_channel,
    pool_input,
    boundary_row,
    out_token,
    out_channel,
    WEIGHT_CHANNEL: tl.constexpr,
    WIDTH: tl.constexpr,
    INPUTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    SILU: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """`TOKENS` tokens of a sequence, and the states that end among them.

    The sequence's first program reads the old state and writes the final one, so
    that no program writes what another reads. Padding counts as a sequence more.
    """
    number = tl.program_id(0)
    sequence = find(number, cu_seqlens, sequences + 1, search_steps, TOKENS, False)
    padding = sequence == sequences
    start = tl.load(cu_seqlens + sequence).to(tl.int64)
    end = tl.load(cu_seqlens + tl.minimum(sequence + 1, sequences)).to(tl.int64)
    whole = tl.where(padding, tokens, end) - start
    first = (number - start // TOKENS - sequence) * TOKENS
    stop = tl.minimum(first + TOKENS, whole)
    # Padding reads entry 0, which exists if there are programs at all.
    entry = tl.where(padding, 0, sequence)
    slot = tl.load(slots + entry).to(tl.int64)
    stateful = (slot >= 0) & (sequence != sequences)
    if HAS_INITIAL:
        stateful = stateful & (tl.load(has_initial + entry) != 0)

    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    live = channel < channels
    if first < whole:
        # Padding may hold anything: it is not read, and its outputs are zeros.
        real = tl.where(padding, 0, channels)
        given = channel < real
        # Taps lie side by side: read one by one, they would take as long as the inputs.
        # A constant stride lets one load read them all.
        column = tl.arange(0, 4)[None, :]
        taps = tl.load(
            weight + channel[:, None] * WEIGHT_CHANNEL + column * weight_tap,
            mask=given[:, None] & (column < WIDTH),
            other=0.0,
        ).to(tl.float32)
        tap0 = _tap(taps, 0)
        tap1 = _tap(taps, 1)
        tap2 = _tap(taps, 2)
        tap3 = _tap(taps, 3)
        newest = _tap(taps, WIDTH - 1)
        if WIDTH == 5:
            p_weight = weight + channel * WEIGHT_CHANNEL + 4 * weight_tap
            newest = tl.load(p_weight, mask=given, other=0.0).to(tl.float32)
        base = tl.zeros((CHANNELS,), tl.float32)
        if HAS_BIAS:
            base += tl.load(bias + channel, mask=given, other=0.0).to(tl.float32)
        row = x + (start + first) * x_token
        target = out + (start + first) * out_token + channel * out_channel
        state = pool + slot * pool_slot
        left = tl.minimum(whole - first, TOKENS)
        next0, next1, next2, next3 = _next_inputs(
            row, channel, real, left, x_token, x_channel
        )
        past0 = _before(
            row,
            state,
            channel,
            real,
            first,
            stateful,
            x_token,
            x_channel,
            pool_channel,
            pool_input,
            0,
            WIDTH,
        )
        past1 = _before(
            row,
            state,
            channel,
            real,
            first,
            stateful,
            x_token,
            x_channel,
            pool_channel,
            pool_input,
            1,
            WIDTH,
        )
        past2 = _before(
            row,
            state,
            channel,
            real,
            first,
            stateful,
            x_token,
            x_channel,
            pool_channel,
            pool_input,
            2,
            WIDTH,
        )
        past3 = _before(
            row,
            state,
            channel,
            real,
            first,
            stateful,
            x_token,
            x_channel,
            pool_channel,
            pool_input,
            3,
            WIDTH,
        )
        for step in tl.static_range(0, TOKENS, 4):
            value0, value1, value2, value3 = next0, next1, next2, next3
            # Loads cannot pass stores, which for all the compiler knows may be to
            # the same memory: ask early.
            if step + 4 < TOKENS:
                next0, next1, next2, next3 = _next_inputs(
                    row + (step + 4) * x_token,
                    channel,
                    real,
                    left - step - 4,
                    x_token,
                    x_channel,
                )
            for turn in tl.static_range(4):
                value = value0
                if turn == 1:
                    value = value1
                if turn == 2:
                    value = value2
                if turn == 3:
                    value = value3
                value = value.to(tl.float32)
                total = _output(
                    past0,
                    past1,
                    past2,
                    past3,
                    value,
                    tap0,
                    tap1,
                    tap2,
                    tap3,
                    newest,
                    base,
                    WIDTH,
                    SILU,
                )
                past0, past1, past2, past3 = _shift(
                    past0, past1, past2, past3, value, WIDTH
                )
                mask = channel < tl.where(step + turn < left, channels, 0)
                p_out = target + (step + turn) * out_token
                tl.store(p_out, total.to(out.dtype.element_ty), mask=mask)

    if sequence != sequences:
        offset = 0
        if HAS_OFFSETS:
            offset = tl.load(offsets + sequence).to(tl.int32)
        for part in range((first + offset) // every, (stop + offset) // every):
            if part < boundaries:
                target = tl.load(boundary_slots + sequence * boundary_row + part)
                _write_state(
                    x,
                    pool,
                    channel,
                    live,
                    start,
                    (part + 1) * every - offset,
                    slot,
                    stateful,
                    target.to(tl.int64),
                    x_token,
                    x_channel,
                    pool_slot,
                    pool_channel,
                    pool_input,
                    WIDTH,
                    INPUTS,
                )
        if first == 0:
            _write_state(
                x,
                pool,
                channel,
                live,
                start,
                whole,
                slot,
                stateful,
                slot,
                x_token,
                x_channel,
                pool_slot,
                pool_channel,
                pool_input,
                WIDTH,
                INPUTS,
            )


@triton.jit
def _path_input(
    x,
    pool,
    parents,
    parent,
    channel,
    channels,
    main,
    x_draft,
    parents_draft,
    pool_input,
    NUMBER: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Input `NUMBER` of the `WIDTH` - 1 in front of a draft that follows `parent`.

    It comes from the draft's path, or from the main state where the path is shorter.
    """
    node = parent
    seen = 0
    for _ in tl.static_range(WIDTH - 2 - NUMBER):
        seen += (node >= 0).to(tl.int32)
        node = ancestor(parents, node, 1, parents_draft)
    wanted = tl.where(NUMBER < WIDTH - 1, channels, 0)
    kept = channel < tl.where((node < 0) & (main >= 0), wanted, 0)
    old = tl.load(pool + (NUMBER + seen) * pool_input, mask=kept, other=0.0)
    given = channel < tl.where(node >= 0, wanted, 0)
    fresh = tl.load(x + tl.maximum(node, 0) * x_draft, mask=given, other=0.0)
    return tl.where(node >= 0, fresh.to(pool.dtype.element_ty), old)


@triton.jit
def _step_kernel(
    x,
    weight,
    bias,
    pool,
    slots,
    draft_slots,
    parents,
    cu_seqlens,
    record,
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
    record_row,
    record_draft,
    out_row,
    out_draft,
    out_channel,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    HAS_PARENTS: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
    HAS_RECORD: tl.constexpr,
    SILU: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """The last up to four inputs live in ``past0`` (oldest) to ``past3``.

    `entry` is the row's first token where drafts are packed.
    """
    row = tl.program_id(0).to(tl.int64)
    entry = row
    main = tl.load(slots + row).to(tl.int64)
    if HAS_LENGTHS:
        entry = tl.load(cu_seqlens + row).to(tl.int64)
        drafts = (tl.load(cu_seqlens + row + 1).to(tl.int64) - entry).to(tl.int32)
        drafts = tl.where(main >= 0, drafts, 0)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    live = channel < channels
    offset = channel.to(tl.int64) * pool_channel
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

    x += entry * x_row + channel * x_channel
    out += entry * out_row + channel * out_channel
    if HAS_PARENTS:
        parents += row * parents_row
    for draft in range(drafts):
        if HAS_PARENTS:
            # Rows of padding may hold anything.
            parent = tl.minimum(tl.load(parents + draft * parents_draft), draft - 1)
            if (parent != draft - 1) | (draft == 0):
                if HAS_RECORD:
                    past0 = _path_input(
                        x,
                        pool + main * pool_slot + offset,
                        parents,
                        parent,
                        channel,
                        channels,
                        main,
                        x_draft,
                        parents_draft,
                        pool_input,
                        0,
                        WIDTH,
                    )
                    past1 = _path_input(
                        x,
                        pool + main * pool_slot + offset,
                        parents,
                        parent,
                        channel,
                        channels,
                        main,
                        x_draft,
                        parents_draft,
                        pool_input,
                        1,
                        WIDTH,
                    )
                    past2 = _path_input(
                        x,
                        pool + main * pool_slot + offset,
                        parents,
                        parent,
                        channel,
                        channels,
                        main,
                        x_draft,
                        parents_draft,
                        pool_input,
                        2,
                        WIDTH,
                    )
                    past3 = _path_input(
                        x,
                        pool + main * pool_slot + offset,
                        parents,
                        parent,
                        channel,
                        channels,
                        main,
                        x_draft,
                        parents_draft,
                        pool_input,
                        3,
                        WIDTH,
                    )
                else:
                    # Other threads of this program may have written that slot.
                    tl.debug_barrier()
                    origin = tl.load(
                        draft_slots
                        + row * draft_slots_row
                        + tl.maximum(parent, 0) * draft_slots_draft
                    )
                    origin = tl.where(parent < 0, main, origin.to(tl.int64))
                    slot = origin * pool_slot
                    known = channel < tl.where(origin >= 0, channels, 0)
                    past0 = _column(pool, slot, offset, pool_input, known, 0, WIDTH)
                    past1 = _column(pool, slot, offset, pool_input, known, 1, WIDTH)
                    past2 = _column(pool, slot, offset, pool_input, known, 2, WIDTH)
                    past3 = _column(pool, slot, offset, pool_input, known, 3, WIDTH)
        value = tl.load(x + draft * x_draft, mask=live, other=0.0)
        total = _output(
            past0,
            past1,
            past2,
            past3,
            value,
            tap0,
            tap1,
            tap2,
            tap3,
            newest,
            base,
            WIDTH,
            SILU,
        )
        tl.store(out + draft * out_draft, total.to(out.dtype.element_ty), mask=live)
        fresh = value.to(pool.dtype.element_ty)
        past0, past1, past2, past3 = _shift(past0, past1, past2, past3, fresh, WIDTH)
        if HAS_RECORD:
            p_record = record + row * record_row + draft * record_draft
            tl.store(p_record + channel, fresh, mask=live)
        if HAS_SLOTS:
            target = draft_slots + row * draft_slots_row + draft * draft_slots_draft
            target = tl.load(target).to(tl.int64)
            p_pool = pool + target * pool_slot + offset
            keep = channel < tl.where(target >= 0, channels, 0)
            tl.store(p_pool, past0, mask=keep)
            if WIDTH > 2:
                tl.store(p_pool + pool_input, past1, mask=keep)
            if WIDTH > 3:
                tl.store(p_pool + 2 * pool_input, past2, mask=keep)
            if WIDTH > 4:
                tl.store(p_pool + 3 * pool_input, past3, mask=keep)


def prefill(operands: Operands, sequences: Sequences, out: torch.Tensor) -> None:
    """One launch."""
    x, weight, pool = operands.x, operands.weight, sequences.pool
    tokens, channels = x.shape
    count = sequences.count
    if count == 0 or channels == 0:
        out.zero_()
        return
    table, boundaries, boundary_row = boundary_table(sequences)
    # One sequence more than there are: padding behind them.
    programs = tokens // _TOKENS + count + 1
    _prefill_kernel[(programs, triton.cdiv(channels, _CHANNELS))](
        x,
        weight,
        operands.bias,
        sequences.cu_seqlens,
        sequences.offsets,
        pool,
        sequences.slots,
        flags(sequences),
        table,
        out,
        tokens,
        channels,
        count,
        count.bit_length(),
        boundaries,
        sequences.every,
        *x.stride(),
        weight.stride(1),
        *pool.stride(),
        boundary_row,
        *out.stride(),
        WEIGHT_CHANNEL=weight.stride(0),
        WIDTH=operands.taps,
        INPUTS=4,
        HAS_BIAS=operands.bias is not None,
        HAS_INITIAL=sequences.has_initial is not None,
        HAS_OFFSETS=sequences.offsets is not None,
        SILU=operands.activation == "silu",
        TOKENS=_TOKENS,
        CHANNELS=_CHANNELS,
        num_warps=_WARPS,
    )


def steps(operands: Operands, drafts: Drafts, out: torch.Tensor) -> None:
    """Run drafts, each behind its parent's state; one launch."""
    x, weight, channels = operands.x, operands.weight, operands.x.shape[-1]
    if drafts.count == 0 or x.shape[:-1].numel() == 0:
        return
    _step_kernel[(drafts.count, triton.cdiv(channels, _STEP_CHANNELS))](
        x,
        weight,
        operands.bias,
        drafts.pool,
        drafts.slots,
        drafts.draft_slots,
        drafts.parents,
        drafts.cu_seqlens,
        drafts.record,
        out,
        channels,
        x.shape[1],
        *drafts.strides(x),
        *weight.stride(),
        *drafts.pool.stride(),
        *two_strides(drafts.draft_slots),
        *two_strides(drafts.parents),
        *two_strides(drafts.record),
        *drafts.strides(out),
        WIDTH=operands.taps,
        HAS_BIAS=operands.bias is not None,
        HAS_SLOTS=drafts.draft_slots is not None,
        HAS_PARENTS=drafts.parents is not None,
        HAS_LENGTHS=drafts.cu_seqlens is not None,
        HAS_RECORD=drafts.record is not None,
        SILU=operands.activation == "silu",
        CHANNELS=_STEP_CHANNELS,
        num_warps=_STEP_WARPS,
    )
