# SPDX-License-Identifier: Apache-2.0
"""Linear attention with one constant decay per head (MiniMax-Text-01, Ling 2.5).

Per head, with state ``S`` of shape ``[V, K]``:

    S = S * exp(decay) + v k^T
    o = scale * S q

Sources: Qin et al. 2024, "Lightning Attention-2", arXiv:2401.04658; Sun et al.
2023, "Retentive Network", arXiv:2307.08621.

Shapes: `H` key heads, `HV` value heads (a multiple of `H`), `K` up to 256, `V`,
`N` sequences, `T` packed tokens, `S` slots. The pool is ``[S, HV, V, K]`` with any
strides. Queries, keys and values are contiguous along their last dimension, free
elsewhere. See `hybrid_kernels` for slots, padding rows and rounding.

Matrix products of `prefill` take their operands in `k`'s type, with float32 sums.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybrid_kernels._common.checks import check_shape, on_gpu, require
from hybrid_kernels._common.linear_checks import check_batch, check_drafts, check_heads
from hybrid_kernels.lightning_attention import reference

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
    round_boundaries: bool = False,
    scale: float = 1.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run packed sequences and leave each one's state in its slot.

    Args:
        q: ``[T, H, K]``.
        k: ``[T, H, K]``.
        v: ``[T, HV, V]``.
        decay: ``[HV]``, log decay per token, at most 0.
        cu_seqlens: ``[N + 1]``, int32 or int64, starting at 0. Rows after the last
            sequence are padding; their output is unspecified.
        pool: ``[S, HV, V, K]``.
        slots: ``[N]``, no repeats among the non-negative.
        has_initial: ``[N]`` bool; False starts from zeros. None: all True.
        boundary_slots: ``[N, C]``; the state after ``64 * (c + 1)`` tokens of
            sequence `n` is also written to ``boundary_slots[n, c]``. Negative
            entries, and entries beyond the sequence, are skipped.
        round_boundaries: round the running state to the pool's type every 64
            tokens, so that resuming from a boundary gives the bits of one long
            prefill. Changes nothing for a float32 pool.
        scale: multiplies the output.
        out: ``[T, HV, V]``, written if given.

    Returns:
        `out`, or a new tensor of `v`'s type.

    Raises:
        ValueError: if shapes or strides do not fit.
    """
    require(v.ndim == 3, f"v has {v.ndim} dimensions, expected 3")
    check_heads(q, k, v, pool)
    check_shape("decay", decay, (v.shape[1],))
    check_batch(cu_seqlens, slots, has_initial, boundary_slots)
    result = v.new_empty(v.shape) if out is None else out
    check_shape("out", result, tuple(v.shape))
    operands = (q, k, v, decay, cu_seqlens, pool, slots, has_initial)
    options = (boundary_slots, round_boundaries, scale, result)
    if on_gpu(v):
        from hybrid_kernels.lightning_attention import triton

        triton.prefill(*operands, *options)
    else:
        reference.prefill(*operands, *options)
    return result


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

    With `out` given nothing is allocated; the call can be captured.

    Args:
        q: ``[N, H, K]``.
        k: ``[N, H, K]``.
        v: ``[N, HV, V]``.
        decay: ``[HV]``.
        pool: ``[S, HV, V, K]``.
        slots: ``[N]``, no repeats among the non-negative.
        scale: multiplies the output.
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
        decay,
        pool,
        slots,
        slots[:, None],
        scale=scale,
        out=result[:, None],
    )
    return result


def verify(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    pool: torch.Tensor,
    slots: torch.Tensor,
    draft_slots: torch.Tensor,
    *,
    parents: torch.Tensor | None = None,
    scale: float = 1.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run `L` draft tokens per sequence; the state after each gets its own slot.

    On a GPU the same bits as `update` when the path to a draft is replayed token
    by token. With `out` given nothing is allocated; the call can be captured.

    Args:
        q: ``[N, L, H, K]``.
        k: ``[N, L, H, K]``.
        v: ``[N, L, HV, V]``.
        decay: ``[HV]``.
        pool: ``[S, HV, V, K]``.
        slots: ``[N]``, the main state of each sequence; read only.
        draft_slots: ``[N, L]``; a negative entry keeps no state. For a chain
            ``slots[i]`` may be among row `i`; otherwise all slots differ.
        parents: ``[N, L]``, the draft each draft follows, -1 for the main state;
            parents come before children and keep their state in a slot. None
            means a chain.
        scale: multiplies the output.
        out: ``[N, L, HV, V]``, written if given.

    Returns:
        `out`, or a new tensor of `v`'s type.

    Raises:
        ValueError: if shapes or strides do not fit.
    """
    require(v.ndim == 4, f"v has {v.ndim} dimensions, expected 4")
    check_heads(q, k, v, pool)
    check_shape("decay", decay, (v.shape[2],))
    check_drafts(v.shape[0], v.shape[1], slots, draft_slots, parents)
    result = v.new_empty(v.shape) if out is None else out
    check_shape("out", result, tuple(v.shape))
    operands = (q, k, v, decay, pool, slots, draft_slots, parents, scale, result)
    if on_gpu(v):
        from hybrid_kernels.lightning_attention import triton

        triton.steps(*operands)
    else:
        reference.steps(*operands)
    return result
