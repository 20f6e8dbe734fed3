# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of what the tokens of one chunk do to each other, per channel.

Decay differs per key channel, so ``sum_k a[i] b[j] exp(G[i] - G[j])`` is no product
of a matrix and a scalar mask. `pair_kernel` splits the exponent at a token between
`j` and `i`. Both halves are then at most 0, so nothing overflows however fast the
layer forgets, and the matrix units apply. For every pair to have such a token, a
chunk is cut into blocks of `BLOCK` rows. Pairs of two blocks part at the first row of
the later one. Pairs within a block are sorted by the size of the halves that part
them: 8, 4, 2, 1.
"""
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"
# mypy: disable-error-code="untyped-decorator,import-untyped"

from __future__ import annotations

import triton
import triton.language as tl

from hybrid_kernels._common import chunk_kernels
from hybrid_kernels._common.linear_step import sigmoid, softplus
from hybrid_kernels._common.triangular import below, invert, join


@triton.jit(do_not_specialize=chunk_kernels.COUNTS)
def decay_kernel(
    q,
    k,
    g,
    rate,
    bias,
    cu_seqlens,
    total,
    grown_q,
    grown_k,
    end_k,
    ends,
    sizes,
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
    g_token,
    g_head,
    bias_head,
    K: tl.constexpr,
    CHANNELS: tl.constexpr,
    SIZE: tl.constexpr,
    NORMALISE: tl.constexpr,
    HAS_RATE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Running sums of log decays in one chunk, and queries and keys scaled by them.

    `sizes` gets the factors that make queries and keys unit vectors.
    """
    head = tl.program_id(0)
    number = tl.program_id(1)
    first, length = chunk_kernels.locate(
        number, cu_seqlens, sequences, search_steps, SIZE
    )
    if length > 0:
        element: tl.constexpr = end_k.dtype.element_ty
        position = tl.arange(0, SIZE)
        inside = position < length
        token = first + position
        queries = q + token[:, None] * q_token + (head // group) * q_head
        keys = k + token[:, None] * k_token + (head // group) * k_head
        size_q = tl.full((SIZE,), 1.0, tl.float32) * scale
        size_k = tl.full((SIZE,), 1.0, tl.float32)
        if NORMALISE:
            norm_q = tl.zeros((SIZE,), tl.float32)
            norm_k = tl.zeros((SIZE,), tl.float32)
            for start in tl.static_range(0, K, CHANNELS):
                channel = start + tl.arange(0, CHANNELS)
                mask = inside[:, None] & (channel < K)[None, :]
                query = tl.load(queries + channel[None, :], mask=mask, other=0.0)
                query = query.to(tl.float32)
                norm_q += tl.sum(query * query, axis=1)
                key = tl.load(keys + channel[None, :], mask=mask, other=0.0)
                key = key.to(tl.float32)
                norm_k += tl.sum(key * key, axis=1)
            size_q *= tl.rsqrt(norm_q + epsilon)
            size_k *= tl.rsqrt(norm_k + epsilon)
            place = sizes + head.to(tl.int64) * total_head + token
            tl.store(place, size_q, mask=inside)
            tl.store(place + heads * total_head, size_k, mask=inside)
        for start in tl.static_range(0, K, CHANNELS):
            channel = start + tl.arange(0, CHANNELS)
            in_k = channel < K
            mask = inside[:, None] & in_k[None, :]
            place = token[:, None] * g_token + head * g_head + channel[None, :]
            decay = tl.load(g + place, mask=mask, other=0.0).to(tl.float32)
            if HAS_RATE:
                if HAS_BIAS:
                    place = bias + head * bias_head + channel
                    shift = tl.load(place, mask=in_k, other=0.0)
                    decay += shift.to(tl.float32)[None, :]
                decay = softplus(decay) * tl.load(rate + head).to(tl.float32)
                decay = tl.where(mask, decay, 0.0)
            last = tl.sum(decay, axis=0)
            sums = tl.cumsum(decay, 0)
            row = (token[:, None] * heads + head) * K + channel[None, :]
            tl.store(total + row, sums, mask=mask)
            place = ends + (number.to(tl.int64) * heads + head) * K + channel
            tl.store(place, last, mask=in_k)
            grow = tl.exp(sums)
            query = tl.load(queries + channel[None, :], mask=mask, other=0.0)
            query = query.to(tl.float32) * size_q[:, None] * grow
            tl.store(grown_q + row, query.to(element), mask=mask)
            key = tl.load(keys + channel[None, :], mask=mask, other=0.0)
            key = key.to(tl.float32) * size_k[:, None]
            tl.store(grown_k + row, (key * grow).to(element), mask=mask)
            key *= tl.exp(last[None, :] - sums)
            tl.store(end_k + row, key.to(element), mask=mask)


@triton.jit
def _grown(row, factor):
    """A row's channels times their factors, in the type of the row."""
    return (row.to(tl.float32) * factor).to(row.dtype)


@triton.jit
def _left_block(
    queries,
    keys,
    sums,
    row,
    base,
    column,
    q_token,
    k_token,
    sums_token,
    K: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Keys by keys and queries by keys of `row` and `column`, parted at `base`."""
    lower = tl.zeros((BLOCK, BLOCK), tl.float32)
    weight = tl.zeros((BLOCK, BLOCK), tl.float32)
    for start in range(0, K, CHANNELS):
        channel = start + tl.arange(0, CHANNELS)[None, :]
        in_k = channel < K
        parted = tl.load(sums + base * sums_token + channel, mask=in_k, other=0.0)
        place = sums + row[:, None] * sums_token + channel
        factor = tl.exp(tl.load(place, mask=in_k, other=0.0) - parted)
        place = sums + column[:, None] * sums_token + channel
        reach = tl.exp(parted - tl.load(place, mask=in_k, other=0.0))
        place = keys + column[:, None] * k_token + channel
        earlier = _grown(tl.load(place, mask=in_k, other=0.0), reach)
        earlier = tl.trans(earlier)
        place = keys + row[:, None] * k_token + channel
        later = _grown(tl.load(place, mask=in_k, other=0.0), factor)
        lower = tl.dot(later, earlier, lower, input_precision=PRECISION)
        place = queries + row[:, None] * q_token + channel
        later = _grown(tl.load(place, mask=in_k, other=0.0), factor)
        weight = tl.dot(later, earlier, weight, input_precision=PRECISION)
    return lower, weight


@triton.jit
def _own_block(
    queries,
    keys,
    sums,
    first,
    begin,
    length,
    q_token,
    k_token,
    sums_token,
    K: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    LEVELS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """As `_left_block`, within one block; only below and (weights) on its diagonal.

    In one turn, a token is a row in one half or a column in the half before, never
    both, so one factor serves both.
    """
    index = tl.arange(0, BLOCK)
    row = first + tl.minimum(begin + index, length - 1)
    lower = tl.zeros((BLOCK, BLOCK), tl.float32)
    weight = tl.zeros((BLOCK, BLOCK), tl.float32)
    for start in range(0, K, CHANNELS):
        channel = start + tl.arange(0, CHANNELS)[None, :]
        in_k = channel < K
        place = queries + row[:, None] * q_token + channel
        query = tl.load(place, mask=in_k, other=0.0)
        place = keys + row[:, None] * k_token + channel
        key = tl.load(place, mask=in_k, other=0.0)
        place = sums + row[:, None] * sums_token + channel
        now = tl.load(place, mask=in_k, other=0.0)
        own = tl.sum(query.to(tl.float32) * key.to(tl.float32), axis=1)
        weight += tl.where(index[:, None] == index[None, :], own[:, None], 0.0)
        for shift in range(LEVELS):
            pivot = ((index >> (shift + 1)) << (shift + 1)) + (1 << shift) - 1
            pivot = first + tl.minimum(begin + pivot, length - 1)
            place = sums + pivot[:, None] * sums_token + channel
            base = tl.load(place, mask=in_k, other=0.0)
            is_later = ((index >> shift) & 1) == 1
            factor = tl.exp(tl.where(is_later[:, None], now - base, base - now))
            parted = below(BLOCK, shift)
            keys_now = _grown(key, factor)
            across = tl.trans(keys_now)
            more = tl.dot(keys_now, across, input_precision=PRECISION)
            lower += tl.where(parted, more, 0.0)
            more = tl.dot(_grown(query, factor), across, input_precision=PRECISION)
            weight += tl.where(parted, more, 0.0)
    return lower, weight


@triton.jit(do_not_specialize=chunk_kernels.COUNTS)
def pair_kernel(
    q,
    k,
    beta,
    cu_seqlens,
    total,
    sizes,
    weights,
    lower,
    scale,
    sequences,
    search_steps,
    total_head,
    heads,
    group,
    q_token,
    q_head,
    k_token,
    k_head,
    beta_token,
    beta_head,
    K: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    LEVELS: tl.constexpr,
    SIZE: tl.constexpr,
    NORMALISE: tl.constexpr,
    SIGMOID: tl.constexpr,
    PRECISION: tl.constexpr,
    INVERSE: tl.constexpr,
):
    """`BLOCK` rows of one chunk's pairs.

    `weights` gets queries by keys; `lower` gets the system of the delta rule, with
    the block on the diagonal inverted. Nothing is written above the diagonal blocks.
    """
    parts: tl.constexpr = SIZE // BLOCK
    head = tl.program_id(0) // parts
    first, length = chunk_kernels.locate(
        tl.program_id(1), cu_seqlens, sequences, search_steps, SIZE
    )
    begin = (tl.program_id(0) % parts) * BLOCK
    if begin < length:
        element: tl.constexpr = weights.dtype.element_ty
        index = tl.arange(0, BLOCK)
        inside = begin + index < length
        # Rows beyond the end repeat the last one: finite, and never stored.
        token = first + tl.minimum(begin + index, length - 1)
        queries = q + (head // group) * q_head
        keys = k + (head // group) * k_head
        sums = total + head * K
        rate = tl.load(beta + token * beta_token + head * beta_head).to(tl.float32)
        if SIGMOID:
            rate = sigmoid(rate)
        size_q = tl.full((BLOCK,), 1.0, tl.float32) * scale
        size_k = tl.full((BLOCK,), 1.0, tl.float32)
        sizes += head.to(tl.int64) * total_head
        if NORMALISE:
            size_q = tl.load(sizes + token)
            size_k = tl.load(sizes + heads * total_head + token)
        rows = ((first + begin + index) * heads + head)[:, None] * SIZE + index[None, :]

        # Blocks to the left are whole.
        for start in range(0, begin, BLOCK):
            column = first + start + index
            tile, weight = _left_block(
                queries,
                keys,
                sums,
                token,
                first + begin,
                column,
                q_token,
                k_token,
                heads * K,
                K,
                CHANNELS,
                BLOCK,
                PRECISION,
            )
            size = tl.full((BLOCK,), 1.0, tl.float32)
            if NORMALISE:
                size = tl.load(sizes + heads * total_head + column)
            tile *= (size_k * rate)[:, None] * size[None, :]
            tl.store(lower + rows + start, tile, mask=inside[:, None])
            weight *= size_q[:, None] * size[None, :]
            tl.store(weights + rows + start, weight.to(element), mask=inside[:, None])

        tile, weight = _own_block(
            queries,
            keys,
            sums,
            first,
            begin,
            length,
            q_token,
            k_token,
            heads * K,
            K,
            CHANNELS,
            BLOCK,
            LEVELS,
            PRECISION,
        )
        weight *= size_q[:, None] * size_k[None, :]
        tl.store(weights + rows + begin, weight.to(element), mask=inside[:, None])
        tile *= (size_k * rate)[:, None] * size_k[None, :]
        tile = invert(tile, BLOCK, LEVELS, INVERSE)
        tl.store(lower + rows + begin, tile, mask=inside[:, None])


@triton.jit
def _apply(
    solved,
    source,
    target,
    inside,
    token_in,
    token_out,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write ``solved @ source``, `COLUMNS` at a time."""
    for start in tl.static_range(0, WIDTH, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        mask = inside[:, None] & (column < WIDTH)[None, :]
        place = source + token_in[:, None] + column[None, :]
        value = tl.load(place, mask=mask, other=0.0).to(solved.dtype)
        value = tl.dot(solved, value, input_precision=PRECISION)
        place = target + token_out[:, None] * WIDTH + column[None, :]
        tl.store(place, value.to(target.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=chunk_kernels.COUNTS)
def correct_kernel(
    v,
    beta,
    cu_seqlens,
    lower,
    grown_k,
    w,
    u,
    sequences,
    search_steps,
    heads,
    v_token,
    v_head,
    beta_token,
    beta_head,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SIZE: tl.constexpr,
    LEVELS: tl.constexpr,
    SIGMOID: tl.constexpr,
    PRECISION: tl.constexpr,
    INVERSE: tl.constexpr,
):
    """Solve one chunk's triangular system, for any start state.

    Afterwards the corrected values are ``u - w S^T``.
    """
    head = tl.program_id(0)
    first, length = chunk_kernels.locate(
        tl.program_id(1), cu_seqlens, sequences, search_steps, SIZE
    )
    if length > 0:
        position = tl.arange(0, SIZE)
        inside = position < length
        token = first + position
        line = token * heads + head
        row = (position >> LEVELS)[:, None]
        column = (position >> LEVELS)[None, :]
        tile = tl.load(
            lower + line[:, None] * SIZE + position[None, :],
            mask=inside[:, None] & (row >= column),
            other=0.0,
        )
        solved = tl.where(row == column, tile, 0.0)
        for shift in tl.static_range(LEVELS, 6):
            solved = join(tile, solved, SIZE, shift, INVERSE)
        rate = tl.load(
            beta + token * beta_token + head * beta_head, mask=inside, other=0.0
        ).to(tl.float32)
        if SIGMOID:
            rate = tl.where(inside, sigmoid(rate), 0.0)
        solved = (solved * rate[None, :]).to(grown_k.dtype.element_ty)
        v += head * v_head
        _apply(solved, grown_k, w, inside, line * K, line, K, BLOCK_K, PRECISION)
        _apply(solved, v, u, inside, token * v_token, line, V, BLOCK_V, PRECISION)
