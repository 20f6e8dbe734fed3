# SPDX-License-Identifier: Apache-2.0
"""Triton Kimi delta attention.

Decode runs on the kernel of the shared recurrence, as does the passing of states.
Prefill differs from the gated delta rule in how pairs of tokens interact: their
decay differs per key channel, so ``sum_k a[i] b[j] exp(G[i] - G[j])`` is no product
of a matrix and a scalar mask. `_pair` splits the exponent at a token between `j`
and `i`. Both halves are then at most 0, so nothing overflows however fast the
layer forgets, and the matrix units apply. For every pair of a chunk to have such a
token, pairs are sorted by the size of the blocks that part them: 32, 16, ... 1.
"""
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"
# mypy: disable-error-code="untyped-decorator,import-untyped"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hybrid_kernels._common import chunk_kernels
from hybrid_kernels._common import linear_chunk as chunk
from hybrid_kernels._common.linear import EPSILON, Operands
from hybrid_kernels._common.linear_step import sigmoid, softplus, steps
from hybrid_kernels._common.tables import CHUNK, Sequences
from hybrid_kernels._common.triangular import below, invert

__all__ = ["prefill", "steps"]

INTRA = chunk.Tunings(
    narrow=chunk.Tuning(columns=64, warps=8, stages=1, channels=32),
    wide=chunk.Tuning(columns=32, warps=8, stages=1, channels=32),
    widest=chunk.Tuning(columns=32, warps=8, stages=1, channels=32),
)


@triton.jit
def _pairs(
    query,
    key,
    total,
    lower,
    weight,
    SIZE: tl.constexpr,
    CHANNELS: tl.constexpr,
    TYPE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add `CHANNELS` channels of all pairs of a row and an earlier column.

    In one turn, a token is a row in one block or a column in the block before, never
    both, so one factor serves both.
    """
    row = tl.arange(0, SIZE)
    for shift in range(6):
        # The last column before the rows that it is parted from.
        pivot = ((row >> (shift + 1)) << (shift + 1)) + (1 << shift) - 1
        base = tl.gather(total, tl.broadcast_to(pivot[:, None], (SIZE, CHANNELS)), 0)
        later = ((row >> shift) & 1) == 1
        factor = tl.exp(tl.where(later[:, None], total - base, base - total))
        keys = (key * factor).to(TYPE)
        queries = (query * factor).to(TYPE)
        parted = below(SIZE, shift)
        products = tl.dot(keys, tl.trans(keys), input_precision=PRECISION)
        lower += tl.where(parted, products, 0.0)
        products = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
        weight += tl.where(parted, products, 0.0)
    return lower, weight


@triton.jit
def _running_sums(
    g,
    place,
    mask,
    rate,
    bias,
    head,
    bias_head,
    channel,
    in_k,
    HAS_RATE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Running sums of log decays over a chunk; constant beyond its end."""
    decay = tl.load(g + place, mask=mask, other=0.0).to(tl.float32)
    if HAS_RATE:
        if HAS_BIAS:
            shift = tl.load(bias + head * bias_head + channel, mask=in_k, other=0.0)
            decay += shift.to(tl.float32)[None, :]
        decay = softplus(decay) * tl.load(rate + head).to(tl.float32)
        decay = tl.where(mask, decay, 0.0)
    return tl.cumsum(decay, 0)


@triton.jit(do_not_specialize=chunk_kernels.COUNTS)
def _intra_kernel(
    q,
    k,
    v,
    g,
    beta,
    rate,
    bias,
    cu_seqlens,
    grown_q,
    end_k,
    w,
    u,
    weights,
    ends,
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
    beta_token,
    beta_head,
    bias_head,
    K: tl.constexpr,
    V: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SIZE: tl.constexpr,
    NORMALISE: tl.constexpr,
    HAS_RATE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    INVERSE: tl.constexpr,
):
    """All that one chunk's tokens do to each other, for any start state."""
    head = tl.program_id(1)
    number = tl.program_id(0)
    first, length = chunk_kernels.locate(
        number, cu_seqlens, sequences, search_steps, SIZE
    )
    if length > 0:
        element: tl.constexpr = end_k.dtype.element_ty
        position = tl.arange(0, SIZE)
        inside = position < length
        token = first + position
        q += (head // group) * q_head
        k += (head // group) * k_head
        lower = tl.zeros((SIZE, SIZE), tl.float32)
        weight = tl.zeros((SIZE, SIZE), tl.float32)
        own = tl.zeros((SIZE,), tl.float32)
        norm_q = tl.zeros((SIZE,), tl.float32)
        norm_k = tl.zeros((SIZE,), tl.float32)
        for start in range(0, K, CHANNELS):
            channel = start + tl.arange(0, CHANNELS)
            in_k = channel < K
            mask = inside[:, None] & in_k[None, :]
            place = token[:, None] * q_token + channel[None, :]
            query = tl.load(q + place, mask=mask, other=0.0).to(tl.float32)
            place = token[:, None] * k_token + channel[None, :]
            key = tl.load(k + place, mask=mask, other=0.0).to(tl.float32)
            place = token[:, None] * g_token + head * g_head + channel[None, :]
            total = _running_sums(
                g,
                place,
                mask,
                rate,
                bias,
                head,
                bias_head,
                channel,
                in_k,
                HAS_RATE,
                HAS_BIAS,
            )
            own += tl.sum(query * key, axis=1)
            if NORMALISE:
                norm_q += tl.sum(query * query, axis=1)
                norm_k += tl.sum(key * key, axis=1)
            lower, weight = _pairs(
                query, key, total, lower, weight, SIZE, CHANNELS, element, PRECISION
            )

        # Products are linear in queries and keys, so norms can wait until here.
        size_q = tl.full((SIZE,), 1.0, tl.float32) * scale
        size_k = tl.full((SIZE,), 1.0, tl.float32)
        if NORMALISE:
            size_q *= tl.rsqrt(norm_q + epsilon)
            size_k *= tl.rsqrt(norm_k + epsilon)
        rate_v = tl.load(
            beta + token * beta_token + head * beta_head, mask=inside, other=0.0
        ).to(tl.float32)
        if HAS_RATE:
            rate_v = tl.where(inside, sigmoid(rate_v), 0.0)
        line = token[:, None] * heads + head
        itself = position[:, None] == position[None, :]
        weight += tl.where(itself, own[:, None], 0.0)
        weight *= size_q[:, None] * size_k[None, :]
        tl.store(
            weights + line * SIZE + position[None, :],
            weight.to(element),
            mask=inside[:, None],
        )
        lower *= (size_k * rate_v)[:, None] * size_k[None, :]
        solved = invert(lower, SIZE, INVERSE).to(element)

        for start in range(0, K, CHANNELS):
            channel = start + tl.arange(0, CHANNELS)
            in_k = channel < K
            mask = inside[:, None] & in_k[None, :]
            place = token[:, None] * g_token + head * g_head + channel[None, :]
            total = _running_sums(
                g,
                place,
                mask,
                rate,
                bias,
                head,
                bias_head,
                channel,
                in_k,
                HAS_RATE,
                HAS_BIAS,
            )
            grow = tl.exp(total)
            row = line * K + channel[None, :]
            place = token[:, None] * q_token + channel[None, :]
            query = tl.load(q + place, mask=mask, other=0.0).to(tl.float32)
            query *= size_q[:, None] * grow
            tl.store(grown_q + row, query.to(element), mask=mask)
            place = token[:, None] * k_token + channel[None, :]
            key = tl.load(k + place, mask=mask, other=0.0).to(tl.float32)
            key *= size_k[:, None]
            last = tl.sum(tl.where((position == SIZE - 1)[:, None], total, 0.0), axis=0)
            tl.store(ends + (number * heads + head) * K + channel, last, mask=in_k)
            final = key * tl.exp(last[None, :] - total)
            tl.store(end_k + row, final.to(element), mask=mask)
            key = (key * rate_v[:, None] * grow).to(element)
            result = tl.dot(solved, key, input_precision=PRECISION)
            tl.store(w + row, result.to(element), mask=mask)
        for start in tl.static_range(0, V, BLOCK_V):
            column = start + tl.arange(0, BLOCK_V)
            mask = inside[:, None] & (column < V)[None, :]
            source = v + token[:, None] * v_token + head * v_head + column[None, :]
            value = tl.load(source, mask=mask, other=0.0).to(tl.float32)
            value = (value * rate_v[:, None]).to(element)
            result = tl.dot(solved, value, input_precision=PRECISION)
            tl.store(u + line * V + column[None, :], result.to(element), mask=mask)


@triton.jit(do_not_specialize=chunk_kernels.COUNTS)
def _output_kernel(
    grown_q,
    weights,
    u,
    states,
    cu_seqlens,
    out,
    sequences,
    search_steps,
    heads,
    out_token,
    out_head,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SIZE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Outputs of one chunk, from its start state and its own tokens."""
    blocks: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    head = (tl.program_id(0) // blocks).to(tl.int64)
    number = tl.program_id(1)
    first, length = chunk_kernels.locate(
        number, cu_seqlens, sequences, search_steps, SIZE
    )
    if length > 0:
        position = tl.arange(0, SIZE)
        inside = position < length
        token = first + position
        line = token[:, None] * heads + head
        column = (tl.program_id(0) % blocks) * BLOCK_V + tl.arange(0, BLOCK_V)
        in_v = column < V
        starts = states + (number.to(tl.int64) * heads + head) * K * V + column[None, :]
        result = tl.zeros((SIZE, BLOCK_V), tl.float32)
        for start in tl.static_range(0, K, BLOCK_K):
            channel = start + tl.arange(0, BLOCK_K)
            in_k = channel < K
            mask = inside[:, None] & in_k[None, :]
            query = tl.load(grown_q + line * K + channel[None, :], mask=mask, other=0.0)
            mask = in_k[:, None] & in_v[None, :]
            state = tl.load(starts + channel[:, None] * V, mask=mask, other=0.0)
            result += tl.dot(query, state, input_precision=PRECISION)
        tile = tl.load(
            weights + line * SIZE + position[None, :], mask=inside[:, None], other=0.0
        )
        mask = inside[:, None] & in_v[None, :]
        value = tl.load(u + line * V + column[None, :], mask=mask, other=0.0)
        result += tl.dot(tile, value, input_precision=PRECISION)
        tl.store(
            out + token[:, None] * out_token + head * out_head + column[None, :],
            result.to(out.dtype.element_ty),
            mask=mask,
        )


def prefill(operands: Operands, sequences: Sequences, out: torch.Tensor) -> None:
    """Solve chunks, pass states, compute outputs: three launches."""
    if sequences.count == 0:
        return
    prepared, grown_q, weights = _solve(operands, sequences)
    states = chunk.pass_states(prepared, sequences)
    _outputs(grown_q, weights, prepared.v, states, sequences, out)


def _solve(
    operands: Operands, sequences: Sequences
) -> tuple[chunk.Prepared, torch.Tensor, torch.Tensor]:
    """Tokens for the passing of states, grown queries and weights of pairs."""
    q, k, v, g, beta = operands.q, operands.k, operands.v, operands.g, operands.beta
    assert beta is not None
    rate, bias = operands.rate, operands.bias
    tokens, heads, width = v.shape
    depth, chunks = k.shape[-1], chunk.most_chunks(tokens, sequences)
    grown_q, end_k, w = (k.new_empty(tokens, heads, depth) for _ in range(3))
    u = k.new_empty(tokens, heads, width)
    weights = k.new_empty(tokens, heads, CHUNK)
    ends = torch.empty(chunks, heads, depth, dtype=torch.float32, device=k.device)
    tuning = INTRA.of(k)
    blocks = chunk.Blocks.of(k, width, tuning)
    _intra_kernel[(chunks, heads)](
        q,
        k,
        v,
        g,
        beta,
        rate,
        bias,
        sequences.cu_seqlens,
        grown_q,
        end_k,
        w,
        u,
        weights,
        ends,
        operands.scale,
        EPSILON,
        *chunk.search(sequences),
        heads,
        heads // k.shape[1],
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        *g.stride()[:2],
        *beta.stride(),
        0 if bias is None else bias.stride(0),
        K=depth,
        V=width,
        CHANNELS=blocks.part,
        BLOCK_V=blocks.v,
        SIZE=CHUNK,
        NORMALISE=operands.normalise,
        HAS_RATE=rate is not None,
        HAS_BIAS=bias is not None,
        PRECISION=blocks.precision,
        INVERSE=blocks.inverse,
        num_warps=tuning.warps,
        num_stages=tuning.stages,
    )
    return chunk.Prepared(end_k, u, w=w, ends=ends), grown_q, weights


def _outputs(
    grown_q: torch.Tensor,
    weights: torch.Tensor,
    u: torch.Tensor,
    states: torch.Tensor,
    sequences: Sequences,
    out: torch.Tensor,
) -> None:
    tokens, heads, width = u.shape
    tuning = chunk.OUTPUT.of(grown_q)
    blocks = chunk.Blocks.of(grown_q, width, tuning)
    programs = triton.cdiv(width, blocks.v) * heads
    _output_kernel[(programs, chunk.most_chunks(tokens, sequences))](
        grown_q,
        weights,
        u,
        states,
        sequences.cu_seqlens,
        out,
        *chunk.search(sequences),
        heads,
        *out.stride()[:2],
        K=grown_q.shape[-1],
        V=width,
        BLOCK_K=blocks.part,
        BLOCK_V=blocks.v,
        SIZE=CHUNK,
        PRECISION=blocks.precision,
        num_warps=tuning.warps,
        num_stages=tuning.stages,
    )
