# SPDX-License-Identifier: Apache-2.0
"""Triton Kimi delta attention.

Decode runs on the kernel of the shared recurrence. Prefill differs from the gated
delta rule in how pairs of tokens interact: their decay differs per key channel, so
``sum_k a[i] b[j] exp(G[i] - G[j])`` is no product of a matrix and a scalar mask.
`_pairs_kernel` splits the exponent at the first token of 16 rows; both halves are
then at most 0 for all earlier columns, so nothing overflows and the matrix units
apply. The 16 columns of the rows' own block are summed one by one.
"""
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"
# mypy: disable-error-code="untyped-decorator,import-untyped"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hybrid_kernels._common import chunk_kernels, linear_step
from hybrid_kernels._common import linear_chunk as chunk
from hybrid_kernels._common.linear import EPSILON
from hybrid_kernels._common.varlen import CHUNK

_PART = 16


@triton.jit
def _prepare_kernel(
    q,
    k,
    g,
    cu_seqlens,
    offsets,
    unit_q,
    unit_k,
    totals,
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
    g_token,
    g_head,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SIZE: tl.constexpr,
    NORMALISE: tl.constexpr,
):
    """Scaled queries and keys per value head, and running sums of log decays."""
    head = tl.program_id(1)
    first, length = chunk_kernels.locate(
        tl.program_id(0), cu_seqlens, offsets, sequences, search_steps, SIZE
    )
    if length > 0:
        position = tl.arange(0, SIZE)
        channel = tl.arange(0, BLOCK_K)
        mask = (position < length)[:, None] & (channel < K)[None, :]
        token = (first + position)[:, None]
        source = q + token * q_token + (head // group) * q_head + channel[None, :]
        query = tl.load(source, mask=mask, other=0.0).to(tl.float32)
        source = k + token * k_token + (head // group) * k_head + channel[None, :]
        key = tl.load(source, mask=mask, other=0.0).to(tl.float32)
        if NORMALISE:
            query *= tl.rsqrt(tl.sum(query * query, axis=1) + epsilon)[:, None]
            key *= tl.rsqrt(tl.sum(key * key, axis=1) + epsilon)[:, None]
        source = g + token * g_token + head * g_head + channel[None, :]
        decay = tl.load(source, mask=mask, other=0.0).to(tl.float32)
        place = (token * heads + head) * K + channel[None, :]
        element = unit_q.dtype.element_ty
        tl.store(unit_q + place, (query * scale).to(element), mask=mask)
        tl.store(unit_k + place, key.to(element), mask=mask)
        tl.store(totals + place, tl.cumsum(decay, 0), mask=mask)


@triton.jit
def _pairs_kernel(
    unit_q,
    unit_k,
    totals,
    beta,
    cu_seqlens,
    offsets,
    lower,
    weight,
    sequences,
    search_steps,
    heads,
    beta_token,
    beta_head,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SIZE: tl.constexpr,
    PART: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """16 rows of both ``[64, 64]`` interaction matrices of one chunk."""
    parts: tl.constexpr = SIZE // PART
    head = tl.program_id(1)
    part = tl.program_id(0) % parts
    first, length = chunk_kernels.locate(
        tl.program_id(0) // parts, cu_seqlens, offsets, sequences, search_steps, SIZE
    )
    start = part * PART
    if start < length:
        base = (first * heads + head) * K
        stride = heads * K
        channel = tl.arange(0, BLOCK_K)
        in_k = channel < K
        row = start + tl.arange(0, PART)
        column = tl.arange(0, SIZE)
        rows = base + row[:, None] * stride + channel[None, :]
        mask = (row < length)[:, None] & in_k[None, :]
        query = tl.load(unit_q + rows, mask=mask, other=0.0).to(tl.float32)
        key = tl.load(unit_k + rows, mask=mask, other=0.0).to(tl.float32)
        total = tl.load(totals + rows, mask=mask, other=0.0)

        split = tl.load(totals + base + start * stride + channel, mask=in_k, other=0.0)
        columns = base + column[None, :] * stride + channel[:, None]
        mask = in_k[:, None] & (column < start)[None, :]
        right = tl.load(unit_k + columns, mask=mask, other=0.0)
        decay = tl.load(totals + columns, mask=mask, other=0.0)
        decay = tl.where(mask, split[:, None] - decay, 0.0)
        element = unit_k.dtype.element_ty
        right = (right.to(tl.float32) * tl.exp(decay)).to(element)
        grow = tl.exp(tl.minimum(total - split[None, :], 0.0))
        keys = tl.dot((key * grow).to(element), right, input_precision=PRECISION)
        queries = tl.dot((query * grow).to(element), right, input_precision=PRECISION)
        for index in range(PART):
            # Beyond the chunk may lie another sequence, or nothing.
            known = channel < tl.where(start + index < length, K, 0)
            place = base + (start + index) * stride + channel
            other = tl.load(unit_k + place, mask=known, other=0.0).to(tl.float32)
            sums = tl.load(totals + place, mask=known, other=0.0)
            # Rows before the column are masked below; keep their exponents small.
            near = tl.exp(tl.minimum(total - sums[None, :], 0.0)) * other[None, :]
            at = column[None, :] == start + index
            keys += tl.where(at, tl.sum(key * near, axis=1)[:, None], 0.0)
            queries += tl.where(at, tl.sum(query * near, axis=1)[:, None], 0.0)

        token = first + row
        rate = tl.load(
            beta + token * beta_token + head * beta_head, mask=row < length, other=0.0
        ).to(tl.float32)
        place = (token[:, None] * heads + head) * SIZE + column[None, :]
        mask = (row < length)[:, None] & (column < SIZE)[None, :]
        keys = tl.where(row[:, None] > column[None, :], keys * rate[:, None], 0.0)
        queries = tl.where(row[:, None] >= column[None, :], queries, 0.0)
        tl.store(lower + place, keys, mask=mask)
        tl.store(weight + place, queries.to(weight.dtype.element_ty), mask=mask)


@triton.jit
def _correct_kernel(
    unit_k,
    v,
    totals,
    beta,
    lower,
    cu_seqlens,
    offsets,
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
    PRECISION: tl.constexpr,
    INVERSE: tl.constexpr,
):
    """Solve the chunk's system: erasing keys ``W`` and corrected values ``U``."""
    head = tl.program_id(1)
    first, length = chunk_kernels.locate(
        tl.program_id(0), cu_seqlens, offsets, sequences, search_steps, SIZE
    )
    if length > 0:
        position = tl.arange(0, SIZE)
        inside = position < length
        token = first + position
        line = token[:, None] * heads + head
        tile = tl.load(
            lower + line * SIZE + position[None, :], mask=inside[:, None], other=0.0
        )
        element = unit_k.dtype.element_ty
        solved = chunk_kernels.invert(tile, SIZE, INVERSE).to(element)
        rate = tl.load(
            beta + token * beta_token + head * beta_head, mask=inside, other=0.0
        ).to(tl.float32)
        for start in tl.static_range(0, K, BLOCK_K):
            channel = start + tl.arange(0, BLOCK_K)
            mask = inside[:, None] & (channel < K)[None, :]
            place = line * K + channel[None, :]
            key = tl.load(unit_k + place, mask=mask, other=0.0).to(tl.float32)
            key *= tl.exp(tl.load(totals + place, mask=mask, other=0.0))
            key = (key * rate[:, None]).to(element)
            result = tl.dot(solved, key, input_precision=PRECISION)
            tl.store(w + place, result.to(element), mask=mask)
        for start in tl.static_range(0, V, BLOCK_V):
            column = start + tl.arange(0, BLOCK_V)
            mask = inside[:, None] & (column < V)[None, :]
            source = v + token[:, None] * v_token + head * v_head + column[None, :]
            value = tl.load(source, mask=mask, other=0.0).to(tl.float32)
            value = (value * rate[:, None]).to(element)
            result = tl.dot(solved, value, input_precision=PRECISION)
            tl.store(u + line * V + column[None, :], result.to(element), mask=mask)


@triton.jit
def _output_kernel(
    unit_q,
    totals,
    weight,
    u,
    states,
    cu_seqlens,
    offsets,
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
    blocks: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    head = (tl.program_id(0) // blocks).to(tl.int64)
    number = tl.program_id(1)
    first, length = chunk_kernels.locate(
        number, cu_seqlens, offsets, sequences, search_steps, SIZE
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
            place = line * K + channel[None, :]
            query = tl.load(unit_q + place, mask=mask, other=0.0).to(tl.float32)
            query *= tl.exp(tl.load(totals + place, mask=mask, other=0.0))
            mask = in_k[:, None] & in_v[None, :]
            state = tl.load(starts + channel[:, None] * V, mask=mask, other=0.0)
            query = query.to(state.dtype)
            result += tl.dot(query, state, input_precision=PRECISION)
        tile = tl.load(
            weight + line * SIZE + position[None, :], mask=inside[:, None], other=0.0
        )
        mask = inside[:, None] & in_v[None, :]
        value = tl.load(u + line * V + column[None, :], mask=mask, other=0.0)
        result += tl.dot(tile, value, input_precision=PRECISION)
        tl.store(
            out + token[:, None] * out_token + head * out_head + column[None, :],
            result.to(out.dtype.element_ty),
            mask=mask,
        )


def prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    cu_seqlens: torch.Tensor,
    pool: torch.Tensor,
    slots: torch.Tensor,
    has_initial: torch.Tensor | None,
    boundary_slots: torch.Tensor | None,
    round_boundaries: bool,
    scale: float,
    normalise: bool,
    out: torch.Tensor,
) -> None:
    """Five launches: prepare, pairs, correct, pass states, output."""
    if slots.numel() == 0:
        return
    batch = chunk.Batch(
        cu_seqlens, pool, slots, has_initial, boundary_slots, round_boundaries
    )
    offsets = chunk.chunk_offsets(cu_seqlens)
    unit_q, unit_k, totals = _prepare(q, k, v, g, batch, offsets, scale, normalise)
    lower, weight = _pairs(unit_q, unit_k, totals, beta, batch, offsets)
    w, u = _correct(unit_k, v, totals, beta, lower, batch, offsets)
    states = chunk.pass_states(unit_k, u, totals, None, w, batch, offsets)
    _outputs(unit_q, totals, weight, u, states, batch, offsets, out)


def steps(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    pool: torch.Tensor,
    slots: torch.Tensor,
    draft_slots: torch.Tensor,
    parents: torch.Tensor | None,
    scale: float,
    normalise: bool,
    out: torch.Tensor,
) -> None:
    """One or more tokens per sequence, each from its parent's state."""
    linear_step.launch(
        q,
        k,
        v,
        g,
        beta,
        pool,
        slots,
        draft_slots,
        parents,
        out,
        scale=scale,
        normalise=normalise,
        extras=linear_step.Extras(),
    )


def _search(batch: chunk.Batch) -> tuple[int, int]:
    return batch.sequences, batch.sequences.bit_length()


def _prepare(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    batch: chunk.Batch,
    offsets: torch.Tensor,
    scale: float,
    normalise: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens, heads, _ = v.shape
    depth = k.shape[-1]
    unit_q = torch.empty(tokens, heads, depth, dtype=k.dtype, device=k.device)
    unit_k = torch.empty_like(unit_q)
    totals = torch.empty_like(unit_q, dtype=torch.float32)
    grid = (chunk.most_chunks(tokens, batch.sequences), heads)
    _prepare_kernel[grid](
        q,
        k,
        g,
        batch.cu_seqlens,
        offsets,
        unit_q,
        unit_k,
        totals,
        scale,
        EPSILON,
        *_search(batch),
        heads,
        heads // k.shape[1],
        *q.stride()[:2],
        *k.stride()[:2],
        *g.stride()[:2],
        K=depth,
        BLOCK_K=max(16, triton.next_power_of_2(depth)),
        SIZE=CHUNK,
        NORMALISE=normalise,
        num_warps=8,
    )
    return unit_q, unit_k, totals


def _pairs(
    unit_q: torch.Tensor,
    unit_k: torch.Tensor,
    totals: torch.Tensor,
    beta: torch.Tensor,
    batch: chunk.Batch,
    offsets: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, heads, depth = unit_k.shape
    shape = (tokens, heads, CHUNK)
    lower = torch.empty(shape, dtype=torch.float32, device=unit_k.device)
    weight = torch.empty(shape, dtype=unit_k.dtype, device=unit_k.device)
    blocks = chunk.Blocks.of(unit_k, depth, chunk.CORRECT)
    parts = CHUNK // _PART
    grid = (chunk.most_chunks(tokens, batch.sequences) * parts, heads)
    _pairs_kernel[grid](
        unit_q,
        unit_k,
        totals,
        beta,
        batch.cu_seqlens,
        offsets,
        lower,
        weight,
        *_search(batch),
        heads,
        *beta.stride(),
        K=depth,
        BLOCK_K=blocks.k,
        SIZE=CHUNK,
        PART=_PART,
        PRECISION=blocks.precision,
        num_warps=4,
    )
    return lower, weight


def _correct(
    unit_k: torch.Tensor,
    v: torch.Tensor,
    totals: torch.Tensor,
    beta: torch.Tensor,
    lower: torch.Tensor,
    batch: chunk.Batch,
    offsets: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, heads, width = v.shape
    depth = unit_k.shape[-1]
    w = torch.empty_like(unit_k)
    u = torch.empty(v.shape, dtype=unit_k.dtype, device=v.device)
    blocks = chunk.Blocks.of(unit_k, width, chunk.CORRECT)
    _correct_kernel[(chunk.most_chunks(tokens, batch.sequences), heads)](
        unit_k,
        v,
        totals,
        beta,
        lower,
        batch.cu_seqlens,
        offsets,
        w,
        u,
        *_search(batch),
        heads,
        *v.stride()[:2],
        *beta.stride(),
        K=depth,
        V=width,
        BLOCK_K=min(64, blocks.k),
        BLOCK_V=blocks.v,
        SIZE=CHUNK,
        PRECISION=blocks.precision,
        INVERSE=blocks.inverse,
        num_warps=chunk.CORRECT.warps,
        num_stages=blocks.stages,
    )
    return w, u


def _outputs(
    unit_q: torch.Tensor,
    totals: torch.Tensor,
    weight: torch.Tensor,
    u: torch.Tensor,
    states: torch.Tensor,
    batch: chunk.Batch,
    offsets: torch.Tensor,
    out: torch.Tensor,
) -> None:
    tokens, heads, width = u.shape
    depth = unit_q.shape[-1]
    blocks = chunk.Blocks.of(unit_q, width, chunk.OUTPUT)
    grid = (
        triton.cdiv(width, blocks.v) * heads,
        chunk.most_chunks(tokens, batch.sequences),
    )
    _output_kernel[grid](
        unit_q,
        totals,
        weight,
        u,
        states,
        batch.cu_seqlens,
        offsets,
        out,
        *_search(batch),
        heads,
        *out.stride()[:2],
        K=depth,
        V=width,
        BLOCK_K=blocks.part,
        BLOCK_V=blocks.v,
        SIZE=CHUNK,
        PRECISION=blocks.precision,
        num_warps=chunk.OUTPUT.warps,
        num_stages=blocks.stages,
    )
