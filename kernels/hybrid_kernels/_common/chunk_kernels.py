# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of the chunked recurrence with one decay per head and token.

Chunks of 64 tokens are aligned to each sequence's start; with `offsets`, to absolute
multiples of 64, and a sequence's first chunk may be short. `gate_kernel` computes
running sums of log decays within chunks, `state_kernel` hands every chunk its start
state, `output_kernel` does the rest; the delta rule corrects its values first.
Notation and derivation: `hybrid_kernels._common.linear.chunk`. No block size
depends on the batch, and sequences share no program, so a sequence's bits do not
depend on its neighbours.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"
# mypy: disable-error-code="untyped-decorator,import-untyped"

from __future__ import annotations

import triton
import triton.language as tl

from hybrid_kernels._common.linear_step import sigmoid, softplus

COUNTS = ["sequences", "search_steps", "boundaries", "total_head"]
"""Arguments whose values follow the batch: a new one must not compile anew."""


@triton.jit
def number_of_first(sequence, start, SIZE: tl.constexpr, HAS_OFFSETS: tl.constexpr):
    """The number of the first chunk of a sequence that starts at row `start`.

    Numbers are in order and never twice, without counting the chunks of earlier
    sequences: `t` tokens lie in at most ``t // SIZE + 1`` chunks if the first one is
    whole, else in at most ``t // SIZE + 2``.
    """
    number = start // SIZE + sequence
    if HAS_OFFSETS:
        number += sequence
    return number


@triton.jit
def find(
    number,
    cu_seqlens,
    sequences,
    search_steps,
    SIZE: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
):
    """The sequence of a chunk, by bisection."""
    low = 0
    high = sequences
    for _ in range(search_steps):
        middle = (low + high) // 2
        before = tl.load(cu_seqlens + middle).to(tl.int32)
        found = number_of_first(middle, before, SIZE, HAS_OFFSETS) <= number
        low = tl.where(found, middle, low)
        high = tl.where(found, high, middle)
    return low


@triton.jit
def how_many(offset, tokens, SIZE: tl.constexpr, HAS_OFFSETS: tl.constexpr):
    """The number of a sequence's chunks."""
    chunks = (tokens + SIZE - 1) // SIZE
    if HAS_OFFSETS:
        # No tokens lie in no chunk, though the offset may be in the middle of one.
        chunks = tl.where(tokens > 0, (offset + tokens + SIZE - 1) // SIZE, 0)
    return chunks


@triton.jit
def cut(chunk, offset, tokens, SIZE: tl.constexpr, HAS_OFFSETS: tl.constexpr):
    """A chunk's first token, counted from its sequence's, and its number of tokens.

    The number is not positive if the sequence ends before the chunk.
    """
    first = chunk * SIZE
    length = tl.minimum(tokens - first, SIZE)
    if HAS_OFFSETS:
        end = tl.minimum(first + SIZE - offset, tokens)
        first = tl.maximum(first - offset, 0)
        length = end - first
    return first, length


@triton.jit
def ends_at_boundary(
    first, length, offset, SIZE: tl.constexpr, HAS_OFFSETS: tl.constexpr
):
    """Whether a boundary lies behind a chunk's tokens."""
    whole = length == SIZE
    if HAS_OFFSETS:
        whole = (offset + first + length) % SIZE == 0
    return whole


@triton.jit
def locate(
    number,
    cu_seqlens,
    offsets,
    sequences,
    search_steps,
    SIZE: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
):
    """A chunk's first token and its number of tokens; 0 for a surplus program."""
    sequence = find(number, cu_seqlens, sequences, search_steps, SIZE, HAS_OFFSETS)
    start = tl.load(cu_seqlens + sequence).to(tl.int32)
    end = tl.load(cu_seqlens + sequence + 1).to(tl.int32)
    chunk = number - number_of_first(sequence, start, SIZE, HAS_OFFSETS)
    offset = 0
    if HAS_OFFSETS:
        offset = tl.load(offsets + sequence).to(tl.int32)
    first, length = cut(chunk, offset, end - start, SIZE, HAS_OFFSETS)
    return (start + first).to(tl.int64), tl.maximum(length, 0)


@triton.jit(do_not_specialize=COUNTS)
def gate_kernel(
    g,
    A,
    dt_bias,
    cu_seqlens,
    offsets,
    total,
    time,
    sequences,
    search_steps,
    total_head,
    heads,
    g_token,
    g_head,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_A: tl.constexpr,
    HAS_DT_BIAS: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
):
    """Running sums of log decays within a chunk, and softplus of time steps."""
    number = tl.program_id(0)
    first, length = locate(
        number, cu_seqlens, offsets, sequences, search_steps, SIZE, HAS_OFFSETS
    )
    if length > 0:
        position = tl.arange(0, SIZE)
        head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        live = head < heads
        token = first + position
        mask = live[:, None] & (position < length)[None, :]
        o_g = head[:, None] * g_head + token[None, :] * g_token
        b_g = tl.load(g + o_g, mask=mask, other=0.0).to(tl.float32)
        o_total = head[:, None].to(tl.int64) * total_head + token[None, :]
        if HAS_A:
            if HAS_DT_BIAS:
                b_dt_bias = tl.load(dt_bias + head, mask=live, other=0.0).to(tl.float32)
                b_g += b_dt_bias[:, None]
            b_g = softplus(b_g)
            tl.store(time + o_total, b_g, mask=mask)
            b_g *= tl.load(A + head, mask=live, other=0.0).to(tl.float32)[:, None]
        b_g = tl.where(mask, b_g, 0.0)
        tl.store(total + o_total, tl.cumsum(b_g, 1), mask=mask)


@triton.jit(do_not_specialize=COUNTS)
def state_kernel(
    k,
    v,
    w,
    total,
    time,
    ends,
    states,
    cu_seqlens,
    offsets,
    pool,
    slots,
    has_initial,
    boundary_slots,
    boundaries,
    total_head,
    heads,
    group,
    k_token,
    k_head,
    v_token,
    v_head,
    pool_slot,
    pool_head,
    pool_v,
    pool_k,
    boundary_row,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SIZE: tl.constexpr,
    DELTA: tl.constexpr,
    WIDE_G: tl.constexpr,
    HAS_TIME: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    ROUND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Serial over a sequence's chunks, parallel over sequences, heads and columns.

    Writes each chunk's start state, and final and interior states to their slots.
    With `DELTA`, `v` holds values for a zero start state and gets the corrected
    ones. With `WIDE_G`, keys are decayed to their chunk's end already.
    """
    head = tl.program_id(1).to(tl.int64)
    sequence = tl.program_id(2).to(tl.int64)
    start = tl.load(cu_seqlens + sequence).to(tl.int64)
    tokens = tl.load(cu_seqlens + sequence + 1).to(tl.int64) - start
    number = number_of_first(sequence, start, SIZE, HAS_OFFSETS) * heads + head
    channel = tl.arange(0, BLOCK_K)
    column = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    in_k = channel < K
    in_v = column < V
    within = head * pool_head
    within += channel[:, None].to(tl.int64) * pool_k + column[None, :] * pool_v
    slot = tl.load(slots + sequence).to(tl.int64)
    stateful = (slot >= 0).to(tl.int32)
    if HAS_INITIAL:
        stateful *= tl.load(has_initial + sequence)
    rows = tl.where(stateful != 0, K, 0)
    b_state = tl.load(
        pool + slot * pool_slot + within,
        mask=(channel < rows)[:, None] & in_v[None, :],
        other=0.0,
    ).to(tl.float32)

    k += start * k_token + (head // group) * k_head
    v += start * v_token + head * v_head
    states += number * K * V
    if WIDE_G:
        ends += number * K
    else:
        total += head * total_head + start
    if HAS_TIME:
        time += head * total_head + start
    if DELTA:
        w += (start * heads + head) * K
    position = tl.arange(0, SIZE)
    offset = 0
    if HAS_OFFSETS:
        offset = tl.load(offsets + sequence).to(tl.int64)
    for chunk in range(how_many(offset, tokens, SIZE, HAS_OFFSETS)):
        first, length = cut(chunk, offset, tokens, SIZE, HAS_OFFSETS)
        token = first + position
        inside = position < length
        tl.store(
            states + chunk * heads * K * V + channel[:, None] * V + column[None, :],
            b_state.to(states.dtype.element_ty),
            mask=in_k[:, None] & in_v[None, :],
        )
        mask = inside[:, None] & in_v[None, :]
        p_v = v + token[:, None] * v_token + column[None, :]
        b_v = tl.load(p_v, mask=mask, other=0.0).to(tl.float32)
        if DELTA:
            b_w = tl.load(
                w + token[:, None] * (heads * K) + channel[None, :],
                mask=inside[:, None] & in_k[None, :],
                other=0.0,
            )
            b_v -= tl.dot(b_w, b_state.to(b_w.dtype), input_precision=PRECISION)
            tl.store(p_v, b_v.to(v.dtype.element_ty), mask=mask)
        if HAS_TIME:
            b_v *= tl.load(time + token, mask=inside, other=0.0)[:, None]
        b_k = tl.load(
            k + token[None, :] * k_token + channel[:, None],
            mask=in_k[:, None] & inside[None, :],
            other=0.0,
        )
        if WIDE_G:
            last = tl.load(ends + chunk * heads * K + channel, mask=in_k, other=0.0)
            b_state = b_state * tl.exp(last)[:, None]
        else:
            b_total = tl.load(total + token, mask=inside, other=0.0)
            last = tl.load(total + first + length - 1)
            b_v *= tl.exp(last - b_total)[:, None]
            b_state = b_state * tl.exp(last)
        b_state += tl.dot(b_k, b_v.to(b_k.dtype), input_precision=PRECISION)
        if ROUND:  # noqa: SIM102 - one is a constant
            if ends_at_boundary(first, length, offset, SIZE, HAS_OFFSETS):
                b_state = b_state.to(pool.dtype.element_ty).to(tl.float32)
        listed = chunk < boundaries
        if listed & ends_at_boundary(first, length, offset, SIZE, HAS_OFFSETS):
            target = tl.load(boundary_slots + sequence * boundary_row + chunk)
            target = target.to(tl.int64)
            rows = tl.where(target >= 0, K, 0)
            tl.store(
                pool + target * pool_slot + within,
                b_state.to(pool.dtype.element_ty),
                mask=(channel < rows)[:, None] & in_v[None, :],
            )
    rows = tl.where(slot >= 0, K, 0)
    tl.store(
        pool + slot * pool_slot + within,
        b_state.to(pool.dtype.element_ty),
        mask=(channel < rows)[:, None] & in_v[None, :],
    )


@triton.jit(do_not_specialize=COUNTS)
def output_kernel(
    q,
    k,
    v,
    total,
    time,
    skip,
    gate,
    states,
    cu_seqlens,
    offsets,
    out,
    scale,
    epsilon,
    sequences,
    search_steps,
    total_head,
    heads,
    group,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    gate_token,
    gate_head,
    out_token,
    out_head,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SIZE: tl.constexpr,
    HAS_TIME: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    HAS_GATE: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    USE_QK_L2NORM: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Outputs of one chunk, from its start state and its own tokens."""
    blocks: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    head = (tl.program_id(0) // blocks).to(tl.int64)
    number = tl.program_id(1)
    first, length = locate(
        number, cu_seqlens, offsets, sequences, search_steps, SIZE, HAS_OFFSETS
    )
    if length > 0:
        position = tl.arange(0, SIZE)
        inside = position < length
        column = (tl.program_id(0) % blocks) * BLOCK_V + tl.arange(0, BLOCK_V)
        in_v = column < V
        token = first + position
        p_q = q + token[:, None] * q_token + (head // group) * q_head
        p_k = k + token[None, :] * k_token + (head // group) * k_head
        p_state = (
            states + (number.to(tl.int64) * heads + head) * K * V + column[None, :]
        )
        b_o = tl.zeros((SIZE, BLOCK_V), tl.float32)
        weight = tl.zeros((SIZE, SIZE), tl.float32)
        norm = tl.zeros((SIZE,), tl.float32)
        for start in tl.static_range(0, K, BLOCK_K):
            channel = start + tl.arange(0, BLOCK_K)
            in_k = channel < K
            mask = inside[:, None] & in_k[None, :]
            b_q = tl.load(p_q + channel[None, :], mask=mask, other=0.0)
            mask = in_k[:, None] & inside[None, :]
            b_k = tl.load(p_k + channel[:, None], mask=mask, other=0.0)
            mask = in_k[:, None] & in_v[None, :]
            b_state = tl.load(p_state + channel[:, None] * V, mask=mask, other=0.0)
            b_o += tl.dot(b_q, b_state.to(b_q.dtype), input_precision=PRECISION)
            weight += tl.dot(b_q, b_k, input_precision=PRECISION)
            if USE_QK_L2NORM:
                wide = b_q.to(tl.float32)
                norm += tl.sum(wide * wide, axis=1)
        if USE_QK_L2NORM:
            # Outputs are linear in the query, so its norm can wait until here.
            norm = tl.rsqrt(norm + epsilon)
            b_o *= norm[:, None]
            weight *= norm[:, None]

        mask = inside[:, None] & in_v[None, :]
        b_v = tl.load(
            v + token[:, None] * v_token + head * v_head + column[None, :],
            mask=mask,
            other=0.0,
        )
        plain = b_v
        o_total = head * total_head + token
        if HAS_TIME:
            b_time = tl.load(time + o_total, mask=inside, other=0.0)
            b_v = (b_v.to(tl.float32) * b_time[:, None]).to(k.dtype.element_ty)
        b_total = tl.load(total + o_total, mask=inside, other=0.0)
        b_o *= tl.exp(b_total)[:, None]
        upto = inside[:, None] & (position[:, None] >= position[None, :])
        decay = tl.exp(tl.where(upto, b_total[:, None] - b_total[None, :], 0.0))
        weight = tl.where(upto, weight * decay, 0.0)
        b_o += tl.dot(weight.to(b_v.dtype), b_v, input_precision=PRECISION)
        b_o *= scale
        if HAS_SKIP:
            b_o += plain.to(tl.float32) * tl.load(skip + head).to(tl.float32)
        if HAS_GATE:
            b_gate = tl.load(
                gate + token[:, None] * gate_token + head * gate_head + column[None, :],
                mask=mask,
                other=0.0,
            ).to(tl.float32)
            b_o *= b_gate * sigmoid(b_gate)
        tl.store(
            out + token[:, None] * out_token + head * out_head + column[None, :],
            b_o.to(out.dtype.element_ty),
            mask=mask,
        )
