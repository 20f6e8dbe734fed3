# SPDX-License-Identifier: Apache-2.0
"""Argument checks shared by the operations on the linear recurrence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybrid_kernels._common.checks import (
    check_flags,
    check_index,
    check_last_contiguous,
    check_shape,
    require,
)

if TYPE_CHECKING:
    import torch


def check_heads(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pool: torch.Tensor
) -> None:
    """Require ``[..., H, K]`` keys, ``[..., HV, V]`` values and a pool to fit.

    Raises:
        ValueError: if they do not.
    """
    require(
        q.ndim == k.ndim == v.ndim,
        f"q, k and v have {q.ndim}, {k.ndim} and {v.ndim} dimensions",
    )
    lead, (heads, depth) = tuple(v.shape[:-2]), k.shape[-2:]
    check_shape("q", q, (*lead, heads, depth))
    check_shape("k", k, (*lead, heads, depth))
    values, width = v.shape[-2:]
    require(
        heads > 0 and values % heads == 0,
        f"{values} value heads are no multiple of {heads} key heads",
    )
    require(depth <= 256, f"key dimension {depth} is above 256")
    check_shape("pool", pool, (pool.shape[0], values, width, depth))
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_last_contiguous(name, tensor)


def check_batch(
    cu_seqlens: torch.Tensor,
    slots: torch.Tensor,
    has_initial: torch.Tensor | None,
    boundary_slots: torch.Tensor | None,
) -> None:
    """Require the per-sequence tensors of a prefill to fit.

    Raises:
        ValueError: if they do not.
    """
    count = slots.numel()
    check_index("slots", slots, (count,))
    check_index("cu_seqlens", cu_seqlens, (count + 1,))
    if has_initial is not None:
        check_flags("has_initial", has_initial, (count,))
    if boundary_slots is not None:
        check_index("boundary_slots", boundary_slots, (count, boundary_slots.shape[1]))
        check_last_contiguous("boundary_slots", boundary_slots)


def check_drafts(
    rows: int,
    drafts: int,
    slots: torch.Tensor,
    draft_slots: torch.Tensor,
    parents: torch.Tensor | None,
) -> None:
    """Require the slot and parent tables of a verification to fit.

    Raises:
        ValueError: if they do not.
    """
    check_index("slots", slots, (rows,))
    check_index("draft_slots", draft_slots, (rows, drafts))
    if parents is not None:
        check_index("parents", parents, (rows, drafts))
