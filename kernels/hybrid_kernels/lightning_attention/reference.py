# SPDX-License-Identifier: Apache-2.0
"""Plain PyTorch linear attention with constant decay; the CPU path."""

from __future__ import annotations

import torch

from hybrid_kernels._common import linear


def prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    cu_seqlens: torch.Tensor,
    pool: torch.Tensor,
    slots: torch.Tensor,
    has_initial: torch.Tensor | None,
    boundary_slots: torch.Tensor | None,
    round_boundaries: bool,
    scale: float,
    out: torch.Tensor,
) -> None:
    """Chunk by chunk, vectorised over heads."""
    g = decay.expand(v.shape[:-1])
    linear.prefill(
        linear.tokens(q, k, v, g, None, scale=scale),
        cu_seqlens,
        pool,
        slots,
        has_initial,
        boundary_slots,
        round_boundaries,
        out,
    )


def steps(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    pool: torch.Tensor,
    slots: torch.Tensor,
    draft_slots: torch.Tensor,
    parents: torch.Tensor | None,
    scale: float,
    out: torch.Tensor,
) -> None:
    """One or more tokens per sequence, each from its parent's state."""
    g = decay.expand(v.shape[:-1])
    batch = linear.tokens(q, k, v, g, None, scale=scale)
    linear.steps(batch, pool, slots, draft_slots, parents, out)
