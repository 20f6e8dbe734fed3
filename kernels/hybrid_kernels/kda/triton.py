# SPDX-License-Identifier: Apache-2.0
"""Triton Kimi delta attention.

Decode runs on the kernel of the shared recurrence, as does the passing of states.
Prefill differs from the gated delta rule in how pairs of tokens interact:
`hybrid_kernels.kda.intra_kernels` explains.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"
# mypy: disable-error-code="untyped-decorator,import-untyped"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from hybrid_kernels._common import chunk_kernels
from hybrid_kernels._common import linear_chunk as chunk
from hybrid_kernels._common.linear import EPSILON, Operands
from hybrid_kernels._common.linear_step import steps
from hybrid_kernels._common.tables import CHUNK, Sequences
from hybrid_kernels.kda import intra_kernels as kernels

__all__ = ["prefill", "steps"]

DECAY = chunk.Tuning(columns=64, warps=4, stages=1, channels=128)
PAIRS = chunk.Tuning(columns=64, warps=1, stages=1, channels=64)
CORRECT = chunk.Tunings(
    narrow=chunk.Tuning(
        columns=128, warps=4, stages=1, channels=128, least=chunk.FEWEST
    ),
    wide=chunk.Tuning(columns=64, warps=4, stages=1, channels=64, least=chunk.FEWEST),
    widest=chunk.Tuning(columns=32, warps=4, stages=1, channels=64),
)
_LEVELS = 4
"""Pairs are computed for ``2**_LEVELS`` rows at a time."""


@triton.jit(do_not_specialize=chunk_kernels.COUNTS)
def _output_kernel(
    grown_q,
    weights,
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
    HAS_OFFSETS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Outputs of one chunk, from its start state and its own tokens."""
    blocks: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    head = (tl.program_id(0) // blocks).to(tl.int64)
    number = tl.program_id(1)
    first, length = chunk_kernels.locate(
        number, cu_seqlens, offsets, sequences, search_steps, SIZE, HAS_OFFSETS
    )
    if length > 0:
        position = tl.arange(0, SIZE)
        inside = position < length
        token = first + position
        o_row = token[:, None] * heads + head
        column = (tl.program_id(0) % blocks) * BLOCK_V + tl.arange(0, BLOCK_V)
        in_v = column < V
        p_state = (
            states + (number.to(tl.int64) * heads + head) * K * V + column[None, :]
        )
        b_o = tl.zeros((SIZE, BLOCK_V), tl.float32)
        for start in tl.static_range(0, K, BLOCK_K):
            channel = start + tl.arange(0, BLOCK_K)
            in_k = channel < K
            mask = inside[:, None] & in_k[None, :]
            b_q = tl.load(grown_q + o_row * K + channel[None, :], mask=mask, other=0.0)
            mask = in_k[:, None] & in_v[None, :]
            b_state = tl.load(p_state + channel[:, None] * V, mask=mask, other=0.0)
            b_o += tl.dot(b_q, b_state, input_precision=PRECISION)
        upto = position[:, None] >= position[None, :]
        tile = tl.load(
            weights + o_row * SIZE + position[None, :],
            mask=inside[:, None] & upto,
            other=0.0,
        )
        mask = inside[:, None] & in_v[None, :]
        b_v = tl.load(u + o_row * V + column[None, :], mask=mask, other=0.0)
        b_o += tl.dot(tile, b_v, input_precision=PRECISION)
        tl.store(
            out + token[:, None] * out_token + head * out_head + column[None, :],
            b_o.to(out.dtype.element_ty),
            mask=mask,
        )


@dataclass(frozen=True)
class _Decayed:
    """What `kernels.decay_kernel` writes, of the shape of keys but for two."""

    total: torch.Tensor
    """``[T, HV, K]``, float32: running sums of log decays within chunks."""
    q: torch.Tensor
    """Decayed since the chunk's start, as `k`."""
    k: torch.Tensor
    end_k: torch.Tensor
    """Decayed to the chunk's end."""
    ends: torch.Tensor
    """``[chunks, HV, K]``, float32: log decays of whole chunks."""
    sizes: torch.Tensor
    """``[2, HV, T]``, float32: factors of queries and keys if they are normalised."""


def prefill(operands: Operands, sequences: Sequences, out: torch.Tensor) -> None:
    """Decay, pairs, corrections, states, outputs: five launches."""
    if sequences.count == 0:
        return
    prepared, grown_q, weights = _solve(operands, sequences)
    states = chunk.pass_states(prepared, sequences)
    _outputs(grown_q, weights, prepared.v, states, sequences, out)


def _solve(
    operands: Operands, sequences: Sequences
) -> tuple[chunk.Prepared, torch.Tensor, torch.Tensor]:
    """Tokens for the passing of states, grown queries and weights of pairs."""
    decayed = _decay(operands, sequences)
    weights, lower = _pairs(operands, decayed, sequences)
    w, u = _correct(operands, decayed, lower, sequences)
    prepared = chunk.Prepared(decayed.end_k, u, w=w, ends=decayed.ends)
    return prepared, decayed.q, weights


def _decay(operands: Operands, sequences: Sequences) -> _Decayed:
    q, k, g = operands.q, operands.k, operands.g
    A, dt_bias = operands.A, operands.dt_bias
    tokens, heads, _ = operands.v.shape
    depth, chunks = k.shape[-1], chunk.most_chunks(tokens, sequences)
    grown_q, grown_k, end_k = (k.new_empty(tokens, heads, depth) for _ in range(3))
    total = torch.empty_like(end_k, dtype=torch.float32)
    ends = total.new_empty(chunks, heads, depth)
    sizes = total.new_empty((2, heads, tokens) if operands.use_qk_l2norm else 1)
    decayed = _Decayed(total, grown_q, grown_k, end_k, ends, sizes)
    # Heads first: they lie side by side in memory.
    kernels.decay_kernel[(heads, chunks)](
        q,
        k,
        g,
        A,
        dt_bias,
        sequences.cu_seqlens,
        sequences.offsets,
        total,
        grown_q,
        grown_k,
        end_k,
        ends,
        sizes,
        operands.scale,
        EPSILON,
        *chunk.search(sequences),
        tokens,
        heads,
        heads // k.shape[1],
        *q.stride()[:2],
        *k.stride()[:2],
        *g.stride()[:2],
        0 if dt_bias is None else dt_bias.stride(0),
        K=depth,
        CHANNELS=chunk.Blocks.of(k, depth, DECAY).part,
        SIZE=CHUNK,
        USE_QK_L2NORM=operands.use_qk_l2norm,
        HAS_A=A is not None,
        HAS_DT_BIAS=dt_bias is not None,
        HAS_OFFSETS=sequences.offsets is not None,
        num_warps=DECAY.warps,
        num_stages=DECAY.stages,
    )
    return decayed


def _pairs(
    operands: Operands, decayed: _Decayed, sequences: Sequences
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries by keys, and the delta rule's system, ``[T, HV, CHUNK]``."""
    q, k, beta = operands.q, operands.k, operands.beta
    assert beta is not None
    tokens, heads, _ = operands.v.shape
    weights = k.new_empty(tokens, heads, CHUNK)
    lower = torch.empty_like(weights, dtype=torch.float32)
    blocks = chunk.Blocks.of(k, k.shape[-1], PAIRS)
    programs = heads * (CHUNK >> _LEVELS)
    kernels.pair_kernel[(programs, chunk.most_chunks(tokens, sequences))](
        q,
        k,
        beta,
        sequences.cu_seqlens,
        sequences.offsets,
        decayed.total,
        decayed.sizes,
        weights,
        lower,
        operands.scale,
        *chunk.search(sequences),
        tokens,
        heads,
        heads // k.shape[1],
        *q.stride()[:2],
        *k.stride()[:2],
        *beta.stride(),
        K=k.shape[-1],
        CHANNELS=blocks.part,
        BLOCK=1 << _LEVELS,
        LEVELS=_LEVELS,
        SIZE=CHUNK,
        HAS_OFFSETS=sequences.offsets is not None,
        USE_QK_L2NORM=operands.use_qk_l2norm,
        SIGMOID=operands.sigmoid_beta,
        PRECISION=blocks.precision,
        INVERSE=blocks.inverse,
        num_warps=PAIRS.warps,
        num_stages=PAIRS.stages,
    )
    return weights, lower


def _correct(
    operands: Operands, decayed: _Decayed, lower: torch.Tensor, sequences: Sequences
) -> tuple[torch.Tensor, torch.Tensor]:
    """Corrected values, but for what a start state takes, and its weights."""
    v, beta = operands.v, operands.beta
    assert beta is not None
    tokens, heads, width = v.shape
    w, u = torch.empty_like(decayed.k), decayed.k.new_empty(v.shape)
    tuning = CORRECT.of(decayed.k)
    blocks = chunk.Blocks.of(decayed.k, width, tuning)
    kernels.correct_kernel[(heads, chunk.most_chunks(tokens, sequences))](
        v,
        beta,
        sequences.cu_seqlens,
        sequences.offsets,
        lower,
        decayed.k,
        w,
        u,
        *chunk.search(sequences),
        heads,
        *v.stride()[:2],
        *beta.stride(),
        K=w.shape[-1],
        V=width,
        BLOCK_K=blocks.part,
        BLOCK_V=blocks.v,
        SIZE=CHUNK,
        HAS_OFFSETS=sequences.offsets is not None,
        LEVELS=_LEVELS,
        SIGMOID=operands.sigmoid_beta,
        PRECISION=blocks.precision,
        INVERSE=blocks.inverse,
        num_warps=tuning.warps,
        num_stages=tuning.stages,
    )
    return w, u


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
        sequences.offsets,
        out,
        *chunk.search(sequences),
        heads,
        *out.stride()[:2],
        K=grown_q.shape[-1],
        V=width,
        BLOCK_K=blocks.part,
        BLOCK_V=blocks.v,
        SIZE=CHUNK,
        HAS_OFFSETS=sequences.offsets is not None,
        PRECISION=blocks.precision,
        num_warps=tuning.warps,
        num_stages=tuning.stages,
    )
