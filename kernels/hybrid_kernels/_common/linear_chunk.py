# SPDX-License-Identifier: Apache-2.0
"""Launches of the chunked prefill; `hybrid_kernels._common.chunk_kernels` explains."""
# mypy: disable-error-code="no-untyped-call,import-untyped"

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton

from hybrid_kernels._common import chunk_kernels as kernels
from hybrid_kernels._common.linear import EPSILON, Operands
from hybrid_kernels._common.tables import CHUNK, Sequences


@dataclass(frozen=True)
class Tuning:
    """How one kernel is cut."""

    columns: int
    """Most value columns per program."""
    warps: int
    stages: int
    channels: int = 256
    """Most key channels at a time, where a kernel can go through them in parts."""
    least: int = 16
    """Fewest value columns per program; those beyond the head are masked."""
    crowded: int | None = None
    """Stages with `CROWD` sequences or more; they change speed, not results."""


@dataclass(frozen=True)
class Tunings:
    """One for each width of a key row; no result depends on the batch."""

    narrow: Tuning
    """Up to 128 channels of 2 bytes."""
    wide: Tuning
    """Up to twice as many bytes."""
    widest: Tuning
    """What still fits in shared memory with 256 channels of 4 bytes."""

    def of(self, k: torch.Tensor) -> Tuning:
        """The tuning for keys."""
        row = _power(k.shape[-1]) * k.element_size()
        if row > 512:
            return self.widest
        return self.wide if row > 256 else self.narrow


CROWD = 8
"""Sequences that fill the device: programs take turns, and hide each other's loads."""
PASS = Tunings(
    narrow=Tuning(columns=32, warps=4, stages=3, crowded=2),
    wide=Tuning(columns=32, warps=8, stages=3),
    widest=Tuning(columns=32, warps=4, stages=1),
)
PASS_CORRECTING = replace(PASS, wide=Tuning(columns=32, warps=8, stages=2))
"""Where values are corrected: what that needs takes shared memory too."""
MANY_HEADS = 48
"""Value heads that outnumber the processors in programs of 32 columns."""
PASS_CORRECTING_MANY = replace(
    PASS_CORRECTING, narrow=Tuning(columns=64, warps=4, stages=3, crowded=2)
)
"""The same then."""
FEWEST = 64
"""`Tuning.least` wherever parts have 64 or more key channels of 16 bits.

Beside those, tiles of 16 or 32 value columns are compiled wrongly (Triton 3.6 with
ptxas 12.8): on an H200 the delta rule's corrected values and the outputs were noise.
tests/kernels/compile_for_gpu.py looks for one form of it in the machine code; another
is not understood, so such tiles are forbidden.
"""
OUTPUT = Tunings(
    narrow=Tuning(columns=128, warps=4, stages=2, channels=64, least=FEWEST),
    wide=Tuning(columns=128, warps=4, stages=1, channels=64, least=FEWEST),
    widest=Tuning(columns=32, warps=4, stages=1, channels=64),
)


@dataclass(frozen=True)
class Blocks:
    """Tile sizes and arithmetic of one launch."""

    k: int
    """A whole key row."""
    part: int
    """As many channels of it as are loaded at a time."""
    v: int
    precision: str
    inverse: str
    """Of the chunk's triangular inverse, which is then rounded to the keys' type."""

    @staticmethod
    def of(k: torch.Tensor, width: int, tuning: Tuning) -> Blocks:
        """Tiles for a head of ``k.shape[-1]`` by `width`."""
        depth = _power(k.shape[-1])
        return Blocks(
            k=depth,
            part=min(depth, tuning.channels),
            v=max(tuning.least, min(tuning.columns, _power(width))),
            precision="tf32x3" if k.dtype == torch.float32 else "tf32",
            inverse="tf32" if k.dtype == torch.bfloat16 else "tf32x3",
        )


def _power(size: int) -> int:
    """A tile's side; at least the smallest of a matrix instruction."""
    return 1 << max(4, (size - 1).bit_length())


@dataclass(frozen=True)
class Prepared:
    """What the passing of states and the outputs need of each token."""

    k: torch.Tensor
    """``[T, H, K]``; decayed to the chunk's end if `ends` is given."""
    v: torch.Tensor
    """``[T, HV, V]``; for the delta rule, corrected but for the start state."""
    w: torch.Tensor | None = None
    """``[T, HV, K]``, packed: what a start state takes from `v` (the delta rule)."""
    total: torch.Tensor | None = None
    """``[HV, T]``, running sums of log decays within chunks, float32."""
    time: torch.Tensor | None = None
    """``[HV, T]``, factors of `v`, float32."""
    ends: torch.Tensor | None = None
    """``[chunks, HV, K]``, log decays of whole chunks by channel, float32."""


def most_chunks(tokens: int, sequences: Sequences) -> int:
    """An upper bound on chunk numbers, known without asking the device."""
    partial = 1 if sequences.offsets is None else 2
    return tokens // CHUNK + sequences.count * partial


def search(sequences: Sequences) -> tuple[int, int]:
    """What `locate` needs beside `cu_seqlens`."""
    return sequences.count, (sequences.count - 1).bit_length()


def flags(sequences: Sequences) -> torch.Tensor | None:
    """`has_initial` as bytes."""
    given = sequences.has_initial
    return None if given is None else given.view(torch.uint8)


def boundary_table(sequences: Sequences) -> tuple[torch.Tensor, int, int]:
    """Boundary slots, how many a sequence has, and the stride between sequences."""
    table = sequences.boundary_slots
    if table is None:
        # Never read if there are none, but a kernel wants a pointer.
        return sequences.slots, 0, 0
    return table, table.shape[1], table.stride(0)


def rounds(sequences: Sequences) -> bool:
    """Whether running states are rounded at boundaries."""
    return sequences.round_boundaries and sequences.pool.dtype != torch.float32


def gates(operands: Operands, sequences: Sequences) -> Prepared:
    """First launch of plain linear attention: running sums of log decays."""
    tokens, heads, _ = operands.v.shape
    g, A = operands.g, operands.A
    shape = (heads, tokens)
    total = torch.empty(shape, dtype=torch.float32, device=g.device)
    time = torch.empty_like(total) if A is not None else total
    block = min(16, triton.next_power_of_2(heads))
    kernels.gate_kernel[(most_chunks(tokens, sequences), triton.cdiv(heads, block))](
        g,
        A,
        operands.dt_bias,
        sequences.cu_seqlens,
        sequences.offsets,
        total,
        time,
        *search(sequences),
        total.stride(0),
        heads,
        *g.stride(),
        SIZE=CHUNK,
        BLOCK=block,
        HAS_A=A is not None,
        HAS_DT_BIAS=operands.dt_bias is not None,
        HAS_OFFSETS=sequences.offsets is not None,
    )
    scaled = time if operands.scale_v else None
    return Prepared(operands.k, operands.v, total=total, time=scaled)


def pass_states(prepared: Prepared, sequences: Sequences) -> torch.Tensor:
    """The start state of each chunk, ``[chunks, HV, K, V]``.

    With `w`, the values in ``prepared.v`` are replaced by the corrected ones.
    """
    k, v, pool = prepared.k, prepared.v, sequences.pool
    tokens, heads, width = v.shape
    depth, chunks = k.shape[-1], most_chunks(tokens, sequences)
    states = torch.empty(chunks, heads, depth, width, dtype=k.dtype, device=k.device)
    tuning = _passing(heads, correcting=prepared.w is not None).of(k)
    blocks = Blocks.of(k, width, tuning)
    crowded = tuning.crowded is not None and sequences.count >= CROWD
    table, boundaries, boundary_row = boundary_table(sequences)
    kernels.state_kernel[(triton.cdiv(width, blocks.v), heads, sequences.count)](
        k,
        v,
        prepared.w,
        prepared.total,
        prepared.time,
        prepared.ends,
        states,
        sequences.cu_seqlens,
        sequences.offsets,
        pool,
        sequences.slots,
        flags(sequences),
        table,
        boundaries,
        tokens,
        heads,
        heads // k.shape[1],
        *k.stride()[:2],
        *v.stride()[:2],
        *pool.stride(),
        boundary_row,
        K=depth,
        V=width,
        BLOCK_K=blocks.k,
        BLOCK_V=blocks.v,
        SIZE=CHUNK,
        DELTA=prepared.w is not None,
        WIDE_G=prepared.ends is not None,
        HAS_TIME=prepared.time is not None,
        HAS_INITIAL=sequences.has_initial is not None,
        HAS_OFFSETS=sequences.offsets is not None,
        ROUND=rounds(sequences),
        PRECISION=blocks.precision,
        num_warps=tuning.warps,
        num_stages=tuning.crowded if crowded else tuning.stages,
    )
    return states


def _passing(heads: int, *, correcting: bool) -> Tunings:
    if not correcting:
        return PASS
    return PASS_CORRECTING_MANY if heads >= MANY_HEADS else PASS_CORRECTING


def outputs(
    operands: Operands,
    prepared: Prepared,
    states: torch.Tensor,
    sequences: Sequences,
    out: torch.Tensor,
) -> None:
    """Last launch, for one decay per head."""
    q, k, v, gate = operands.q, prepared.k, prepared.v, operands.gate
    tokens, heads, width = v.shape
    depth = k.shape[-1]
    tuning = OUTPUT.of(k)
    blocks = Blocks.of(k, width, tuning)
    grid = (triton.cdiv(width, blocks.v) * heads, most_chunks(tokens, sequences))
    kernels.output_kernel[grid](
        q,
        k,
        v,
        prepared.total,
        prepared.time,
        operands.skip,
        gate,
        states,
        sequences.cu_seqlens,
        sequences.offsets,
        out,
        operands.scale,
        EPSILON,
        *search(sequences),
        tokens,
        heads,
        heads // k.shape[1],
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        *((0, 0) if gate is None else gate.stride()[:2]),
        *out.stride()[:2],
        K=depth,
        V=width,
        BLOCK_K=blocks.part,
        BLOCK_V=blocks.v,
        SIZE=CHUNK,
        HAS_TIME=prepared.time is not None,
        HAS_SKIP=operands.skip is not None,
        HAS_GATE=gate is not None,
        HAS_OFFSETS=sequences.offsets is not None,
        USE_QK_L2NORM=operands.use_qk_l2norm,
        PRECISION=blocks.precision,
        num_warps=tuning.warps,
        num_stages=tuning.stages,
    )


def prefill(operands: Operands, sequences: Sequences, out: torch.Tensor) -> None:
    """Plain linear attention: gates, states, outputs; three launches."""
    if sequences.count == 0:
        return
    prepared = gates(operands, sequences)
    states = pass_states(prepared, sequences)
    outputs(operands, prepared, states, sequences, out)
