# SPDX-License-Identifier: Apache-2.0
"""State space duality layer of Mamba-2 (Nemotron-H, Granite 4, Falcon-H1, Bamba).

Per head, with state ``S`` of shape ``[P, N]`` and ``dt' = softplus(dt + bias)``:

    S = S * exp(dt' a) + dt' x B^T
    y = S C + skip x,  times silu(gate)

Source: Dao and Gu 2024, "Transformers are SSMs", arXiv:2405.21060, sections 6, 7.

Shapes: `H` heads, `G` groups of B and C (`H` a multiple of `G`; group `g` serves
heads ``g * H / G`` and following), head dimension `P`, state dimension `D` up to
256, `N` sequences, `T` packed tokens, `S` slots. The pool is ``[S, H, P, D]`` with
any strides. `x`, `b`, `c` and `gate` are contiguous along their last dimension,
free elsewhere. See `hybrid_kernels` for slots, padding rows and rounding.

Matrix products of `prefill` take their operands in `b`'s type, with float32 sums.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybrid_kernels._common.checks import (
    check_last_contiguous,
    check_shape,
    on_gpu,
    require,
)
from hybrid_kernels._common.linear_checks import check_batch, check_drafts, check_heads
from hybrid_kernels.ssd import reference

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
        x: ``[T, H, P]``.
        dt: ``[T, H]``, before softplus.
        a: ``[H]``, negative.
        b: ``[T, G, D]``.
        c: ``[T, G, D]``.
        cu_seqlens: ``[N + 1]``, int32 or int64, starting at 0. Rows after the last
            sequence are padding; their output is unspecified.
        pool: ``[S, H, P, D]``.
        slots: ``[N]``, no repeats among the non-negative.
        skip: ``[H]`` or None.
        gate: ``[T, H, P]`` or None.
        bias: ``[H]`` or None, added to `dt` before softplus.
        has_initial: ``[N]`` bool; False starts from zeros whatever the slot
            holds. None means True for all.
        boundary_slots: ``[N, C]``; the state after ``64 * (c + 1)`` tokens of
            sequence `n` is also written to ``boundary_slots[n, c]``. Negative
            entries, and entries beyond the sequence, are skipped.
        round_boundaries: round the running state to the pool's type every 64
            tokens, so that resuming from a boundary gives the bits of one long
            prefill. Changes nothing for a float32 pool.
        out: ``[T, H, P]``, written if given.

    Returns:
        `out`, or a new tensor of `x`'s type.

    Raises:
        ValueError: if shapes or strides do not fit.
    """
    require(x.ndim == 3, f"x has {x.ndim} dimensions, expected 3")
    _check(x, dt, a, b, c, pool, skip, gate, bias)
    check_batch(cu_seqlens, slots, has_initial, boundary_slots)
    result = x.new_empty(x.shape) if out is None else out
    check_shape("out", result, tuple(x.shape))
    operands = (x, dt, a, b, c, skip, gate, bias, cu_seqlens, pool, slots)
    options = (has_initial, boundary_slots, round_boundaries, result)
    if on_gpu(x):
        from hybrid_kernels.ssd import triton

        triton.prefill(*operands, *options)
    else:
        reference.prefill(*operands, *options)
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
        x: ``[N, H, P]``.
        dt: ``[N, H]``, before softplus.
        a: ``[H]``, negative.
        b: ``[N, G, D]``.
        c: ``[N, G, D]``.
        pool: ``[S, H, P, D]``.
        slots: ``[N]``, no repeats among the non-negative.
        skip: ``[H]`` or None.
        gate: ``[N, H, P]`` or None.
        bias: ``[H]`` or None, added to `dt` before softplus.
        out: ``[N, H, P]``, written if given.

    Returns:
        `out`, or a new tensor of `x`'s type.

    Raises:
        ValueError: if shapes or strides do not fit.
    """
    require(x.ndim == 3, f"x has {x.ndim} dimensions, expected 3")
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
        x: ``[N, L, H, P]``.
        dt: ``[N, L, H]``, before softplus.
        a: ``[H]``, negative.
        b: ``[N, L, G, D]``.
        c: ``[N, L, G, D]``.
        pool: ``[S, H, P, D]``.
        slots: ``[N]``, the main state of each sequence; read only.
        draft_slots: ``[N, L]``; a negative entry keeps no state. For a chain
            ``slots[i]`` may be among row `i`; otherwise all slots differ.
        parents: ``[N, L]``, the draft each draft follows, -1 for the main state;
            parents come before children and keep their state in a slot. None
            means a chain.
        skip: ``[H]`` or None.
        gate: ``[N, L, H, P]`` or None.
        bias: ``[H]`` or None, added to `dt` before softplus.
        out: ``[N, L, H, P]``, written if given.

    Returns:
        `out`, or a new tensor of `x`'s type.

    Raises:
        ValueError: if shapes or strides do not fit.
    """
    require(x.ndim == 4, f"x has {x.ndim} dimensions, expected 4")
    _check(x, dt, a, b, c, pool, skip, gate, bias)
    check_drafts(x.shape[0], x.shape[1], slots, draft_slots, parents)
    result = x.new_empty(x.shape) if out is None else out
    check_shape("out", result, tuple(x.shape))
    operands = (x, dt, a, b, c, skip, gate, bias, pool, slots, draft_slots, parents)
    if on_gpu(x):
        from hybrid_kernels.ssd import triton

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
    check_heads(c, b, x, pool)
    check_shape("dt", dt, tuple(x.shape[:-1]))
    for name, vector in (("a", a), ("skip", skip), ("bias", bias)):
        if vector is not None:
            check_shape(name, vector, (x.shape[-2],))
    if gate is not None:
        check_shape("gate", gate, tuple(x.shape))
        check_last_contiguous("gate", gate)
