# SPDX-License-Identifier: Apache-2.0
"""Selective scan of Mamba-1 (Jamba, FalconMamba).

Per channel `d` and state dimension `n`, with ``dt' = softplus(dt + dt_bias)``:

    h[d, n] = h[d, n] * exp(dt'[d] A[d, n]) + dt'[d] B[n] x[d]
    y[d] = sum_n C[n] h[d, n] + skip[d] x[d],  times silu(gate[d])

Source: Gu and Dao 2023, "Mamba", arXiv:2312.00752.

Shapes: `I` channels, state dimension `D`, `N` sequences, `T` packed tokens, `S`
slots. The pool is ``[S, I, D]`` with any strides. Other tensors are contiguous
along their last dimension, free elsewhere. `hybrid_kernels` describes the arguments
that all operations share.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybrid_kernels._common import operation
from hybrid_kernels._common.tables import Drafts, Sequences
from hybrid_kernels.selective_scan.reference import Operands

if TYPE_CHECKING:
    import torch

__all__ = ["prefill", "update", "verify"]


def prefill(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    cu_seqlens: torch.Tensor,
    pool: torch.Tensor,
    slots: torch.Tensor,
    *,
    skip: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    has_initial: torch.Tensor | None = None,
    boundary_slots: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None,
    round_boundaries: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run packed sequences and leave each one's state in its slot.

    Args:
        x: ``[T, I]``.
        dt: ``[T, I]``, before softplus.
        A: ``[I, D]``, negative.
        B: ``[T, D]``.
        C: ``[T, D]``.
        skip: ``[I]`` or None.
        gate: ``[T, I]`` or None.
        dt_bias: ``[I]`` or None, added to `dt` before softplus.
        cu_seqlens, pool, slots, has_initial, boundary_slots, offsets,
        round_boundaries: as for every `prefill`, see `hybrid_kernels`.
        out: ``[T, I]``, written if given.

    Returns:
        `out`, or a new tensor of `x`'s type.

    Raises:
        ValueError: if shapes or strides do not fit.
    """
    return operation.prefill(
        __name__,
        Operands(x, dt, A, B, C, skip, gate, dt_bias),
        Sequences(
            cu_seqlens,
            pool,
            slots,
            has_initial,
            boundary_slots,
            round_boundaries,
            offsets=offsets,
        ),
        out,
    )


def update(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    pool: torch.Tensor,
    slots: torch.Tensor,
    *,
    skip: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run one new token per sequence and advance its state in place.

    Args:
        x: ``[N, I]``.
        dt: ``[N, I]``, before softplus.
        A: ``[I, D]``, negative.
        B: ``[N, D]``.
        C: ``[N, D]``.
        pool: ``[S, I, D]``.
        slots: ``[N]``, no repeats among the non-negative.
        skip, dt_bias: as for `prefill`.
        gate: ``[N, I]`` or None.
        out: ``[N, I]``, written if given.

    Returns:
        `out`, or a new tensor of `x`'s type.

    Raises:
        ValueError: if shapes or strides do not fit.
    """
    tokens = Operands(x, dt, A, B, C, skip, gate, dt_bias)
    return operation.update(__name__, tokens, pool, slots, out)


def verify(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    pool: torch.Tensor,
    slots: torch.Tensor,
    draft_slots: torch.Tensor,
    *,
    parents: torch.Tensor | None = None,
    skip: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run `L` draft tokens per sequence; the state after each gets its own slot.

    Args:
        x: ``[N, L, I]``.
        dt: ``[N, L, I]``, before softplus.
        A: ``[I, D]``, negative.
        B: ``[N, L, D]``.
        C: ``[N, L, D]``.
        pool: ``[S, I, D]``.
        slots, draft_slots, parents: as for every `verify`, see `hybrid_kernels`.
        skip, dt_bias: as for `prefill`.
        gate: ``[N, L, I]`` or None.
        out: ``[N, L, I]``, written if given.

    Returns:
        `out`, or a new tensor of `x`'s type.

    Raises:
        ValueError: if shapes or strides do not fit.
    """
    tokens = Operands(x, dt, A, B, C, skip, gate, dt_bias)
    drafts = Drafts(pool, slots, draft_slots, parents)
    return operation.verify(__name__, tokens, drafts, out)
