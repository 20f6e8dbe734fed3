# SPDX-License-Identifier: Apache-2.0
"""Real-gated linear recurrent unit (Griffin, RecurrentGemma).

Per channel, with ``a = exp(A * sigmoid(recurrence_gate))``:

    h = a * h + sqrt(1 - a^2) * sigmoid(input_gate) * x,        out = h

The first token of a sequence that starts from no state enters with factor 1 in
place of ``sqrt(1 - a^2)``, as in the published models.

Source: De et al. 2024, "Griffin", arXiv:2402.19427, section 2.4, where ``A`` is
``-8 softplus(Lambda)``.

Shapes: `D` channels, `N` sequences, `T` packed tokens, `S` slots. The pool is
``[S, D]`` with any strides. Token tensors are contiguous along channels, free
elsewhere. `hybrid_kernels` describes the arguments that all operations share.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybrid_kernels._common import operation
from hybrid_kernels._common.tables import Drafts, Sequences
from hybrid_kernels.rg_lru.reference import Operands

if TYPE_CHECKING:
    import torch

__all__ = ["prefill", "update", "verify"]


def prefill(
    x: torch.Tensor,
    input_gate: torch.Tensor,
    recurrence_gate: torch.Tensor,
    A: torch.Tensor,
    cu_seqlens: torch.Tensor,
    pool: torch.Tensor,
    slots: torch.Tensor,
    *,
    has_initial: torch.Tensor | None = None,
    boundary_slots: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None,
    round_boundaries: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run packed sequences and leave each one's state in its slot.

    Args:
        x: ``[T, D]``.
        input_gate: ``[T, D]``, before the logistic function.
        recurrence_gate: ``[T, D]``, before the logistic function.
        A: ``[D]``, negative.
        cu_seqlens, pool, slots, has_initial, boundary_slots, offsets,
        round_boundaries: as for every `prefill`, see `hybrid_kernels`.
        out: ``[T, D]``, written if given.

    Returns:
        `out`, or a new tensor of `x`'s type.

    Raises:
        ValueError: if shapes or strides do not fit.
    """
    return operation.prefill(
        __name__,
        Operands(x, input_gate, recurrence_gate, A),
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
    input_gate: torch.Tensor,
    recurrence_gate: torch.Tensor,
    A: torch.Tensor,
    pool: torch.Tensor,
    slots: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run one new token per sequence and advance its state in place.

    Args:
        x: ``[N, D]``.
        input_gate: ``[N, D]``, before the logistic function.
        recurrence_gate: ``[N, D]``, before the logistic function.
        A: ``[D]``, negative.
        pool: ``[S, D]``.
        slots: ``[N]``, no repeats among the non-negative.
        out: ``[N, D]``, written if given.

    Returns:
        `out`, or a new tensor of `x`'s type.

    Raises:
        ValueError: if shapes or strides do not fit.
    """
    tokens = Operands(x, input_gate, recurrence_gate, A)
    return operation.update(__name__, tokens, pool, slots, out)


def verify(
    x: torch.Tensor,
    input_gate: torch.Tensor,
    recurrence_gate: torch.Tensor,
    A: torch.Tensor,
    pool: torch.Tensor,
    slots: torch.Tensor,
    draft_slots: torch.Tensor,
    *,
    parents: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run `L` draft tokens per sequence; the state after each gets its own slot.

    Args:
        x: ``[N, L, D]``.
        input_gate: ``[N, L, D]``, before the logistic function.
        recurrence_gate: ``[N, L, D]``, before the logistic function.
        A: ``[D]``, negative.
        pool: ``[S, D]``.
        slots, draft_slots, parents: as for every `verify`, see `hybrid_kernels`.
        out: ``[N, L, D]``, written if given.

    Returns:
        `out`, or a new tensor of `x`'s type.

    Raises:
        ValueError: if shapes or strides do not fit.
    """
    tokens = Operands(x, input_gate, recurrence_gate, A)
    drafts = Drafts(pool, slots, draft_slots, parents)
    return operation.verify(__name__, tokens, drafts, out)
