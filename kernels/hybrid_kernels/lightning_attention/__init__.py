# SPDX-License-Identifier: Apache-2.0
"""Linear attention with one decay per head, constant (MiniMax-Text-01, Ling 2.5) or
of each token (xLSTM).

Per head, with state ``S`` of shape ``[V, K]``:

    S = S * exp(decay) + v k^T
    o = scale * S q

Sources: Qin et al. 2024, "Lightning Attention-2", arXiv:2401.04658; Sun et al.
2023, "Retentive Network", arXiv:2307.08621; Yang et al. 2023, "Gated Linear Attention
Transformers", arXiv:2312.06635, for decays of each token.

Shapes: `H` key heads, `HV` value heads (a multiple of `H`), `K` up to 256, `V`,
`N` sequences, `T` packed tokens, `S` slots. The pool is ``[S, HV, V, K]`` with any
strides. Queries, keys and values are contiguous along their last dimension, free
elsewhere. `hybrid_kernels` describes the arguments that all operations share.

Matrix products of `prefill` take their operands in `k`'s type, with float32 sums.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybrid_kernels._common import operation
from hybrid_kernels._common.tables import Drafts, Sequences
from hybrid_kernels.lightning_attention.reference import operands

if TYPE_CHECKING:
    import torch

__all__ = ["prefill", "update", "verify"]


def prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    cu_seqlens: torch.Tensor,
    pool: torch.Tensor,
    slots: torch.Tensor,
    *,
    has_initial: torch.Tensor | None = None,
    boundary_slots: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None,
    round_boundaries: bool = False,
    scale: float = 1.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run packed sequences and leave each one's state in its slot.

    Args:
        q: ``[T, H, K]``.
        k: ``[T, H, K]``.
        v: ``[T, HV, V]``.
        decay: ``[HV]``, or ``[T, HV]`` of each token: its logarithm, at most 0.
        scale: multiplies the output.
        cu_seqlens, pool, slots, has_initial, boundary_slots, offsets,
        round_boundaries: as for every `prefill`, see `hybrid_kernels`.
        out: ``[T, HV, V]``, written if given.

    Returns:
        `out`, or a new tensor of `v`'s type.

    Raises:
        ValueError: if shapes or strides do not fit.
    """
    return operation.prefill(
        __name__,
        operands(q, k, v, decay, scale),
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
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    pool: torch.Tensor,
    slots: torch.Tensor,
    *,
    scale: float = 1.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run one new token per sequence and advance its state in place.

    Args:
        q: ``[N, H, K]``.
        k: ``[N, H, K]``.
        v: ``[N, HV, V]``.
        decay: ``[HV]`` or ``[N, HV]``.
        pool: ``[S, HV, V, K]``.
        slots: ``[N]``, no repeats among the non-negative.
        scale: multiplies the output.
        out: ``[N, HV, V]``, written if given.

    Returns:
        `out`, or a new tensor of `v`'s type.

    Raises:
        ValueError: if shapes or strides do not fit.
    """
    tokens = operands(q, k, v, decay, scale)
    return operation.update(__name__, tokens, pool, slots, out)


def verify(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    pool: torch.Tensor,
    slots: torch.Tensor,
    draft_slots: torch.Tensor | None = None,
    *,
    parents: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    record: torch.Tensor | None = None,
    scale: float = 1.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run `L` draft tokens per sequence; keep states, or a record to replay.

    Args:
        q: ``[N, L, H, K]``.
        k: ``[N, L, H, K]``.
        v: ``[N, L, HV, V]``.
        decay: ``[HV]`` or ``[N, L, HV]``.
        pool: ``[S, HV, V, K]``.
        slots, draft_slots, parents, cu_seqlens, record: as for every `verify`, see
        `hybrid_kernels`; packed drafts are ``[T, ...]`` instead of ``[N, L, ...]``.
        scale: multiplies the output.
        out: ``[N, L, HV, V]``, written if given.

    Returns:
        `out`, or a new tensor of `v`'s type.

    Raises:
        ValueError: if shapes or strides do not fit.
    """
    tokens = operands(q, k, v, decay, scale)
    drafts = Drafts(pool, slots, draft_slots, parents, cu_seqlens, record)
    return operation.verify(__name__, tokens, drafts, out)
