# SPDX-License-Identifier: Apache-2.0
"""Real-gated linear recurrent unit (Griffin, RecurrentGemma).

Per channel, with ``a = exp(rate * sigmoid(recurrence_gate))``:

    h = a * h + sqrt(1 - a^2) * sigmoid(input_gate) * x,        out = h

The first token of a sequence that starts from no state enters with factor 1 in
place of ``sqrt(1 - a^2)``, as in the published models.

Source: De et al. 2024, "Griffin", arXiv:2402.19427, section 2.4, where ``rate`` is
``-8 softplus(Lambda)``.

Shapes: `D` channels, `N` sequences, `T` packed tokens, `S` slots. The pool is
``[S, D]`` with any strides. Token tensors are contiguous along channels, free
elsewhere. See `hybrid_kernels` for slots, padding rows and rounding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybrid_kernels._common.checks import (
    check_last_contiguous,
    check_shape,
    on_gpu,
    require,
)
from hybrid_kernels._common.linear_checks import check_batch, check_drafts
from hybrid_kernels.rg_lru import reference

if TYPE_CHECKING:
    import torch

__all__ = ["prefill", "update", "verify"]


def prefill(
    x: torch.Tensor,
    input_gate: torch.Tensor,
    recurrence_gate: torch.Tensor,
    rate: torch.Tensor,
    cu_seqlens: torch.Tensor,
    pool: torch.Tensor,
    slots: torch.Tensor,
    *,
    has_initial: torch.Tensor | None = None,
    boundary_slots: torch.Tensor | None = None,
    round_boundaries: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run packed sequences and leave each one's state in its slot.

    Args:
        x: ``[T, D]``.
        input_gate: ``[T, D]``, before the logistic function.
        recurrence_gate: ``[T, D]``, before the logistic function.
        rate: ``[D]``, negative.
        cu_seqlens: ``[N + 1]``, int32 or int64, starting at 0. Rows after the last
            sequence are padding; their output is unspecified.
        pool: ``[S, D]``.
        slots: ``[N]``, no repeats among the non-negative.
        has_initial: ``[N]`` bool; False starts from no state. None: all True.
        boundary_slots: ``[N, C]``; the state after ``64 * (c + 1)`` tokens of
            sequence `n` is also written to ``boundary_slots[n, c]``. Negative
            entries, and entries beyond the sequence, are skipped.
        round_boundaries: round the running state to the pool's type every 64
            tokens, so that resuming from a boundary gives the bits of one long
            prefill. Changes nothing for a float32 pool.
        out: ``[T, D]``, written if given.

    Returns:
        `out`, or a new tensor of `x`'s type.

    Raises:
        ValueError: if shapes or strides do not fit.
    """
    require(x.ndim == 2, f"x has {x.ndim} dimensions, expected 2")
    _check(x, input_gate, recurrence_gate, rate, pool)
    check_batch(cu_seqlens, slots, has_initial, boundary_slots)
    result = x.new_empty(x.shape) if out is None else out
    check_shape("out", result, tuple(x.shape))
    operands = (x, input_gate, recurrence_gate, rate, cu_seqlens, pool, slots)
    options = (has_initial, boundary_slots, round_boundaries, result)
    if on_gpu(x):
        from hybrid_kernels.rg_lru import triton

        triton.prefill(*operands, *options)
    else:
        reference.prefill(*operands, *options)
    return result


def update(
    x: torch.Tensor,
    input_gate: torch.Tensor,
    recurrence_gate: torch.Tensor,
    rate: torch.Tensor,
    pool: torch.Tensor,
    slots: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run one new token per sequence and advance its state in place.

    With `out` given nothing is allocated; the call can be captured.

    Args:
        x: ``[N, D]``.
        input_gate: ``[N, D]``, before the logistic function.
        recurrence_gate: ``[N, D]``, before the logistic function.
        rate: ``[D]``, negative.
        pool: ``[S, D]``.
        slots: ``[N]``, no repeats among the non-negative.
        out: ``[N, D]``, written if given.

    Returns:
        `out`, or a new tensor of `x`'s type.

    Raises:
        ValueError: if shapes or strides do not fit.
    """
    require(x.ndim == 2, f"x has {x.ndim} dimensions, expected 2")
    result = x.new_empty(x.shape) if out is None else out
    check_shape("slots", slots, (x.shape[0],))
    verify(
        x[:, None],
        input_gate[:, None],
        recurrence_gate[:, None],
        rate,
        pool,
        slots,
        slots[:, None],
        out=result[:, None],
    )
    return result


def verify(
    x: torch.Tensor,
    input_gate: torch.Tensor,
    recurrence_gate: torch.Tensor,
    rate: torch.Tensor,
    pool: torch.Tensor,
    slots: torch.Tensor,
    draft_slots: torch.Tensor,
    *,
    parents: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run `L` draft tokens per sequence; the state after each gets its own slot.

    On a GPU the same bits as `update` when the path to a draft is replayed token
    by token. With `out` given nothing is allocated; the call can be captured.

    Args:
        x: ``[N, L, D]``.
        input_gate: ``[N, L, D]``, before the logistic function.
        recurrence_gate: ``[N, L, D]``, before the logistic function.
        rate: ``[D]``, negative.
        pool: ``[S, D]``.
        slots: ``[N]``, the main state of each sequence; read only.
        draft_slots: ``[N, L]``; a negative entry keeps no state. For a chain
            ``slots[i]`` may be among row `i`; otherwise all slots differ.
        parents: ``[N, L]``, the draft each draft follows, -1 for the main state;
            parents come before children and keep their state in a slot. None
            means a chain.
        out: ``[N, L, D]``, written if given.

    Returns:
        `out`, or a new tensor of `x`'s type.

    Raises:
        ValueError: if shapes or strides do not fit.
    """
    require(x.ndim == 3, f"x has {x.ndim} dimensions, expected 3")
    _check(x, input_gate, recurrence_gate, rate, pool)
    check_drafts(x.shape[0], x.shape[1], slots, draft_slots, parents)
    result = x.new_empty(x.shape) if out is None else out
    check_shape("out", result, tuple(x.shape))
    operands = (x, input_gate, recurrence_gate, rate, pool)
    if on_gpu(x):
        from hybrid_kernels.rg_lru import triton

        triton.steps(*operands, slots, draft_slots, parents, result)
    else:
        reference.steps(*operands, slots, draft_slots, parents, result)
    return result


def _check(
    x: torch.Tensor,
    input_gate: torch.Tensor,
    recurrence_gate: torch.Tensor,
    rate: torch.Tensor,
    pool: torch.Tensor,
) -> None:
    channels = x.shape[-1]
    check_shape("rate", rate, (channels,))
    check_shape("pool", pool, (pool.shape[0], channels))
    named = (("x", x), ("input_gate", input_gate), ("recurrence_gate", recurrence_gate))
    for name, tensor in named:
        check_shape(name, tensor, tuple(x.shape))
        check_last_contiguous(name, tensor)
