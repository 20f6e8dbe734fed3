# SPDX-License-Identifier: Apache-2.0
"""Triton gated delta rule, on the kernels of the shared recurrence."""
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
from hybrid_kernels._common.triangular import invert

__all__ = ["prefill", "steps"]

CORRECT = chunk.Tunings(
    narrow=chunk.Tuning(
        columns=128, warps=4, stages=1, channels=128, least=chunk.FEWEST
    ),
    wide=chunk.Tuning(columns=64, warps=4, stages=1, channels=64, least=chunk.FEWEST),
    widest=chunk.Tuning(columns=32, warps=4, stages=1, channels=64),
)


@triton.jit(do_not_specialize=chunk_kernels.COUNTS)
def _correct_kernel(
    k,
    v,
    g,
    beta,
    rate,
    bias,
    cu_seqlens,
    unit_k,
    w,
    u,
    total,
    epsilon,
    sequences,
    search_steps,
    total_head,
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
    HAS_RATE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    INVERSE: tl.constexpr,
):
    """Solve one chunk's triangular system, for any start state.

    Afterwards the corrected values are ``u - w S^T``. Gates and norms of keys are
    computed on the way.
    """
    head = tl.program_id(1)
    first, length = chunk_kernels.locate(
        tl.program_id(0), cu_seqlens, sequences, search_steps, SIZE
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
        decay = tl.load(g + token * g_token + head * g_head, mask=inside, other=0.0)
        decay = decay.to(tl.float32)
        weight = tl.load(
            beta + token * beta_token + head * beta_head, mask=inside, other=0.0
        ).to(tl.float32)
        if HAS_RATE:
            if HAS_BIAS:
                decay += tl.load(bias + head).to(tl.float32)
            decay = softplus(decay) * tl.load(rate + head).to(tl.float32)
            decay = tl.where(inside, decay, 0.0)
            weight = tl.where(inside, sigmoid(weight), 0.0)
        sums = tl.cumsum(decay, 0)
        tl.store(total + head.to(tl.int64) * total_head + token, sums, mask=inside)
        before = position[:, None] > position[None, :]
        decay = tl.exp(tl.where(before, sums[:, None] - sums[None, :], 0.0))
        lower = tl.where(before, lower * decay * weight[:, None], 0.0)
        solved = invert(lower, SIZE, 6, INVERSE).to(k.dtype.element_ty)

        grow = weight * tl.exp(sums)
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
            value = (value * weight[:, None]).to(k.dtype.element_ty)
            result = tl.dot(solved, value, input_precision=PRECISION)
            row = (token[:, None] * heads + head) * V + column[None, :]
            tl.store(u + row, result.to(u.dtype.element_ty), mask=mask)


def prefill(operands: Operands, sequences: Sequences, out: torch.Tensor) -> None:
    """Correct values, pass states, compute outputs: three launches."""
    if sequences.count == 0:
        return
    corrected = _correct(operands, sequences)
    states = chunk.pass_states(corrected, sequences)
    chunk.outputs(operands, corrected, states, sequences, out)


def _correct(operands: Operands, sequences: Sequences) -> chunk.Prepared:
    k, v, g, beta = operands.k, operands.v, operands.g, operands.beta
    assert beta is not None
    tokens, heads, width = v.shape
    depth = k.shape[-1]
    unit_k = k.new_empty(k.shape) if operands.normalise else k
    w = k.new_empty(tokens, heads, depth)
    u = k.new_empty(tokens, heads, width)
    total = torch.empty(heads, tokens, dtype=torch.float32, device=k.device)
    tuning = CORRECT.of(k)
    blocks = chunk.Blocks.of(k, width, tuning)
    _correct_kernel[(chunk.most_chunks(tokens, sequences), heads)](
        k,
        v,
        g,
        beta,
        operands.rate,
        operands.bias,
        sequences.cu_seqlens,
        unit_k,
        w,
        u,
        total,
        EPSILON,
        *chunk.search(sequences),
        tokens,
        heads,
        heads // k.shape[1],
        *k.stride()[:2],
        *v.stride()[:2],
        *g.stride(),
        *beta.stride(),
        K=depth,
        V=width,
        BLOCK_K=blocks.part,
        BLOCK_V=blocks.v,
        SIZE=CHUNK,
        NORMALISE=operands.normalise,
        HAS_RATE=operands.rate is not None,
        HAS_BIAS=operands.bias is not None,
        PRECISION=blocks.precision,
        INVERSE=blocks.inverse,
        num_warps=tuning.warps,
        num_stages=tuning.stages,
    )
    return chunk.Prepared(unit_k, u, w=w, total=total)
