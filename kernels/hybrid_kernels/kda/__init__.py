# SPDX-License-Identifier: Apache-2.0
"""Kimi delta attention: the delta rule with one decay per key channel (Kimi Linear).

Per value head, with state ``S`` of shape ``[V, K]``:

    S = S * exp(g)                     one factor per column
    S = S + beta * (v - S k) k^T
    o = scale * S q

Source: Kimi Team 2025, "Kimi Linear: An Expressive, Efficient Attention
Architecture", arXiv:2510.26692.

Shapes: `H` key heads, `HV` value heads (a multiple of `H`; key head `h` serves
value heads ``h * HV / H`` and following), `K` up to 256, `V`, `N` sequences, `T`
packed tokens, `S` slots. The pool is ``[S, HV, V, K]`` with any strides. Queries,
keys and values are contiguous along their last dimension, free elsewhere. See
`hybrid_kernels` for slots, padding rows and rounding.

Matrix products of `prefill` take their operands in `k`'s type, with float32 sums:
bfloat16 inputs give bfloat16 accuracy, float32 inputs float32 accuracy.
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
from hybrid_kernels.kda import reference

if TYPE_CHECKING:
    import torch

__all__ = ["prefill", "update", "verify"]


def prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    cu_seqlens: torch.Tensor,
    pool: torch.Tensor,
    slots: torch.Tensor,
    *,
    has_initial: torch.Tensor | None = None,
    boundary_slots: torch.Tensor | None = None,
    round_boundaries: bool = False,
    scale: float | None = None,
    normalise: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run packed sequences and leave each one's state in its slot.

    Args:
        q: ``[T, H, K]``.
        k: ``[T, H, K]``.
        v: ``[T, HV, V]``.
        g: ``[T, HV, K]``, log decay, at most 0; contiguous along K.
        beta: ``[T, HV]``, between 0 and 1.
        cu_seqlens: ``[N + 1]``, int32 or int64, starting at 0. Rows after the last
            sequence are padding; their output is unspecified.
        pool: ``[S, HV, V, K]``.
        slots: ``[N]``, no repeats among the non-negative.
        has_initial: ``[N]`` bool; False starts from zeros whatever the slot
            holds. None means True for all.
        boundary_slots: ``[N, C]``; the state after ``64 * (c + 1)`` tokens of
            sequence `n` is also written to ``boundary_slots[n, c]``. Negative
            entries, and entries beyond the sequence, are skipped.
        round_boundaries: round the running state to the pool's type every 64
            tokens, so that resuming from a boundary gives the bits of one long
            prefill. Changes nothing for a float32 pool.
        scale: ``K ** -0.5`` if None.
        normalise: divide queries and keys by their 2-norm first.
        out: ``[T, HV, V]``, written if given.

    Returns:
        `out`, or a new tensor of `v`'s type.

    Raises:
        ValueError: if shapes or strides do not fit.
    """
    require(v.ndim == 3, f"v has {v.ndim} dimensions, expected 3")
    check_heads(q, k, v, pool)
    _check_decay(g, k, v)
    check_shape("beta", beta, tuple(v.shape[:2]))
    check_batch(cu_seqlens, slots, has_initial, boundary_slots)
    result = v.new_empty(v.shape) if out is None else out
    check_shape("out", result, tuple(v.shape))
    operands = (q, k, v, g, beta, cu_seqlens, pool, slots, has_initial)
    factor = k.shape[-1] ** -0.5 if scale is None else scale
    options = (boundary_slots, round_boundaries, factor, normalise, result)
    if on_gpu(v):
        from hybrid_kernels.kda import triton

        triton.prefill(*operands, *options)
    else:
        reference.prefill(*operands, *options)
    return result


def update(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    pool: torch.Tensor,
    slots: torch.Tensor,
    *,
    scale: float | None = None,
    normalise: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run one new token per sequence and advance its state in place.

    With `out` given nothing is allocated; the call can be captured.

    Args:
        q: ``[N, H, K]``.
        k: ``[N, H, K]``.
        v: ``[N, HV, V]``.
        g: ``[N, HV, K]``, log decay, at most 0; contiguous along K.
        beta: ``[N, HV]``.
        pool: ``[S, HV, V, K]``.
        slots: ``[N]``, no repeats among the non-negative.
        scale: ``K ** -0.5`` if None.
        normalise: divide queries and keys by their 2-norm first.
        out: ``[N, HV, V]``, written if given.

    Returns:
        `out`, or a new tensor of `v`'s type.

    Raises:
        ValueError: if shapes or strides do not fit.
    """
    require(v.ndim == 3, f"v has {v.ndim} dimensions, expected 3")
    result = v.new_empty(v.shape) if out is None else out
    check_shape("slots", slots, (v.shape[0],))
    verify(
        q[:, None],
        k[:, None],
        v[:, None],
        g[:, None],
        beta[:, None],
        pool,
        slots,
        slots[:, None],
        scale=scale,
        normalise=normalise,
        out=result[:, None],
    )
    return result


def verify(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    pool: torch.Tensor,
    slots: torch.Tensor,
    draft_slots: torch.Tensor,
    *,
    parents: torch.Tensor | None = None,
    scale: float | None = None,
    normalise: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run `L` draft tokens per sequence; the state after each gets its own slot.

    On a GPU the same bits as `update` when the path to a draft is replayed token
    by token. With `out` given nothing is allocated; the call can be captured.

    Args:
        q: ``[N, L, H, K]``.
        k: ``[N, L, H, K]``.
        v: ``[N, L, HV, V]``.
        g: ``[N, L, HV, K]``.
        beta: ``[N, L, HV]``.
        pool: ``[S, HV, V, K]``.
        slots: ``[N]``, the main state of each sequence; read only.
        draft_slots: ``[N, L]``; a negative entry keeps no state. For a chain
            ``slots[i]`` may be among row `i`; otherwise all slots differ.
        parents: ``[N, L]``, the draft each draft follows, -1 for the main state;
            parents come before children and keep their state in a slot. None
            means a chain.
        scale: ``K ** -0.5`` if None.
        normalise: divide queries and keys by their 2-norm first.
        out: ``[N, L, HV, V]``, written if given.

    Returns:
        `out`, or a new tensor of `v`'s type.

    Raises:
        ValueError: if shapes or strides do not fit.
    """
    require(v.ndim == 4, f"v has {v.ndim} dimensions, expected 4")
    check_heads(q, k, v, pool)
    _check_decay(g, k, v)
    check_shape("beta", beta, tuple(v.shape[:3]))
    check_drafts(v.shape[0], v.shape[1], slots, draft_slots, parents)
    result = v.new_empty(v.shape) if out is None else out
    check_shape("out", result, tuple(v.shape))
    factor = k.shape[-1] ** -0.5 if scale is None else scale
    operands = (q, k, v, g, beta, pool, slots, draft_slots, parents)
    if on_gpu(v):
        from hybrid_kernels.kda import triton

        triton.steps(*operands, factor, normalise, result)
    else:
        reference.steps(*operands, factor, normalise, result)
    return result


def _check_decay(g: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    check_shape("g", g, (*v.shape[:-1], k.shape[-1]))
    check_last_contiguous("g", g)
