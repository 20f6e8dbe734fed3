# SPDX-License-Identifier: Apache-2.0
"""Launches of the chunked prefill; `hybrid_kernels._common.chunk_kernels` explains."""
# mypy: disable-error-code="no-untyped-call,import-untyped"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from hybrid_kernels._common import chunk_kernels as kernels
from hybrid_kernels._common.linear import EPSILON
from hybrid_kernels._common.varlen import CHUNK


@dataclass(frozen=True)
class Tuning:
    """How one kernel is cut; the same for every batch, see the module's text."""

    columns: int
    """Most value columns per program."""
    warps: int
    stages: int


CORRECT = Tuning(columns=64, warps=4, stages=2)
PASS = Tuning(columns=32, warps=4, stages=2)
OUTPUT = Tuning(columns=64, warps=4, stages=2)


@dataclass(frozen=True)
class Batch:
    """Where sequences lie, where their states live, and what else is asked for."""

    cu_seqlens: torch.Tensor
    pool: torch.Tensor
    slots: torch.Tensor
    has_initial: torch.Tensor | None
    boundary_slots: torch.Tensor | None
    round_boundaries: bool

    @property
    def sequences(self) -> int:
        """How many sequences there are."""
        return self.slots.numel()

    def flags(self) -> torch.Tensor | None:
        """`has_initial` as bytes."""
        flags = self.has_initial
        return None if flags is None else flags.view(torch.uint8)

    def boundary_shape(self) -> tuple[int, int]:
        """Boundaries per sequence, and the stride between sequences."""
        table = self.boundary_slots
        return (0, 0) if table is None else (table.shape[1], table.stride(0))

    def boundary_pointer(self) -> torch.Tensor:
        """The boundary slots; something unused, but a pointer, if there are none."""
        return self.slots if self.boundary_slots is None else self.boundary_slots


@dataclass(frozen=True)
class Blocks:
    """Tile sizes; functions of the head's dimensions alone."""

    k: int
    """A whole key row."""
    part: int
    """Of a key row, where a kernel can go through it in parts."""
    v: int
    stages: int
    precision: str
    inverse: str
    """Of the chunk's triangular inverse, which is then rounded to the keys' type."""

    @staticmethod
    def of(k: torch.Tensor, width: int, tuning: Tuning) -> Blocks:
        """Tiles for a head of ``k.shape[-1]`` by `width`."""
        # At least 16: the smallest tile of a matrix instruction.
        depth = max(16, triton.next_power_of_2(k.shape[-1]))
        columns, stages, part = tuning.columns, tuning.stages, depth
        if depth * k.element_size() > 256:
            # Tuned for 128 channels of 2 bytes; more would not fit in shared memory.
            columns, stages, part = min(columns, 32), 1, 64
        block = max(16, min(columns, triton.next_power_of_2(width)))
        return Blocks(
            k=depth,
            part=part,
            v=block,
            stages=stages,
            precision="tf32x3" if k.dtype == torch.float32 else "tf32",
            inverse="tf32" if k.dtype == torch.bfloat16 else "tf32x3",
        )


def chunk_offsets(cu_seqlens: torch.Tensor, size: int = CHUNK) -> torch.Tensor:
    """``[N + 1]``: chunks before each sequence, computed on the device."""
    offsets = torch.empty(
        cu_seqlens.numel(), dtype=torch.int32, device=cu_seqlens.device
    )
    kernels.offsets_kernel[(1,)](
        cu_seqlens, offsets, cu_seqlens.numel() - 1, SIZE=size, BLOCK=1024
    )
    return offsets


def most_chunks(tokens: int, sequences: int, size: int = CHUNK) -> int:
    """An upper bound on the number of chunks, known without asking the device."""
    return tokens // size + sequences


def correct(
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    batch: Batch,
    offsets: torch.Tensor,
    *,
    normalise: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """First launch: unit keys, erasing keys ``W`` and corrected values ``U``."""
    tokens, heads, width = v.shape
    depth = k.shape[-1]
    unit_k = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    w = torch.empty(tokens, heads, depth, dtype=k.dtype, device=k.device)
    u = torch.empty(tokens, heads, width, dtype=k.dtype, device=k.device)
    blocks = Blocks.of(k, width, CORRECT)
    kernels.correct_kernel[(most_chunks(tokens, batch.sequences), heads)](
        k,
        v,
        g,
        beta,
        batch.cu_seqlens,
        offsets,
        unit_k,
        w,
        u,
        EPSILON,
        batch.sequences,
        batch.sequences.bit_length(),
        heads,
        heads // k.shape[1],
        *k.stride()[:2],
        *v.stride()[:2],
        *g.stride()[:2],
        *beta.stride()[:2],
        K=depth,
        V=width,
        BLOCK_K=min(64, blocks.k),
        BLOCK_V=blocks.v,
        SIZE=CHUNK,
        NORMALISE=normalise,
        PRECISION=blocks.precision,
        INVERSE=blocks.inverse,
        num_warps=CORRECT.warps,
        num_stages=blocks.stages,
    )
    return unit_k, w, u


def pass_states(
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    time: torch.Tensor | None,
    w: torch.Tensor | None,
    batch: Batch,
    offsets: torch.Tensor,
) -> torch.Tensor:
    """Second launch: the start state of each chunk, ``[chunks, H, K, V]``.

    With `w`, the values in `v` are replaced by the corrected ones. A `g` of three
    dimensions, ``[T, H, K]``, holds running sums within chunks.
    """
    tokens, heads, width = v.shape
    depth = k.shape[-1]
    chunks = most_chunks(tokens, batch.sequences)
    states = torch.empty(chunks, heads, depth, width, dtype=k.dtype, device=k.device)
    blocks = Blocks.of(k, width, PASS)
    boundaries, boundary_row = batch.boundary_shape()
    grid = (triton.cdiv(width, blocks.v), heads, batch.sequences)
    kernels.state_kernel[grid](
        k,
        v,
        g,
        time,
        w,
        states,
        batch.cu_seqlens,
        offsets,
        batch.pool,
        batch.slots,
        batch.flags(),
        batch.boundary_pointer(),
        heads,
        heads // k.shape[1],
        boundaries,
        *k.stride()[:2],
        *v.stride()[:2],
        *g.stride()[:2],
        *((0, 0) if time is None else time.stride()[:2]),
        *batch.pool.stride(),
        boundary_row,
        K=depth,
        V=width,
        BLOCK_K=blocks.k,
        BLOCK_V=blocks.v,
        SIZE=CHUNK,
        DELTA=w is not None,
        WIDE_G=g.ndim == 3,
        HAS_TIME=time is not None,
        HAS_INITIAL=batch.has_initial is not None,
        ROUND=batch.round_boundaries and batch.pool.dtype != torch.float32,
        PRECISION=blocks.precision,
        num_warps=PASS.warps,
        num_stages=blocks.stages,
    )
    return states


def outputs(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    time: torch.Tensor | None,
    states: torch.Tensor,
    batch: Batch,
    offsets: torch.Tensor,
    out: torch.Tensor,
    *,
    scale: float,
    normalise: bool = False,
    skip: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
) -> None:
    """Third launch."""
    tokens, heads, width = v.shape
    depth = k.shape[-1]
    blocks = Blocks.of(k, width, OUTPUT)
    grid = (
        triton.cdiv(width, blocks.v) * heads,
        most_chunks(tokens, batch.sequences),
    )
    kernels.output_kernel[grid](
        q,
        k,
        v,
        g,
        time,
        skip,
        gate,
        states,
        batch.cu_seqlens,
        offsets,
        out,
        scale,
        EPSILON,
        batch.sequences,
        batch.sequences.bit_length(),
        heads,
        heads // k.shape[1],
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        *g.stride()[:2],
        *((0, 0) if time is None else time.stride()[:2]),
        *((0, 0) if gate is None else gate.stride()[:2]),
        *out.stride()[:2],
        K=depth,
        V=width,
        BLOCK_K=blocks.part,
        BLOCK_V=blocks.v,
        SIZE=CHUNK,
        HAS_TIME=time is not None,
        HAS_SKIP=skip is not None,
        HAS_GATE=gate is not None,
        NORMALISE=normalise,
        PRECISION=blocks.precision,
        num_warps=OUTPUT.warps,
        num_stages=blocks.stages,
    )
