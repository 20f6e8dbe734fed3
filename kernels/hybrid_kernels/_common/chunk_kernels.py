# SPDX-License-Identifier: Apache-2.0
"""Triton prefill of the shared recurrence with one decay per head and token.

Three launches over chunks of 64 tokens, aligned to each sequence's start:

1. `correct_kernel` (delta rule only), parallel over chunks: solves the chunk's
   triangular system, which turns values into ``U - W S^T`` for any start state S.
2. `state_kernel`, serial over a sequence's chunks, parallel over sequences, heads
   and value columns: hands every chunk its start state, and writes final and
   interior states to their slots.
3. `output_kernel`, parallel over chunks.

Notation and derivation: `hybrid_kernels._common.linear.chunk`. No block size
depends on the batch, and sequences share no program, so a sequence's bits do not
depend on its neighbours.
"""
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"
# mypy: disable-error-code="untyped-decorator,import-untyped"

from __future__ import annotations

import triton
import triton.language as tl

from hybrid_kernels._common.linear_step import sigmoid


@triton.jit
def offsets_kernel(
    cu_seqlens, offsets, sequences, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    """Running count of chunks per sequence, in one program."""
    total = 0
    tl.store(offsets, total)
    for first in range(0, sequences, BLOCK):
        index = first + tl.arange(0, BLOCK)
        mask = index < sequences
        start = tl.load(cu_seqlens + index, mask=mask, other=0).to(tl.int32)
        end = tl.load(cu_seqlens + index + 1, mask=mask, other=0).to(tl.int32)
        chunks = (end - start + SIZE - 1) // SIZE
        tl.store(offsets + 1 + index, total + tl.cumsum(chunks, 0), mask=mask)
        total += tl.sum(chunks, 0)


@triton.jit
def locate(chunk, cu_seqlens, offsets, sequences, search_steps, SIZE: tl.constexpr):
    """A chunk's first token and its number of tokens; 0 for a surplus program."""
    low = 0
    high = sequences
    for _ in range(search_steps):
        middle = (low + high) // 2
        below = tl.load(offsets + middle) <= chunk
        low = tl.where(below, middle, low)
        high = tl.where(below, high, middle)
    start = tl.load(cu_seqlens + low).to(tl.int32)
    end = tl.load(cu_seqlens + low + 1).to(tl.int32)
    first = start + (chunk - tl.load(offsets + low)) * SIZE
    length = tl.minimum(end - first, SIZE)
    length = tl.where(chunk < tl.load(offsets + sequences), length, 0)
    return first.to(tl.int64), length


@triton.jit
def _between(SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """Entries in one diagonal block of ``2 WIDTH`` but in two of `WIDTH`."""
    row = tl.arange(0, SIZE)[:, None]
    column = tl.arange(0, SIZE)[None, :]
    return (row // WIDTH != column // WIDTH) & (
        row // (2 * WIDTH) == column // (2 * WIDTH)
    )


@triton.jit
def _join(
    lower,
    result,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Inverses of diagonal blocks of `WIDTH` to inverses of twice that."""
    middle = tl.where(_between(SIZE, WIDTH), lower, 0.0)
    middle = tl.dot(middle, result, input_precision=PRECISION)
    return result - tl.dot(result, middle, input_precision=PRECISION)


@triton.jit
def invert(lower, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    """``(I + lower)^-1`` for a strictly lower triangular ``[64, 64]`` tile.

    Pairs of diagonal blocks are joined, from 1 by 1 upwards, by
    ``[[P, 0], [R, Q]]^-1 = [[P', 0], [-Q' R P', Q']]``. Unlike the product of powers
    of `lower` this stays accurate when keys repeat, and unlike forward substitution
    it is all matrix products.
    """
    index = tl.arange(0, SIZE)
    result = tl.where(index[:, None] == index[None, :], 1.0, 0.0)
    result -= tl.where(_between(SIZE, 1), lower, 0.0)
    result = _join(lower, result, SIZE, 2, PRECISION)
    result = _join(lower, result, SIZE, 4, PRECISION)
    result = _join(lower, result, SIZE, 8, PRECISION)
    result = _join(lower, result, SIZE, 16, PRECISION)
    return _join(lower, result, SIZE, 32, PRECISION)


@triton.jit
def _decays(g, first, length, g_token, position):
    """Running sum of log decays over a chunk; constant beyond its end."""
    inside = position < length
    step = tl.load(g + (first + position) * g_token, mask=inside, other=0.0)
    return tl.cumsum(step.to(tl.float32), 0)


@triton.jit
def correct_kernel(
    k,
    v,
    g,
    beta,
    cu_seqlens,
    offsets,
    unit_k,
    w,
    u,
    epsilon,
    sequences,
    search_steps,
    heads,
    group,
    k_token,
    k_head,
    v_token,
    v_head,
    g_token,
    g_head,
    beta_token,
    beta_head,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SIZE: tl.constexpr,
    NORMALISE: tl.constexpr,
    PRECISION: tl.constexpr,
    INVERSE: tl.constexpr,
):
    head = tl.program_id(1)
    first, length = locate(
        tl.program_id(0), cu_seqlens, offsets, sequences, search_steps, SIZE
    )
    if length > 0:
        position = tl.arange(0, SIZE)
        inside = position < length
        token = first + position
        k += (head // group) * k_head
        # Keys in blocks of columns, read twice: a whole row would not fit in
        # registers beside the products.
        lower = tl.zeros((SIZE, SIZE), tl.float32)
        norm = tl.zeros((SIZE,), tl.float32)
        for start in tl.static_range(0, K, BLOCK_K):
            channel = start + tl.arange(0, BLOCK_K)
            mask = inside[:, None] & (channel < K)[None, :]
            place = k + token[:, None] * k_token + channel[None, :]
            key = tl.load(place, mask=mask, other=0.0)
            lower += tl.dot(key, tl.trans(key), input_precision=PRECISION)
            if NORMALISE:
                wide = key.to(tl.float32)
                norm += tl.sum(wide * wide, axis=1)
        if NORMALISE:
            norm = tl.rsqrt(norm + epsilon)
            lower *= norm[:, None] * norm[None, :]
        total = _decays(g + head * g_head, first, length, g_token, position)
        rate = tl.load(
            beta + token * beta_token + head * beta_head, mask=inside, other=0.0
        ).to(tl.float32)
        before = position[:, None] > position[None, :]
        decay = tl.exp(tl.where(before, total[:, None] - total[None, :], 0.0))
        lower = tl.where(before, lower * decay * rate[:, None], 0.0)
        solved = invert(lower, SIZE, INVERSE).to(k.dtype.element_ty)

        grow = rate * tl.exp(total)
        for start in tl.static_range(0, K, BLOCK_K):
            channel = start + tl.arange(0, BLOCK_K)
            mask = inside[:, None] & (channel < K)[None, :]
            place = k + token[:, None] * k_token + channel[None, :]
            wide = tl.load(place, mask=mask, other=0.0).to(tl.float32)
            if NORMALISE:
                wide *= norm[:, None]
            if head % group == 0:
                line = (token[:, None] * (heads // group) + head // group) * K
                unit = wide.to(k.dtype.element_ty)
                tl.store(unit_k + line + channel[None, :], unit, mask=mask)
            wide = (wide * grow[:, None]).to(k.dtype.element_ty)
            result = tl.dot(solved, wide, input_precision=PRECISION)
            row = (token[:, None] * heads + head) * K + channel[None, :]
            tl.store(w + row, result.to(w.dtype.element_ty), mask=mask)
        for start in tl.static_range(0, V, BLOCK_V):
            column = start + tl.arange(0, BLOCK_V)
            mask = inside[:, None] & (column < V)[None, :]
            place = token[:, None] * v_token + head * v_head + column[None, :]
            value = tl.load(v + place, mask=mask, other=0.0).to(tl.float32)
            value = (value * rate[:, None]).to(k.dtype.element_ty)
            result = tl.dot(solved, value, input_precision=PRECISION)
            row = (token[:, None] * heads + head) * V + column[None, :]
            tl.store(u + row, result.to(u.dtype.element_ty), mask=mask)


@triton.jit
def state_kernel(
    k,
    v,
    g,
    time,
    w,
    states,
    cu_seqlens,
    offsets,
    pool,
    slots,
    has_initial,
    boundary_slots,
    heads,
    group,
    boundaries,
    k_token,
    k_head,
    v_token,
    v_head,
    g_token,
    g_head,
    time_token,
    time_head,
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
    ROUND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    head = tl.program_id(1).to(tl.int64)
    sequence = tl.program_id(2).to(tl.int64)
    start = tl.load(cu_seqlens + sequence).to(tl.int64)
    tokens = tl.load(cu_seqlens + sequence + 1).to(tl.int64) - start
    first_chunk = tl.load(offsets + sequence).to(tl.int64)
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
    state = tl.load(
        pool + slot * pool_slot + within,
        mask=(channel < rows)[:, None] & in_v[None, :],
        other=0.0,
    ).to(tl.float32)

    k += start * k_token + (head // group) * k_head
    v += start * v_token + head * v_head
    g += start * g_token + head * g_head
    if HAS_TIME:
        time += start * time_token + head * time_head
    if DELTA:
        w += (start * heads + head) * K
    position = tl.arange(0, SIZE)
    chunks = (tokens + SIZE - 1) // SIZE
    for chunk in range(chunks):
        first = chunk * SIZE
        length = tl.minimum(tokens - first, SIZE)
        token = first + position
        inside = position < length
        kept = ((first_chunk + chunk) * heads + head) * K * V
        tl.store(
            states + kept + channel[:, None] * V + column[None, :],
            state.to(states.dtype.element_ty),
            mask=in_k[:, None] & in_v[None, :],
        )
        mask = inside[:, None] & in_v[None, :]
        place = v + token[:, None] * v_token + column[None, :]
        value = tl.load(place, mask=mask, other=0.0).to(tl.float32)
        if DELTA:
            erase = tl.load(
                w + token[:, None] * (heads * K) + channel[None, :],
                mask=inside[:, None] & in_k[None, :],
                other=0.0,
            )
            value -= tl.dot(erase, state.to(erase.dtype), input_precision=PRECISION)
            tl.store(place, value.to(v.dtype.element_ty), mask=mask)
        if HAS_TIME:
            value *= tl.load(time + token * time_token, mask=inside, other=0.0)[:, None]
        key = tl.load(
            k + token[None, :] * k_token + channel[:, None],
            mask=in_k[:, None] & inside[None, :],
            other=0.0,
        )
        if WIDE_G:
            # `g` already holds running sums, one per key channel.
            total = tl.load(
                g + token[None, :] * g_token + channel[:, None],
                mask=in_k[:, None] & inside[None, :],
                other=0.0,
            )
            end = (first + length - 1) * g_token
            last = tl.load(g + end + channel, mask=in_k, other=0.0)
            scaled = key.to(tl.float32) * tl.exp(last[:, None] - total)
            key = scaled.to(k.dtype.element_ty)
            state = state * tl.exp(last)[:, None]
        else:
            total = _decays(g, first, length, g_token, position)
            last = tl.sum(tl.where(position == SIZE - 1, total, 0.0), axis=0)
            value *= tl.exp(last - total)[:, None]
            state = state * tl.exp(last)
        state += tl.dot(key, value.to(key.dtype), input_precision=PRECISION)
        if ROUND:  # noqa: SIM102 - one is a constant
            if length == SIZE:
                state = state.to(pool.dtype.element_ty).to(tl.float32)
        if (chunk < boundaries) & (length == SIZE):
            target = tl.load(boundary_slots + sequence * boundary_row + chunk)
            target = target.to(tl.int64)
            rows = tl.where(target >= 0, K, 0)
            tl.store(
                pool + target * pool_slot + within,
                state.to(pool.dtype.element_ty),
                mask=(channel < rows)[:, None] & in_v[None, :],
            )
    rows = tl.where(slot >= 0, K, 0)
    tl.store(
        pool + slot * pool_slot + within,
        state.to(pool.dtype.element_ty),
        mask=(channel < rows)[:, None] & in_v[None, :],
    )


@triton.jit
def output_kernel(
    q,
    k,
    v,
    g,
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
    heads,
    group,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    g_token,
    g_head,
    time_token,
    time_head,
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
    NORMALISE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    blocks: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    head = (tl.program_id(0) // blocks).to(tl.int64)
    number = tl.program_id(1)
    first, length = locate(number, cu_seqlens, offsets, sequences, search_steps, SIZE)
    if length > 0:
        position = tl.arange(0, SIZE)
        inside = position < length
        column = (tl.program_id(0) % blocks) * BLOCK_V + tl.arange(0, BLOCK_V)
        in_v = column < V
        token = first + position
        queries = q + token[:, None] * q_token + (head // group) * q_head
        keys = k + token[None, :] * k_token + (head // group) * k_head
        starts = states + (number.to(tl.int64) * heads + head) * K * V + column[None, :]
        result = tl.zeros((SIZE, BLOCK_V), tl.float32)
        weight = tl.zeros((SIZE, SIZE), tl.float32)
        norm = tl.zeros((SIZE,), tl.float32)
        for start in tl.static_range(0, K, BLOCK_K):
            channel = start + tl.arange(0, BLOCK_K)
            in_k = channel < K
            mask = inside[:, None] & in_k[None, :]
            query = tl.load(queries + channel[None, :], mask=mask, other=0.0)
            mask = in_k[:, None] & inside[None, :]
            key = tl.load(keys + channel[:, None], mask=mask, other=0.0)
            mask = in_k[:, None] & in_v[None, :]
            state = tl.load(starts + channel[:, None] * V, mask=mask, other=0.0)
            result += tl.dot(query, state.to(query.dtype), input_precision=PRECISION)
            weight += tl.dot(query, key, input_precision=PRECISION)
            if NORMALISE:
                wide = query.to(tl.float32)
                norm += tl.sum(wide * wide, axis=1)
        if NORMALISE:
            # Outputs are linear in the query, so its norm can wait until here.
            norm = tl.rsqrt(norm + epsilon)
            result *= norm[:, None]
            weight *= norm[:, None]

        mask = inside[:, None] & in_v[None, :]
        value = tl.load(
            v + token[:, None] * v_token + head * v_head + column[None, :],
            mask=mask,
            other=0.0,
        )
        plain = value
        if HAS_TIME:
            moment = tl.load(
                time + token * time_token + head * time_head, mask=inside, other=0.0
            )
            value = (value.to(tl.float32) * moment[:, None]).to(k.dtype.element_ty)
        total = _decays(g + head * g_head, first, length, g_token, position)
        result *= tl.exp(total)[:, None]
        upto = position[:, None] >= position[None, :]
        decay = tl.exp(tl.where(upto, total[:, None] - total[None, :], 0.0))
        weight = tl.where(upto, weight * decay, 0.0)
        result += tl.dot(weight.to(value.dtype), value, input_precision=PRECISION)
        result *= scale
        if HAS_SKIP:
            result += plain.to(tl.float32) * tl.load(skip + head).to(tl.float32)
        if HAS_GATE:
            z = tl.load(
                gate + token[:, None] * gate_token + head * gate_head + column[None, :],
                mask=mask,
                other=0.0,
            ).to(tl.float32)
            result *= z * sigmoid(z)
        tl.store(
            out + token[:, None] * out_token + head * out_head + column[None, :],
            result.to(out.dtype.element_ty),
            mask=mask,
        )
