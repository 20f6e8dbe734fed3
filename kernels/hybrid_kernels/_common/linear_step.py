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
from hybrid_kernels._common.tables import Drafts, two_strides

# Fixed, whatever the batch: a row's arithmetic must not depend on other rows.
# Small tiles: a row's products stay within one warp and its sums need no shared
# memory; measured fastest from batch 1 to 512 on an H200.
_BLOCK_V = 4
_WARPS = 1
SEPARATE_PRODUCTS = {"enable_fp_fusion": False}
"""Launch option of every kernel whose states must have the bits of a decode step's.

Else the compiler joins a product and a sum to one instruction, which rounds once,
wherever that suits the code around them: not the same in every kernel."""


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
def _key(pointer, channel, in_k, epsilon, UNIT: tl.constexpr):
    """A query or key, float32; of norm 1 if `UNIT`."""
    vector = tl.load(pointer + channel, mask=in_k, other=0.0).to(tl.float32)
    if UNIT:
        vector *= tl.rsqrt(tl.sum(vector * vector) + epsilon)
    return vector


@triton.jit
def _decay(
    pointer, channel, in_k, b_A, b_dt_bias, HAS_A: tl.constexpr, WIDE_G: tl.constexpr
):
    """A token's decay, one number or one per key channel, and its time step."""
    if WIDE_G:
        b_g = tl.load(pointer + channel, mask=in_k, other=0.0).to(tl.float32)
    else:
        b_g = tl.load(pointer).to(tl.float32)
    time = b_g
    if HAS_A:
        time = softplus(b_g + b_dt_bias)
        b_g = time * b_A
    return tl.exp(b_g), time


@triton.jit
def shrink(b_state, b_decay, WIDE_G: tl.constexpr):
    """States after a token's decay."""
    if WIDE_G:
        b_state *= b_decay[None, :]
    else:
        b_state *= b_decay
    return b_state


@triton.jit
def grow(b_state, b_u, b_k):
    """States after a token's addition.

    Written as one instruction, so that no kernel rounds twice where another rounds
    once: verify and commit must give the bits of update.
    """
    left = tl.broadcast_to(b_u[:, None], b_state.shape)
    right = tl.broadcast_to(b_k[None, :], b_state.shape)
    return tl.fma(left, right, b_state)


@triton.jit
def ancestor(parents, node, hops, parents_draft):
    """The draft `hops` before a draft on its path; negative beyond the first.

    A parent comes before its children. Taking that for granted would make rows of
    padding, which may hold anything, walk for ever.
    """
    for _ in range(hops):
        at = tl.maximum(node, 0)
        node = tl.minimum(tl.load(parents + at * parents_draft), at - 1)
    return node


@triton.jit
def depth_of(parents, node, parents_draft):
    """How many drafts the path to a draft has, itself included."""
    depth = 0
    while node >= 0:
        depth += 1
        node = ancestor(parents, node, 1, parents_draft)
    return depth


@triton.jit
def _replay(
    b_state,
    k,
    g,
    recorded,
    parents,
    parent,
    channel,
    value,
    in_k,
    in_v,
    b_A,
    b_dt_bias,
    epsilon,
    k_draft,
    g_draft,
    record_draft,
    parents_draft,
    ELEMENT: tl.constexpr,
    HAS_A: tl.constexpr,
    WIDE_G: tl.constexpr,
    USE_QK_L2NORM: tl.constexpr,
):
    """The state after a draft, from the main state and what its path added."""
    depth = depth_of(parents, parent, parents_draft)
    for number in range(depth):
        node = ancestor(parents, parent, depth - 1 - number, parents_draft)
        b_k = _key(k + node * k_draft, channel, in_k, epsilon, USE_QK_L2NORM)
        b_decay, _ = _decay(
            g + node * g_draft, channel, in_k, b_A, b_dt_bias, HAS_A, WIDE_G
        )
        b_u = tl.load(recorded + node * record_draft + value, mask=in_v, other=0.0)
        b_state = grow(shrink(b_state, b_decay, WIDE_G), b_u, b_k)
        b_state = b_state.to(ELEMENT).to(tl.float32)
    return b_state


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
    cu_seqlens,
    record,
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
    record_row,
    record_draft,
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
    HAS_SLOTS: tl.constexpr,
    HAS_PARENTS: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
    HAS_RECORD: tl.constexpr,
    USE_QK_L2NORM: tl.constexpr,
):
    """The drafts of one row; `entry` is its first token where drafts are packed.

    The state after each draft goes to a slot, or what it takes to make it goes to the
    record: keys, additions and decays, in this order.
    """
    blocks: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    head = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    row = tl.program_id(1).to(tl.int64)
    entry = row
    main = tl.load(slots + row).to(tl.int64)
    if HAS_LENGTHS:
        entry = tl.load(cu_seqlens + row).to(tl.int64)
        drafts = (tl.load(cu_seqlens + row + 1).to(tl.int64) - entry).to(tl.int32)
        drafts = tl.where(main >= 0, drafts, 0)
    channel = tl.arange(0, BLOCK_K)
    value = block * BLOCK_V + tl.arange(0, BLOCK_V)
    in_k = channel < K
    in_v = value < V
    within = head.to(tl.int64) * pool_head
    within += value[:, None] * pool_v + channel[None, :] * pool_k
    q += entry * q_row + (head // group) * q_head
    k += entry * k_row + (head // group) * k_head
    v += entry * v_row + head * v_head
    g += entry * g_row + head * g_head
    out += entry * out_row + head * out_head
    if HAS_BETA:
        beta += entry * beta_row + head * beta_head
    if HAS_GATE:
        gate += entry * gate_row + head * gate_head
    b_A = 0.0
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

    rows = tl.where(main >= 0, V, 0)
    mask = (value < rows)[:, None] & in_k[None, :]
    b_state = tl.load(pool + main * pool_slot + within, mask=mask, other=0.0)
    b_state = b_state.to(tl.float32)
    b_main = b_state
    if HAS_PARENTS:
        parents += row * parents_row
    if HAS_RECORD:
        record += row * record_row
        o_u = (heads // group) * K + head * V
    for draft in range(drafts):
        if HAS_PARENTS:
            # Rows of padding may hold anything.
            parent = tl.minimum(tl.load(parents + draft * parents_draft), draft - 1)
            if (parent != draft - 1) & (draft > 0):
                # Other threads of this program may have written what is read.
                tl.debug_barrier()
                if HAS_RECORD:
                    b_state = _replay(
                        b_main,
                        k,
                        g,
                        record + o_u,
                        parents,
                        parent,
                        channel,
                        value,
                        in_k,
                        in_v,
                        b_A,
                        b_dt_bias,
                        epsilon,
                        k_draft,
                        g_draft,
                        record_draft,
                        parents_draft,
                        pool.dtype.element_ty,
                        HAS_A,
                        WIDE_G,
                        USE_QK_L2NORM,
                    )
                else:
                    origin = tl.load(
                        draft_slots
                        + row * draft_slots_row
                        + tl.maximum(parent, 0) * draft_slots_draft
                    )
                    origin = tl.where(parent < 0, main, origin.to(tl.int64))
                    rows = tl.where(origin >= 0, V, 0)
                    mask = (value < rows)[:, None] & in_k[None, :]
                    b_state = tl.load(
                        pool + origin * pool_slot + within, mask=mask, other=0.0
                    ).to(tl.float32)

        b_q = _key(q + draft * q_draft, channel, in_k, epsilon, USE_QK_L2NORM)
        b_k = _key(k + draft * k_draft, channel, in_k, epsilon, USE_QK_L2NORM)
        b_v = tl.load(v + draft * v_draft + value, mask=in_v, other=0.0)
        b_v = b_v.to(tl.float32)
        plain = b_v
        b_decay, time = _decay(
            g + draft * g_draft, channel, in_k, b_A, b_dt_bias, HAS_A, WIDE_G
        )
        if SCALE_V:
            b_v *= time
        b_state = shrink(b_state, b_decay, WIDE_G)
        if HAS_BETA:
            b_beta = tl.load(beta + draft * beta_draft).to(tl.float32)
            if SIGMOID_BETA:
                b_beta = sigmoid(b_beta)
            b_v = b_beta * (b_v - tl.sum(b_state * b_k[None, :], axis=1))
        b_state = grow(b_state, b_v, b_k)
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

        rounded = b_state.to(pool.dtype.element_ty)
        if HAS_SLOTS:
            target = draft_slots + row * draft_slots_row + draft * draft_slots_draft
            target = tl.load(target).to(tl.int64)
            rows = tl.where(target >= 0, V, 0)
            mask = (value < rows)[:, None] & in_k[None, :]
            tl.store(pool + target * pool_slot + within, rounded, mask=mask)
        if HAS_RECORD:
            recorded = record + draft * record_draft
            tl.store(recorded + o_u + value, b_v, mask=in_v)
            # What all programs of a head have alike, one of them writes.
            if block == 0:
                if head % group == 0:
                    tl.store(recorded + head // group * K + channel, b_k, mask=in_k)
                recorded += heads // group * K + heads * V
                if WIDE_G:
                    tl.store(recorded + head * K + channel, b_decay, mask=in_k)
                else:
                    tl.store(recorded + head, b_decay)
        # What a replay would read back, so that both give the same bits.
        b_state = rounded.to(tl.float32)


def steps(operands: Operands, drafts: Drafts, out: torch.Tensor) -> None:
    """Run drafts, each from its parent's state; one launch."""
    q, k, v, g = operands.q, operands.k, operands.v, operands.g
    beta, gate, dt_bias = operands.beta, operands.gate, operands.dt_bias
    pool, heads, width = drafts.pool, *v.shape[-2:]
    if drafts.count == 0 or v.shape[:-2].numel() == 0:
        return
    depth = k.shape[-1]
    block_v = min(_BLOCK_V, triton.next_power_of_2(width))
    _step_kernel[(heads * triton.cdiv(width, block_v), drafts.count)](
        q,
        k,
        v,
        g,
        beta,
        operands.A,
        dt_bias,
        operands.skip,
        gate,
        pool,
        drafts.slots,
        drafts.draft_slots,
        drafts.parents,
        drafts.cu_seqlens,
        drafts.record,
        out,
        operands.scale,
        EPSILON,
        v.shape[1],
        heads,
        heads // k.shape[-2],
        *drafts.strides(q),
        *drafts.strides(k),
        *drafts.strides(v),
        *drafts.strides(g),
        *drafts.strides(beta),
        *drafts.strides(gate),
        0 if dt_bias is None else dt_bias.stride(0),
        *pool.stride(),
        *two_strides(drafts.draft_slots),
        *two_strides(drafts.parents),
        *two_strides(drafts.record),
        *drafts.strides(out),
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
        HAS_SLOTS=drafts.draft_slots is not None,
        HAS_PARENTS=drafts.parents is not None,
        HAS_LENGTHS=drafts.cu_seqlens is not None,
        HAS_RECORD=drafts.record is not None,
        USE_QK_L2NORM=operands.use_qk_l2norm,
        num_warps=_WARPS,
        **SEPARATE_PRODUCTS,
    )
