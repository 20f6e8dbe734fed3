# SPDX-License-Identifier: Apache-2.0
"""Triton kernel of the shared recurrence, one or a few tokens per sequence.

See `hybrid_kernels._common.linear` for the recurrence. One program owns `BLOCK_V`
rows of one head's state, so a state is read once and written once per token.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"
# mypy: disable-error-code="untyped-decorator,import-untyped"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hybrid_kernels._common.linear import EPSILON, Operands
from hybrid_kernels._common.tables import Drafts

# Fixed, whatever the batch: a row's arithmetic must not depend on other rows.
# Small tiles: a row's products stay within one warp and its sums need no shared
# memory; measured fastest from batch 1 to 512 on an H200.
_BLOCK_V = 4
_WARPS = 1


@triton.jit
def softplus(x):
    """``log(1 + exp(x))``, also precise where the result is tiny."""
    power = tl.exp(tl.minimum(x, 20.0))
    series = power * (1.0 - power * (0.5 - power * (1.0 / 3.0)))
    return tl.where(x > 20.0, x, tl.where(x < -5.0, series, tl.log(1.0 + power)))


@triton.jit
def sigmoid(x):
    """Logistic function."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _step_kernel(
    q,
    k,
    v,
    g,
    beta,
    A,
    dt_bias,
    skip,
    gate,
    pool,
    slots,
    draft_slots,
    parents,
    out,
    scale,
    epsilon,
    drafts,
    heads,
    group,
    q_row,
    q_draft,
    q_head,
    k_row,
    k_draft,
    k_head,
    v_row,
    v_draft,
    v_head,
    g_row,
    g_draft,
    g_head,
    beta_row,
    beta_draft,
    beta_head,
    gate_row,
    gate_draft,
    gate_head,
    dt_bias_head,
    pool_slot,
    pool_head,
    pool_v,
    pool_k,
    draft_slots_row,
    draft_slots_draft,
    parents_row,
    parents_draft,
    out_row,
    out_draft,
    out_head,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    HAS_BETA: tl.constexpr,
    SIGMOID_BETA: tl.constexpr,
    HAS_A: tl.constexpr,
    HAS_DT_BIAS: tl.constexpr,
    SCALE_V: tl.constexpr,
    WIDE_G: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    HAS_GATE: tl.constexpr,
    HAS_PARENTS: tl.constexpr,
    USE_QK_L2NORM: tl.constexpr,
):
    blocks: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    head = tl.program_id(0) // blocks
    row = tl.program_id(1).to(tl.int64)
    channel = tl.arange(0, BLOCK_K)
    value = (tl.program_id(0) % blocks) * BLOCK_V + tl.arange(0, BLOCK_V)
    in_k = channel < K
    in_v = value < V
    within = head.to(tl.int64) * pool_head
    within += value[:, None] * pool_v + channel[None, :] * pool_k
    q += row * q_row + (head // group) * q_head
    k += row * k_row + (head // group) * k_head
    v += row * v_row + head * v_head
    g += row * g_row + head * g_head
    out += row * out_row + head * out_head
    if HAS_BETA:
        beta += row * beta_row + head * beta_head
    if HAS_GATE:
        gate += row * gate_row + head * gate_head
    if HAS_A:
        b_A = tl.load(A + head).to(tl.float32)
    b_dt_bias = 0.0
    if HAS_DT_BIAS:
        if WIDE_G:
            b_dt_bias = tl.load(
                dt_bias + head * dt_bias_head + channel, mask=in_k, other=0.0
            )
        else:
            b_dt_bias = tl.load(dt_bias + head * dt_bias_head)
        b_dt_bias = b_dt_bias.to(tl.float32)

    main = tl.load(slots + row).to(tl.int64)
    rows = tl.where(main >= 0, V, 0)
    mask = (value < rows)[:, None] & in_k[None, :]
    b_state = tl.load(pool + main * pool_slot + within, mask=mask, other=0.0)
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
                rows = tl.where(origin >= 0, V, 0)
                mask = (value < rows)[:, None] & in_k[None, :]
                b_state = tl.load(
                    pool + origin * pool_slot + within, mask=mask, other=0.0
                ).to(tl.float32)

        b_q = tl.load(q + draft * q_draft + channel, mask=in_k, other=0.0)
        b_q = b_q.to(tl.float32)
        b_k = tl.load(k + draft * k_draft + channel, mask=in_k, other=0.0)
        b_k = b_k.to(tl.float32)
        if USE_QK_L2NORM:
            b_q *= tl.rsqrt(tl.sum(b_q * b_q) + epsilon)
            b_k *= tl.rsqrt(tl.sum(b_k * b_k) + epsilon)
        b_v = tl.load(v + draft * v_draft + value, mask=in_v, other=0.0)
        b_v = b_v.to(tl.float32)
        plain = b_v
        if WIDE_G:
            b_g = tl.load(g + draft * g_draft + channel, mask=in_k, other=0.0)
            b_g = b_g.to(tl.float32)
            if HAS_A:
                b_g = softplus(b_g + b_dt_bias) * b_A
            b_state *= tl.exp(b_g)[None, :]
        else:
            b_g = tl.load(g + draft * g_draft).to(tl.float32)
            if HAS_A:
                time = softplus(b_g + b_dt_bias)
                b_g = time * b_A
                if SCALE_V:
                    b_v *= time
            b_state *= tl.exp(b_g)
        if HAS_BETA:
            b_beta = tl.load(beta + draft * beta_draft).to(tl.float32)
            if SIGMOID_BETA:
                b_beta = sigmoid(b_beta)
            b_v = b_beta * (b_v - tl.sum(b_state * b_k[None, :], axis=1))
        # Written as one instruction, so that no variant of this kernel rounds twice
        # where another rounds once: verify must give the bits of update.
        left = tl.broadcast_to(b_v[:, None], (BLOCK_V, BLOCK_K))
        right = tl.broadcast_to(b_k[None, :], (BLOCK_V, BLOCK_K))
        b_state = tl.fma(left, right, b_state)
        b_o = tl.sum(b_state * b_q[None, :], axis=1) * scale
        if HAS_SKIP:
            b_o += plain * tl.load(skip + head).to(tl.float32)
        if HAS_GATE:
            b_gate = tl.load(gate + draft * gate_draft + value, mask=in_v, other=0.0)
            b_gate = b_gate.to(tl.float32)
            b_o *= b_gate * sigmoid(b_gate)
        tl.store(
            out + draft * out_draft + value,
            b_o.to(out.dtype.element_ty),
            mask=in_v,
        )

        entry = draft_slots + row * draft_slots_row + draft * draft_slots_draft
        target = tl.load(entry).to(tl.int64)
        rows = tl.where(target >= 0, V, 0)
        mask = (value < rows)[:, None] & in_k[None, :]
        rounded = b_state.to(pool.dtype.element_ty)
        tl.store(pool + target * pool_slot + within, rounded, mask=mask)
        # What a replay would read back, so that both give the same bits.
        b_state = rounded.to(tl.float32)


def steps(operands: Operands, drafts: Drafts, out: torch.Tensor) -> None:
    """Run ``[N, L]`` tokens, each from its parent's state; one launch."""
    q, k, v, g = operands.q, operands.k, operands.v, operands.g
    beta, gate, dt_bias, parents = (
        operands.beta,
        operands.gate,
        operands.dt_bias,
        drafts.parents,
    )
    rows, count, heads, width = v.shape
    if rows == 0 or count == 0:
        return
    depth = k.shape[-1]
    block_v = min(_BLOCK_V, triton.next_power_of_2(width))
    _step_kernel[(heads * triton.cdiv(width, block_v), rows)](
        q,
        k,
        v,
        g,
        beta,
        operands.A,
        dt_bias,
        operands.skip,
        gate,
        drafts.pool,
        drafts.slots,
        drafts.draft_slots,
        parents,
        out,
        operands.scale,
        EPSILON,
        count,
        heads,
        heads // k.shape[2],
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        *g.stride()[:3],
        *((0, 0, 0) if beta is None else beta.stride()),
        *((0, 0, 0) if gate is None else gate.stride()[:3]),
        0 if dt_bias is None else dt_bias.stride(0),
        *drafts.pool.stride(),
        *drafts.draft_slots.stride(),
        *((0, 0) if parents is None else parents.stride()),
        *out.stride()[:3],
        K=depth,
        V=width,
        BLOCK_K=triton.next_power_of_2(depth),
        BLOCK_V=block_v,
        HAS_BETA=beta is not None,
        SIGMOID_BETA=operands.sigmoid_beta,
        HAS_A=operands.A is not None,
        HAS_DT_BIAS=dt_bias is not None,
        SCALE_V=operands.scale_v,
        WIDE_G=operands.wide_g,
        HAS_SKIP=operands.skip is not None,
        HAS_GATE=gate is not None,
        HAS_PARENTS=parents is not None,
        USE_QK_L2NORM=operands.use_qk_l2norm,
        num_warps=_WARPS,
    )
