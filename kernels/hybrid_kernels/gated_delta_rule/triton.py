# SPDX-License-Identifier: Apache-2.0
"""Triton gated delta rule, on the kernels of the shared recurrence."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"
# mypy: disable-error-code="untyped-decorator,import-untyped"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from hybrid_kernels._common import chunk_kernels
from hybrid_kernels._common import linear_chunk as chunk
from hybrid_kernels._common.linear import EPSILON, Operands
from hybrid_kernels._common.linear_step import sigmoid, softplus
from hybrid_kernels._common.linear_verify import steps
from hybrid_kernels._common.tables import CHUNK, Sequences
from hybrid_kernels._common.triangular import invert
from hybrid_kernels.gated_delta_rule.reference import Factors

__all__ = ["factors", "prefill", "steps"]

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
    A,
    dt_bias,
    cu_seqlens,
    offsets,
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
    USE_QK_L2NORM: tl.constexpr,
    HAS_A: tl.constexpr,
    HAS_DT_BIAS: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    PRECISION: tl.constexpr,
    INVERSE: tl.constexpr,
):
    """Solve one chunk's triangular system, for any start state.

    Afterwards the corrected values are ``u - w S^T``. Gates and norms of keys are
    computed on the way.
    """
    head = tl.program_id(1)
    number = tl.program_id(0)
    first, length = chunk_kernels.locate(
        number, cu_seqlens, offsets, sequences, search_steps, SIZE, HAS_OFFSETS
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
            p_k = k + token[:, None] * k_token + channel[None, :]
            b_k = tl.load(p_k, mask=mask, other=0.0)
            lower += tl.dot(b_k, tl.trans(b_k), input_precision=PRECISION)
            if USE_QK_L2NORM:
                wide = b_k.to(tl.float32)
                norm += tl.sum(wide * wide, axis=1)
        if USE_QK_L2NORM:
            norm = tl.rsqrt(norm + epsilon)
            lower *= norm[:, None] * norm[None, :]
        b_g = tl.load(g + token * g_token + head * g_head, mask=inside, other=0.0)
        b_g = b_g.to(tl.float32)
        b_beta = tl.load(
            beta + token * beta_token + head * beta_head, mask=inside, other=0.0
        ).to(tl.float32)
        if HAS_A:
            if HAS_DT_BIAS:
                b_g += tl.load(dt_bias + head).to(tl.float32)
            b_g = softplus(b_g) * tl.load(A + head).to(tl.float32)
            b_g = tl.where(inside, b_g, 0.0)
            b_beta = tl.where(inside, sigmoid(b_beta), 0.0)
        b_total = tl.cumsum(b_g, 0)
        tl.store(total + head.to(tl.int64) * total_head + token, b_total, mask=inside)
        before = position[:, None] > position[None, :]
        b_g = tl.exp(tl.where(before, b_total[:, None] - b_total[None, :], 0.0))
        lower = tl.where(before, lower * b_g * b_beta[:, None], 0.0)
        solved = invert(lower, SIZE, 6, INVERSE).to(k.dtype.element_ty)

        grow = b_beta * tl.exp(b_total)
        for start in tl.static_range(0, K, BLOCK_K):
            channel = start + tl.arange(0, BLOCK_K)
            mask = inside[:, None] & (channel < K)[None, :]
            p_k = k + token[:, None] * k_token + channel[None, :]
            wide = tl.load(p_k, mask=mask, other=0.0).to(tl.float32)
            if USE_QK_L2NORM:
                wide *= norm[:, None]
                if head % group == 0:
                    o_unit_k = (token[:, None] * (heads // group) + head // group) * K
                    unit = wide.to(k.dtype.element_ty)
                    tl.store(unit_k + o_unit_k + channel[None, :], unit, mask=mask)
            wide = (wide * grow[:, None]).to(k.dtype.element_ty)
            result = tl.dot(solved, wide, input_precision=PRECISION)
            row = (token[:, None] * heads + head) * K + channel[None, :]
            tl.store(w + row, result.to(w.dtype.element_ty), mask=mask)
        for start in tl.static_range(0, V, BLOCK_V):
            column = start + tl.arange(0, BLOCK_V)
            mask = inside[:, None] & (column < V)[None, :]
            o_v = token[:, None] * v_token + head * v_head + column[None, :]
            b_v = tl.load(v + o_v, mask=mask, other=0.0).to(tl.float32)
            b_v = (b_v * b_beta[:, None]).to(k.dtype.element_ty)
            result = tl.dot(solved, b_v, input_precision=PRECISION)
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
    unit_k = k.new_empty(k.shape) if operands.use_qk_l2norm else k
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
        operands.A,
        operands.dt_bias,
        sequences.cu_seqlens,
        sequences.offsets,
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
        USE_QK_L2NORM=operands.use_qk_l2norm,
        HAS_A=operands.A is not None,
        HAS_DT_BIAS=operands.dt_bias is not None,
        HAS_OFFSETS=sequences.offsets is not None,
        PRECISION=blocks.precision,
        INVERSE=blocks.inverse,
        num_warps=tuning.warps,
        num_stages=tuning.stages,
    )
    return chunk.Prepared(unit_k, u, w=w, total=total)


@triton.jit
def _unit_rows(
    source,
    to,
    token,
    row,
    s_token,
    s_head,
    epsilon,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Copy one token's heads to a contiguous row, each of norm 1 if `UNIT`."""
    head, channel = tl.arange(0, BLOCK_HEADS), tl.arange(0, BLOCK_WIDTH)
    mask = (head < HEADS)[:, None] & (channel < WIDTH)[None, :]
    at = source + token * s_token + head[:, None] * s_head + channel[None, :]
    wide = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    if UNIT:
        wide *= tl.rsqrt(tl.sum(wide * wide, axis=1) + epsilon)[:, None]
    place = row * (HEADS * WIDTH) + head[:, None] * WIDTH + channel[None, :]
    tl.store(to + place, wide.to(to.dtype.element_ty), mask=mask)


@triton.jit
def _factors_kernel(
    q,
    k,
    v,
    g,
    beta,
    A,
    dt_bias,
    rows,
    out_q,
    out_k,
    out_v,
    out_decay,
    out_beta,
    epsilon,
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
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_HV: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    UNIT: tl.constexpr,
    HAS_A: tl.constexpr,
    HAS_DT_BIAS: tl.constexpr,
):
    """One token: its queries and keys, or its values and gates."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(rows + row).to(tl.int64)
    if tl.program_id(1) == 0:
        _unit_rows(
            q,
            out_q,
            token,
            row,
            q_token,
            q_head,
            epsilon,
            H,
            K,
            BLOCK_H,
            BLOCK_K,
            UNIT,
        )
        _unit_rows(
            k,
            out_k,
            token,
            row,
            k_token,
            k_head,
            epsilon,
            H,
            K,
            BLOCK_H,
            BLOCK_K,
            UNIT,
        )
    else:
        _unit_rows(
            v,
            out_v,
            token,
            row,
            v_token,
            v_head,
            epsilon,
            HV,
            V,
            BLOCK_HV,
            BLOCK_V,
            False,
        )
        head = tl.arange(0, BLOCK_HV)
        inside = head < HV
        b_g = tl.load(g + token * g_token + head * g_head, mask=inside, other=0.0)
        b_g = b_g.to(tl.float32)
        at = beta + token * beta_token + head * beta_head
        b_beta = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        if HAS_A:
            if HAS_DT_BIAS:
                b_g += tl.load(dt_bias + head, mask=inside, other=0.0).to(tl.float32)
            rate = tl.load(A + head, mask=inside, other=0.0).to(tl.float32)
            b_g = softplus(b_g) * rate
            b_beta = sigmoid(b_beta)
        tl.store(out_decay + row * HV + head, tl.exp(b_g), mask=inside)
        tl.store(out_beta + row * HV + head, b_beta, mask=inside)


def factors(operands: Operands, rows: torch.Tensor) -> Factors:
    """See `hybrid_kernels.gated_delta_rule.factors`: one launch."""
    q, k, v, g, beta = operands.q, operands.k, operands.v, operands.g, operands.beta
    assert beta is not None
    heads, depth = k.shape[1:]
    values, width = v.shape[1:]
    count = rows.numel()
    wide: dict[str, Any] = {"dtype": torch.float32, "device": v.device}
    made = Factors(
        q.new_empty(count, heads, depth),
        k.new_empty(count, heads, depth),
        v.new_empty(count, values, width),
        torch.empty(count, values, **wide),
        torch.empty(count, values, **wide),
    )
    if count == 0:
        return made
    _factors_kernel[(count, 2)](
        q,
        k,
        v,
        g,
        beta,
        operands.A,
        operands.dt_bias,
        rows,
        made.q,
        made.k,
        made.v,
        made.decay,
        made.beta,
        EPSILON,
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        *g.stride(),
        *beta.stride(),
        H=heads,
        HV=values,
        K=depth,
        V=width,
        BLOCK_H=triton.next_power_of_2(heads),
        BLOCK_HV=triton.next_power_of_2(values),
        BLOCK_K=triton.next_power_of_2(depth),
        BLOCK_V=triton.next_power_of_2(width),
        UNIT=operands.use_qk_l2norm,
        HAS_A=operands.A is not None,
        HAS_DT_BIAS=operands.dt_bias is not None,
    )
    return made
