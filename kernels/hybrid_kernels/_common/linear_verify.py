# SPDX-License-Identifier: Apache-2.0
"""Triton kernel of the shared recurrence for chains of drafts, in matrix form.

With the state ``S`` before a chain, the running product ``G_i`` of its decays and
``D_ij = G_i / G_j``, the delta rule's additions and the outputs are

    u_i = beta_i * (v_i - G_i S k_i - sum over j < i of D_ij (k_i . k_j) u_j)
    o_i = scale * (G_i S q_i + sum over j <= i of D_ij (q_i . k_j) u_j)

so that all tokens take from the state in two matrix products, and none waits for the
state after another.  What the tokens have to do with each other is put into one matrix
before the state is there, so that one small product is left behind those two.
`linear_step` runs the tokens one by one: it has the bits of `update`, which these sums
have not, and takes trees.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"
# mypy: disable-error-code="untyped-decorator,import-untyped"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hybrid_kernels._common import linear_step
from hybrid_kernels._common.linear import EPSILON, Operands
from hybrid_kernels._common.linear_step import sigmoid, softplus
from hybrid_kernels._common.tables import Drafts, two_strides
from hybrid_kernels._common.triangular import invert_blocks

MOST = 8
"""Tokens of a row at most: with their queries, a side of a matrix instruction."""
# Fixed, whatever the batch: a row's arithmetic must not depend on other rows.
_BLOCK_V = 32
_WARPS = 1
_STAGES = 2
_AT_ONCE = 512
"""Programs up to which a head's values are shared out among several, although each then
computes anew what they have in common: about four for each multiprocessor of an H200.
Sharing was faster there with one row of 32 heads and slower with 32 rows; the numbers
between were not measured.  Which program has a value changes no bits."""
_PRECISION = "tf32x3"
"""Of products of float32; others are exact before they are summed."""


@triton.jit
def _product(b_state, b_tokens, PRECISION: tl.constexpr):
    """``[V, L]``: the state times each token, as precise as sums in float32.

    A state of float32 is the sum of three numbers of bfloat16, whose products with
    tokens of that type are exact.
    """
    if b_state.dtype == b_tokens.dtype:
        made = tl.dot(b_state, tl.trans(b_tokens), input_precision=PRECISION)
    elif b_tokens.dtype == tl.bfloat16:
        wide = b_state.to(tl.float32)
        turned = tl.trans(b_tokens)
        high = wide.to(tl.bfloat16)
        rest = wide - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        made = tl.dot(low, turned)
        made = tl.dot(middle, turned, made)
        made = tl.dot(high, turned, made)
    else:
        turned = tl.trans(b_tokens.to(tl.float32))
        made = tl.dot(b_state.to(tl.float32), turned, input_precision=PRECISION)
    return made


@triton.jit
def _chain_kernel(
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
    cu_seqlens,
    record,
    out,
    scale,
    epsilon,
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
    gate_token,
    gate_head,
    dt_bias_head,
    pool_slot,
    pool_head,
    pool_v,
    pool_k,
    record_row,
    record_draft,
    out_token,
    out_head,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_L: tl.constexpr,
    PARTS: tl.constexpr,
    STAGES: tl.constexpr,
    LEVELS: tl.constexpr,
    HAS_BETA: tl.constexpr,
    SIGMOID_BETA: tl.constexpr,
    HAS_A: tl.constexpr,
    HAS_DT_BIAS: tl.constexpr,
    SCALE_V: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    HAS_GATE: tl.constexpr,
    USE_QK_L2NORM: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The tokens of one row; what is recorded is as in `linear_step`."""
    head = tl.program_id(0) // PARTS
    part = tl.program_id(0) % PARTS
    row = tl.program_id(1).to(tl.int64)
    main = tl.load(slots + row).to(tl.int64)
    if main < 0:
        return
    entry = tl.load(cu_seqlens + row).to(tl.int64)
    drafts = (tl.load(cu_seqlens + row + 1).to(tl.int64) - entry).to(tl.int32)
    # Keys of the tokens, then their queries: one product serves both.
    place = tl.arange(0, 2 * BLOCK_L)
    token = place % BLOCK_L
    at = entry + token
    is_key = place < BLOCK_L
    channel = tl.arange(0, BLOCK_K)
    live = token < drafts
    in_k = channel < K

    p_k = k + (head // group) * k_head
    p_k += at[:, None] * k_token + channel[None, :]
    p_q = q + (head // group) * q_head
    p_q += at[:, None] * q_token + channel[None, :]
    of_key = (live & is_key)[:, None] & in_k[None, :]
    of_query = (live & (place >= BLOCK_L))[:, None] & in_k[None, :]
    both = tl.load(p_k, mask=of_key, other=0.0)
    both += tl.load(p_q, mask=of_query, other=0.0)
    wide = both.to(tl.float32)
    # They are multiplied as they are, and by this afterwards.
    unit = tl.where(is_key, 1.0, scale)
    if USE_QK_L2NORM:
        unit *= tl.rsqrt(tl.sum(wide * wide, axis=1) + epsilon)

    p_g = g + at * g_token + head * g_head
    b_g = tl.load(p_g, mask=live, other=0.0).to(tl.float32)
    time = b_g
    if HAS_A:
        if HAS_DT_BIAS:
            b_g += tl.load(dt_bias + head * dt_bias_head).to(tl.float32)
        time = softplus(b_g)
        b_g = tl.where(live, time * tl.load(A + head).to(tl.float32), 0.0)
    of_keys = is_key[None, :]
    upto = of_keys & (token[None, :] <= token[:, None])
    total = tl.sum(tl.where(upto, b_g[None, :], 0.0), axis=1)
    alike = tl.dot(both, tl.trans(both), input_precision=PRECISION)
    alike *= unit[:, None] * unit[None, :]
    alike *= tl.exp(tl.where(upto, total[:, None] - total[None, :], 0.0))
    # What an addition puts into each output, and what it is itself: a column each.
    into = tl.where(upto & (place >= BLOCK_L)[:, None], alike, 0.0)
    into = tl.trans(into)
    if HAS_BETA:
        p_beta = beta + at * beta_token + head * beta_head
        b_beta = tl.load(p_beta, mask=live & is_key, other=0.0).to(tl.float32)
        if SIGMOID_BETA:
            b_beta = tl.where(is_key, sigmoid(b_beta), 0.0)
        before = of_keys & (token[None, :] < token[:, None])
        below = tl.where(before, alike * b_beta[:, None], 0.0)
        solved = invert_blocks(below, 2 * BLOCK_L, LEVELS, PRECISION)
        weight = tl.trans(solved) * b_beta[:, None]
        into = weight + tl.dot(weight, into, input_precision=PRECISION)

    if HAS_SKIP:
        b_skip = tl.load(skip + head).to(tl.float32)
    recorded = record + row * record_row + token * record_draft
    # What all programs of a head have alike, one of them writes.
    if part == 0:
        if head % group == 0:
            p_key = recorded[:, None] + head // group * K + channel[None, :]
            tl.store(p_key, wide * unit[:, None], mask=of_key)
        o_decay = heads // group * K + heads * V + head
        tl.store(recorded + o_decay, tl.exp(b_g), mask=live & is_key)
    recorded += (heads // group) * K + head * V

    pool += main * pool_slot + head.to(tl.int64) * pool_head
    from_state = unit * tl.exp(total)
    # The programs of a head share out its values; each takes one block after another.
    first = part * BLOCK_V
    for start in tl.range(first, V, PARTS * BLOCK_V, num_stages=STAGES):
        value = start + tl.arange(0, BLOCK_V)
        in_v = value < V
        p_state = pool + value[:, None] * pool_v + channel[None, :] * pool_k
        b_state = tl.load(p_state, mask=in_v[:, None] & in_k[None, :], other=0.0)
        of_value = in_v[:, None] & (live & is_key)[None, :]
        p_v = v + at[None, :] * v_token + head * v_head + value[:, None]
        b_v = tl.load(p_v, mask=of_value, other=0.0).to(tl.float32)
        if SCALE_V:
            b_v *= time[None, :]
        b_o = _product(b_state, both, PRECISION) * from_state[None, :]
        left = b_v
        if HAS_BETA:
            left -= b_o
        made = tl.dot(left, into, input_precision=PRECISION)
        b_u = b_v
        if HAS_BETA:
            b_u = made
        tl.store(recorded[None, :] + value[:, None], b_u, mask=of_value)

        b_o += made
        of_output = in_v[:, None] & (live & (place >= BLOCK_L))[None, :]
        if HAS_SKIP:
            b_o += tl.load(p_v, mask=of_output, other=0.0).to(tl.float32) * b_skip
        if HAS_GATE:
            p_gate = gate + at[None, :] * gate_token + head * gate_head + value[:, None]
            b_gate = tl.load(p_gate, mask=of_output, other=0.0).to(tl.float32)
            b_o *= b_gate * sigmoid(b_gate)
        p_out = out + at[None, :] * out_token + head * out_head + value[:, None]
        tl.store(p_out, b_o.to(out.dtype.element_ty), mask=of_output)


def steps(operands: Operands, drafts: Drafts, out: torch.Tensor) -> None:
    """Run drafts, each from its parent's state; one launch."""
    if _are_short_chains(operands, drafts):
        _chains(operands, drafts, out)
    else:
        linear_step.steps(operands, drafts, out)


def _are_short_chains(operands: Operands, drafts: Drafts) -> bool:
    """Whether a record is kept of few drafts in a chain, whose heads decay as one.

    Packed ones: what follows a row's drafts otherwise may be no number.
    """
    if drafts.record is None or drafts.parents is not None or operands.wide_g:
        return False
    if drafts.cu_seqlens is None:
        return False
    return 1 < drafts.record.shape[1] <= MOST


def _parts(programs: int, blocks: int) -> int:
    """Into how many programs each of `programs` is divided, of `blocks` to do."""
    parts = 1
    while parts < blocks and 2 * parts * programs <= _AT_ONCE:
        parts *= 2
    return parts


def _chains(operands: Operands, drafts: Drafts, out: torch.Tensor) -> None:
    q, k, v, g = operands.q, operands.k, operands.v, operands.g
    beta, gate, dt_bias = operands.beta, operands.gate, operands.dt_bias
    pool, heads, width = drafts.pool, *v.shape[-2:]
    if drafts.count == 0 or v.shape[:-2].numel() == 0:
        return
    assert drafts.record is not None
    depth = k.shape[-1]
    block_v = max(16, min(_BLOCK_V, triton.next_power_of_2(width)))
    parts = _parts(heads * drafts.count, triton.cdiv(width, block_v))
    _chain_kernel[(heads * parts, drafts.count)](
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
        drafts.cu_seqlens,
        drafts.record,
        out,
        operands.scale,
        EPSILON,
        heads,
        heads // k.shape[-2],
        *two_strides(q),
        *two_strides(k),
        *two_strides(v),
        *two_strides(g),
        *two_strides(beta),
        *two_strides(gate),
        0 if dt_bias is None else dt_bias.stride(0),
        *pool.stride(),
        *two_strides(drafts.record),
        *two_strides(out),
        K=depth,
        V=width,
        BLOCK_K=max(16, triton.next_power_of_2(depth)),
        BLOCK_V=block_v,
        BLOCK_L=MOST,
        PARTS=parts,
        STAGES=_STAGES,
        LEVELS=(drafts.record.shape[1] - 1).bit_length(),
        HAS_BETA=beta is not None,
        SIGMOID_BETA=operands.sigmoid_beta,
        HAS_A=operands.A is not None,
        HAS_DT_BIAS=dt_bias is not None,
        SCALE_V=operands.scale_v,
        HAS_SKIP=operands.skip is not None,
        HAS_GATE=gate is not None,
        USE_QK_L2NORM=operands.use_qk_l2norm,
        PRECISION=_PRECISION,
        num_warps=_WARPS,
    )
