# SPDX-License-Identifier: Apache-2.0
"""Selective scan of Mamba-1 (Jamba, FalconMamba).

Per channel `d` and state dimension `n`, with ``dt' = softplus(dt + bias)``:

    h[d, n] = h[d, n] * exp(dt'[d] a[d, n]) + dt'[d] b[n] x[d]
    y[d] = sum_n c[n] h[d, n] + skip[d] x[d],  times silu(gate[d])

Source: Gu and Dao 2023, "Mamba", arXiv:2312.00752.

Shapes: `C` channels, state dimension `D`, `N` sequences, `T` packed tokens, `S`
slots. The pool is ``[S, C, D]`` with any strides. Other tensors are contiguous
along their last dimension, free elsewhere. See `hybrid_kernels` for slots, padding
rows and rounding.
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
from hybrid_kernels.selective_scan import reference

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
        cu_seqlens: ``[N + 1]``, int32 or int64, starting at 0. Rows after the last
            sequence are padding; their output is unspecified.
        pool: ``[S, C, D]``.
        slots: ``[N]``, no repeats among the non-negative.
        skip: ``[C]`` or None.
        gate: ``[T, C]`` or None.
        bias: ``[C]`` or None, added to `dt` before softplus.
        has_initial: ``[N]`` bool; False starts from zeros whatever the slot
            holds. None means True for all.
        boundary_slots: ``[N, C]``; the state after ``64 * (c + 1)`` tokens of
            sequence `n` is also written to ``boundary_slots[n, c]``. Negative
            entries, and entries beyond the sequence, are skipped.
        round_boundaries: round the running state to the pool's type every 64
            tokens, so that resuming from a boundary gives the bits of one long
            prefill. Changes nothing for a float32 pool.
        out: ``[T, C]``, written if given.

    Returns:
        `out`, or a new tensor of `x`'s type.

    Raises:
        ValueError: if shapes or strides do not fit.
    """
    require(x.ndim == 2, f"x has {x.ndim} dimensions, expected 2")
    _check(x, dt, a, b, c, pool, skip, gate, bias)
    check_batch(cu_seqlens, slots, has_initial, boundary_slots)
    result = x.new_empty(x.shape) if out is None else out
    check_shape("out", result, tuple(x.shape))
    inputs = reference.Inputs(x, dt, a, b, c, skip, gate, bias)
    tables = (has_initial, boundary_slots, round_boundaries)
    if on_gpu(x):
        from hybrid_kernels.selective_scan import triton

        triton.prefill(inputs, cu_seqlens, pool, slots, *tables, result)
    else:
        reference.prefill(inputs, cu_seqlens, pool, slots, *tables, result)
    return result


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

    With `out` given nothing is allocated; the call can be captured.

    Args:
        x: ``[N, C]``.
        dt: ``[N, C]``, before softplus.
        a: ``[C, D]``, negative.
        b: ``[N, D]``.
        c: ``[N, D]``.
        pool: ``[S, C, D]``.
        slots: ``[N]``, no repeats among the non-negative.
        skip: ``[C]`` or None.
        gate: ``[N, C]`` or None.
        bias: ``[C]`` or None, added to `dt` before softplus.
        out: ``[N, C]``, written if given.

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
        dt[:, None],
        a,
        b[:, None],
        c[:, None],
        pool,
        slots,
        slots[:, None],
        skip=skip,
        gate=None if gate is None else gate[:, None],
        bias=bias,
        out=result[:, None],
    )
    return result


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

    On a GPU the same bits as `update` when the path to a draft is replayed token
    by token. With `out` given nothing is allocated; the call can be captured.

    Args:
        x: ``[N, L, C]``.
        dt: ``[N, L, C]``, before softplus.
        a: ``[C, D]``, negative.
        b: ``[N, L, D]``.
        c: ``[N, L, D]``.
        pool: ``[S, C, D]``.
        slots: ``[N]``, the main state of each sequence; read only.
        draft_slots: ``[N, L]``; a negative entry keeps no state. For a chain
            ``slots[i]`` may be among row `i`; otherwise all slots differ.
        parents: ``[N, L]``, the draft each draft follows, -1 for the main state;
            parents come before children and keep their state in a slot. None
            means a chain.
        skip: ``[C]`` or None.
        gate: ``[N, L, C]`` or None.
        bias: ``[C]`` or None, added to `dt` before softplus.
        out: ``[N, L, C]``, written if given.

    Returns:
        `out`, or a new tensor of `x`'s type.

    Raises:
        ValueError: if shapes or strides do not fit.
    """
    require(x.ndim == 3, f"x has {x.ndim} dimensions, expected 3")
    _check(x, dt, a, b, c, pool, skip, gate, bias)
    check_drafts(x.shape[0], x.shape[1], slots, draft_slots, parents)
    result = x.new_empty(x.shape) if out is None else out
    check_shape("out", result, tuple(x.shape))
    inputs = reference.Inputs(x, dt, a, b, c, skip, gate, bias)
    operands = (inputs, pool, slots, draft_slots, parents)
    if on_gpu(x):
        from hybrid_kernels.selective_scan import triton

        triton.steps(*operands, result)
    else:
        reference.steps(*operands, result)
    return result


def _check(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    pool: torch.Tensor,
    skip: torch.Tensor | None,
    gate: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> None:
    channels, depth = x.shape[-1], b.shape[-1]
    check_shape("dt", dt, tuple(x.shape))
    check_shape("a", a, (channels, depth))
    check_shape("b", b, (*x.shape[:-1], depth))
    check_shape("c", c, (*x.shape[:-1], depth))
    check_shape("pool", pool, (pool.shape[0], channels, depth))
    for name, vector in (("skip", skip), ("bias", bias)):
        if vector is not None:
            check_shape(name, vector, (channels,))
    rows = {"x": x, "dt": dt, "a": a, "b": b, "c": c}
    if gate is not None:
        check_shape("gate", gate, tuple(x.shape))
        rows["gate"] = gate
    for name, tensor in rows.items():
        check_last_contiguous(name, tensor)
