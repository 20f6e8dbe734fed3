# SPDX-License-Identifier: Apache-2.0
"""State space duality layer of Mamba-2 (Nemotron-H, Granite 4, Falcon-H1, Bamba).

Per head, with state ``S`` of shape ``[P, N]`` and ``dt' = softplus(dt + dt_bias)``:

    S = S * exp(dt' A) + dt' x B^T
    y = S C + skip x,  times silu(gate)

Source: Dao and Gu 2024, "Transformers are SSMs", arXiv:2405.21060, sections 6, 7.

Shapes: `H` heads, `G` groups of B and C (`H` a multiple of `G`; group `g` serves
heads ``g * H / G`` and following), head dimension `P`, state dimension `D` up to
256, `N` sequences, `T` packed tokens, `S` slots. The pool is ``[S, H, P, D]`` with
any strides. `x`, `B`, `C` and `gate` are contiguous along their last dimension,
free elsewhere. See `hybrid_kernels` for slots, padding rows and rounding.

Matrix products of `prefill` take their operands in `B`'s type, with float32 sums.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybrid_kernels._common import operation
from hybrid_kernels._common.tables import Drafts, Sequences
from hybrid_kernels.ssd.reference import operands

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
        x: ``[T, H, P]``.
        dt: ``[T, H]``, before softplus.
        A: ``[H]``, negative.
        B: ``[T, G, D]``.
        C: ``[T, G, D]``.
        skip: ``[H]`` or None.
        gate: ``[T, H, P]`` or None.
        dt_bias: ``[H]`` or None, added to `dt` before softplus.
        cu_seqlens, pool, slots, has_initial, boundary_slots, offsets,
        round_boundaries: as for every `prefill`, see `hybrid_kernels`.
        out: ``[T, H, P]``, written if given.

    Returns:
        `out`, or a new tensor of `x`'s type.

    Raises:
        ValueError: if shapes or strides do not fit.
    """
    return operation.prefill(
        __name__,
        operands(x, dt, A, B, C, skip, gate, dt_bias),
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
        x: ``[N, H, P]``.
        dt: ``[N, H]``, before softplus.
        A: ``[H]``, negative.
        B: ``[N, G, D]``.
        C: ``[N, G, D]``.
        pool: ``[S, H, P, D]``.
        slots: ``[N]``, no repeats among the non-negative.
        skip, dt_bias: as for `prefill`.
        gate: ``[N, H, P]`` or None.
        out: ``[N, H, P]``, written if given.

    Returns:
        `out`, or a new tensor of `x`'s type.

    Raises:
        ValueError: if shapes or strides do not fit.
    """
    tokens = operands(x, dt, A, B, C, skip, gate, dt_bias)
    return operation.update(__name__, tokens, pool, slots, out)


def verify(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    pool: torch.Tensor,
    slots: torch.Tensor,
    draft_slots: torch.Tensor | None = None,
    *,
    parents: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    record: torch.Tensor | None = None,
    skip: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run `L` draft tokens per sequence; keep states, or a record to replay.

    Args:
        x: ``[N, L, H, P]``.
        dt: ``[N, L, H]``, before softplus.
        A: ``[H]``, negative.
        B: ``[N, L, G, D]``.
        C: ``[N, L, G, D]``.
        pool: ``[S, H, P, D]``.
        slots, draft_slots, parents, cu_seqlens, record: as for every `verify`, see
        `hybrid_kernels`; packed drafts are ``[T, ...]`` instead of ``[N, L, ...]``.
        skip, dt_bias: as for `prefill`.
        gate: ``[N, L, H, P]`` or None.
        out: ``[N, L, H, P]``, written if given.

    Returns:
        `out`, or a new tensor of `x`'s type.

    Raises:
        ValueError: if shapes or strides do not fit.
    """
    tokens = operands(x, dt, A, B, C, skip, gate, dt_bias)
    drafts = Drafts(pool, slots, draft_slots, parents, cu_seqlens, record)
    return operation.verify(__name__, tokens, drafts, out)
