# SPDX-License-Identifier: Apache-2.0
"""Selective scan of Mamba-1 (Jamba, FalconMamba).

Per channel `d` and state dimension `n`, with ``dt' = softplus(dt + bias)``:

    h[d, n] = h[d, n] * exp(dt'[d] a[d, n]) + dt'[d] b[n] x[d]
    y[d] = sum_n c[n] h[d, n] + skip[d] x[d],  times silu(gate[d])

Source: Gu and Dao 2023, "Mamba", arXiv:2312.00752.

Shapes: `C` channels, state dimension `D`, `N` sequences, `T` packed tokens, `S`
slots. The pool is ``[S, C, D]`` with any strides. Other tensors are contiguous
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
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    cu_seqlens: torch.Tensor,
    pool: torch.Tensor,
    slots: torch.Tensor,
    *,
    skip: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    has_initial: torch.Tensor | None = None,
    boundary_slots: torch.Tensor | None = None,
    round_boundaries: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run packed sequences and leave each one's state in its slot.

    Args:
        x: ``[T, C]``.
        dt: ``[T, C]``, before softplus.
        a: ``[C, D]``, negative.
        b: ``[T, D]``.
        c: ``[T, D]``.
        skip: ``[C]`` or None.
        gate: ``[T, C]`` or None.
        bias: ``[C]`` or None, added to `dt` before softplus.
        cu_seqlens, pool, slots, has_initial, boundary_slots, round_boundaries:
            as for every `prefill`, see `hybrid_kernels`.
        out: ``[T, C]``, written if given.

    Returns:
        `out`, or a new tensor of `x`'s type.

    Raises:
        ValueError: if shapes or strides do not fit.
    """
    return operation.prefill(
        __name__,
        Operands(x, dt, a, b, c, skip, gate, bias),
        Sequences(
            cu_seqlens, pool, slots, has_initial, boundary_slots, round_boundaries
        ),
        out,
    )


def update(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    pool: torch.Tensor,
    slots: torch.Tensor,
    *,
    skip: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run one new token per sequence and advance its state in place.

    Args:
        x: ``[N, C]``.
        dt: ``[N, C]``, before softplus.
        a: ``[C, D]``, negative.
        b: ``[N, D]``.
        c: ``[N, D]``.
        pool: ``[S, C, D]``.
        slots: ``[N]``, no repeats among the non-negative.
        skip, bias: as for `prefill`.
        gate: ``[N, C]`` or None.
        out: ``[N, C]``, written if given.

    Returns:
        `out`, or a new tensor of `x`'s type.

    Raises:
        ValueError: if shapes or strides do not fit.
    """
    tokens = Operands(x, dt, a, b, c, skip, gate, bias)
    return operation.update(__name__, tokens, pool, slots, out)


def verify(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    pool: torch.Tensor,
    slots: torch.Tensor,
    draft_slots: torch.Tensor,
    *,
    parents: torch.Tensor | None = None,
    skip: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run `L` draft tokens per sequence; the state after each gets its own slot.

    Args:
        x: ``[N, L, C]``.
        dt: ``[N, L, C]``, before softplus.
        a: ``[C, D]``, negative.
        b: ``[N, L, D]``.
        c: ``[N, L, D]``.
        pool: ``[S, C, D]``.
        slots, draft_slots, parents: as for every `verify`, see `hybrid_kernels`.
        skip, bias: as for `prefill`.
        gate: ``[N, L, C]`` or None.
        out: ``[N, L, C]``, written if given.

    Returns:
        `out`, or a new tensor of `x`'s type.

    Raises:
        ValueError: if shapes or strides do not fit.
    """
    tokens = Operands(x, dt, a, b, c, skip, gate, bias)
    drafts = Drafts(pool, slots, draft_slots, parents)
    return operation.verify(__name__, tokens, drafts, out)
