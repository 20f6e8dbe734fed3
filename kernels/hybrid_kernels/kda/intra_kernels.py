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
    A,
    dt_bias,
    cu_seqlens,
    offsets,
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
    dt_bias_head,
    K: tl.constexpr,
    CHANNELS: tl.constexpr,
    SIZE: tl.constexpr,
    USE_QK_L2NORM: tl.constexpr,
    HAS_A: tl.constexpr,
    HAS_DT_BIAS: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
):
    """Running sums of log decays in one chunk, and queries and keys scaled by them.

    `sizes` gets the factors that make queries and keys unit vectors.
    """
    head = tl.program_id(0)
    number = tl.program_id(1)
    first, length = chunk_kernels.locate(
        number, cu_seqlens, offsets, sequences, search_steps, SIZE, HAS_OFFSETS
    )
    if length > 0:
        element: tl.constexpr = end_k.dtype.element_ty
        position = tl.arange(0, SIZE)
        inside = position < length
        token = first + position
        p_q = q + token[:, None] * q_token + (head // group) * q_head
        p_k = k + token[:, None] * k_token + (head // group) * k_head
        size_q = tl.full((SIZE,), 1.0, tl.float32) * scale
        size_k = tl.full((SIZE,), 1.0, tl.float32)
        if USE_QK_L2NORM:
            norm_q = tl.zeros((SIZE,), tl.float32)
            norm_k = tl.zeros((SIZE,), tl.float32)
            for start in tl.static_range(0, K, CHANNELS):
                channel = start + tl.arange(0, CHANNELS)
                mask = inside[:, None] & (channel < K)[None, :]
                b_q = tl.load(p_q + channel[None, :], mask=mask, other=0.0)
                b_q = b_q.to(tl.float32)
                norm_q += tl.sum(b_q * b_q, axis=1)
                b_k = tl.load(p_k + channel[None, :], mask=mask, other=0.0)
                b_k = b_k.to(tl.float32)
                norm_k += tl.sum(b_k * b_k, axis=1)
            size_q *= tl.rsqrt(norm_q + epsilon)
            size_k *= tl.rsqrt(norm_k + epsilon)
            p_sizes = sizes + head.to(tl.int64) * total_head + token
            tl.store(p_sizes, size_q, mask=inside)
            tl.store(p_sizes + heads * total_head, size_k, mask=inside)
        for start in tl.static_range(0, K, CHANNELS):
            channel = start + tl.arange(0, CHANNELS)
            in_k = channel < K
            mask = inside[:, None] & in_k[None, :]
            o_g = token[:, None] * g_token + head * g_head + channel[None, :]
            b_g = tl.load(g + o_g, mask=mask, other=0.0).to(tl.float32)
            if HAS_A:
                if HAS_DT_BIAS:
                    p_dt_bias = dt_bias + head * dt_bias_head + channel
                    b_dt_bias = tl.load(p_dt_bias, mask=in_k, other=0.0)
                    b_g += b_dt_bias.to(tl.float32)[None, :]
                b_g = softplus(b_g) * tl.load(A + head).to(tl.float32)
                b_g = tl.where(mask, b_g, 0.0)
            last = tl.sum(b_g, axis=0)
            b_total = tl.cumsum(b_g, 0)
            row = (token[:, None] * heads + head) * K + channel[None, :]
            tl.store(total + row, b_total, mask=mask)
            p_ends = ends + (number.to(tl.int64) * heads + head) * K + channel
            tl.store(p_ends, last, mask=in_k)
            grow = tl.exp(b_total)
            b_q = tl.load(p_q + channel[None, :], mask=mask, other=0.0)
            b_q = b_q.to(tl.float32) * size_q[:, None] * grow
            tl.store(grown_q + row, b_q.to(element), mask=mask)
            b_k = tl.load(p_k + channel[None, :], mask=mask, other=0.0)
            b_k = b_k.to(tl.float32) * size_k[:, None]
            tl.store(grown_k + row, (b_k * grow).to(element), mask=mask)
            b_k *= tl.exp(last[None, :] - b_total)
            tl.store(end_k + row, b_k.to(element), mask=mask)


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
        p_sums = sums + row[:, None] * sums_token + channel
        factor = tl.exp(tl.load(p_sums, mask=in_k, other=0.0) - parted)
        p_sums = sums + column[:, None] * sums_token + channel
        reach = tl.exp(parted - tl.load(p_sums, mask=in_k, other=0.0))
        p_k = keys + column[:, None] * k_token + channel
        earlier = _grown(tl.load(p_k, mask=in_k, other=0.0), reach)
        earlier = tl.trans(earlier)
        p_k = keys + row[:, None] * k_token + channel
        later = _grown(tl.load(p_k, mask=in_k, other=0.0), factor)
        lower = tl.dot(later, earlier, lower, input_precision=PRECISION)
        p_q = queries + row[:, None] * q_token + channel
        later = _grown(tl.load(p_q, mask=in_k, other=0.0), factor)
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
        p_q = queries + row[:, None] * q_token + channel
        b_q = tl.load(p_q, mask=in_k, other=0.0)
        p_k = keys + row[:, None] * k_token + channel
        b_k = tl.load(p_k, mask=in_k, other=0.0)
        p_sums = sums + row[:, None] * sums_token + channel
        now = tl.load(p_sums, mask=in_k, other=0.0)
        own = tl.sum(b_q.to(tl.float32) * b_k.to(tl.float32), axis=1)
        weight += tl.where(index[:, None] == index[None, :], own[:, None], 0.0)
        for shift in range(LEVELS):
            pivot = ((index >> (shift + 1)) << (shift + 1)) + (1 << shift) - 1
            pivot = first + tl.minimum(begin + pivot, length - 1)
            p_sums = sums + pivot[:, None] * sums_token + channel
            base = tl.load(p_sums, mask=in_k, other=0.0)
            is_later = ((index >> shift) & 1) == 1
            factor = tl.exp(tl.where(is_later[:, None], now - base, base - now))
            parted = below(BLOCK, shift)
            keys_now = _grown(b_k, factor)
            across = tl.trans(keys_now)
            more = tl.dot(keys_now, across, input_precision=PRECISION)
            lower += tl.where(parted, more, 0.0)
            more = tl.dot(_grown(b_q, factor), across, input_precision=PRECISION)
            weight += tl.where(parted, more, 0.0)
    return lower, weight


@triton.jit(do_not_specialize=chunk_kernels.COUNTS)
def pair_kernel(
    q,
    k,
    beta,
    cu_seqlens,
    offsets,
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
    HAS_OFFSETS: tl.constexpr,
    USE_QK_L2NORM: tl.constexpr,
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
    number = tl.program_id(1)
    first, length = chunk_kernels.locate(
        number, cu_seqlens, offsets, sequences, search_steps, SIZE, HAS_OFFSETS
    )
    begin = (tl.program_id(0) % parts) * BLOCK
    if begin < length:
        element: tl.constexpr = weights.dtype.element_ty
        index = tl.arange(0, BLOCK)
        inside = begin + index < length
        # Rows beyond the end repeat the last one: finite, and never stored.
        token = first + tl.minimum(begin + index, length - 1)
        p_q = q + (head // group) * q_head
        p_k = k + (head // group) * k_head
        p_sums = total + head * K
        b_beta = tl.load(beta + token * beta_token + head * beta_head).to(tl.float32)
        if SIGMOID:
            b_beta = sigmoid(b_beta)
        size_q = tl.full((BLOCK,), 1.0, tl.float32) * scale
        size_k = tl.full((BLOCK,), 1.0, tl.float32)
        sizes += head.to(tl.int64) * total_head
        if USE_QK_L2NORM:
            size_q = tl.load(sizes + token)
            size_k = tl.load(sizes + heads * total_head + token)
        rows = ((first + begin + index) * heads + head)[:, None] * SIZE + index[None, :]

        # Blocks to the left are whole.
        for start in range(0, begin, BLOCK):
            column = first + start + index
            tile, weight = _left_block(
                p_q,
                p_k,
                p_sums,
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
            if USE_QK_L2NORM:
                size = tl.load(sizes + heads * total_head + column)
            tile *= (size_k * b_beta)[:, None] * size[None, :]
            tl.store(lower + rows + start, tile, mask=inside[:, None])
            weight *= size_q[:, None] * size[None, :]
            tl.store(weights + rows + start, weight.to(element), mask=inside[:, None])

        tile, weight = _own_block(
            p_q,
            p_k,
            p_sums,
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
        tile *= (size_k * b_beta)[:, None] * size_k[None, :]
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
        p_source = source + token_in[:, None] + column[None, :]
        b_v = tl.load(p_source, mask=mask, other=0.0).to(solved.dtype)
        b_v = tl.dot(solved, b_v, input_precision=PRECISION)
        p_target = target + token_out[:, None] * WIDTH + column[None, :]
        tl.store(p_target, b_v.to(target.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=chunk_kernels.COUNTS)
def correct_kernel(
    v,
    beta,
    cu_seqlens,
    offsets,
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
    HAS_OFFSETS: tl.constexpr,
    LEVELS: tl.constexpr,
    SIGMOID: tl.constexpr,
    PRECISION: tl.constexpr,
    INVERSE: tl.constexpr,
):
    """Solve one chunk's triangular system, for any start state.

    Afterwards the corrected values are ``u - w S^T``.
    """
    head = tl.program_id(0)
    number = tl.program_id(1)
    first, length = chunk_kernels.locate(
        number, cu_seqlens, offsets, sequences, search_steps, SIZE, HAS_OFFSETS
    )
    if length > 0:
        position = tl.arange(0, SIZE)
        inside = position < length
        token = first + position
        o_row = token * heads + head
        row = (position >> LEVELS)[:, None]
        column = (position >> LEVELS)[None, :]
        tile = tl.load(
            lower + o_row[:, None] * SIZE + position[None, :],
            mask=inside[:, None] & (row >= column),
            other=0.0,
        )
        solved = tl.where(row == column, tile, 0.0)
        for shift in tl.static_range(LEVELS, 6):
            solved = join(tile, solved, SIZE, shift, INVERSE)
        b_beta = tl.load(
            beta + token * beta_token + head * beta_head, mask=inside, other=0.0
        ).to(tl.float32)
        if SIGMOID:
            b_beta = tl.where(inside, sigmoid(b_beta), 0.0)
        solved = (solved * b_beta[None, :]).to(grown_k.dtype.element_ty)
        v += head * v_head
        _apply(solved, grown_k, w, inside, o_row * K, o_row, K, BLOCK_K, PRECISION)
        _apply(solved, v, u, inside, token * v_token, o_row, V, BLOCK_V, PRECISION)
