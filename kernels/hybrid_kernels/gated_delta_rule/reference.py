# SPDX-License-Identifier: Apache-2.0
"""Plain PyTorch gated delta rule; the CPU path."""

from __future__ import annotations

import torch

from hybrid_kernels._common import linear


def prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    cu_seqlens: torch.Tensor,
    pool: torch.Tensor,
    slots: torch.Tensor,
    has_initial: torch.Tensor | None,
    boundary_slots: torch.Tensor | None,
    round_boundaries: bool,
    scale: float,
    normalise: bool,
    out: torch.Tensor,
) -> None:
    """Chunk by chunk, vectorised over heads."""
    batch = linear.tokens(q, k, v, g, beta, scale=scale, normalise=normalise)
    linear.prefill(
        batch,
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
    g: torch.Tensor,
    beta: torch.Tensor,
    rate: torch.Tensor | None,
    bias: torch.Tensor | None,
    pool: torch.Tensor,
    slots: torch.Tensor,
    draft_slots: torch.Tensor,
    parents: torch.Tensor | None,
    scale: float,
    normalise: bool,
    out: torch.Tensor,
) -> None:
    """One or more tokens per sequence, each from its parent's state."""
    if rate is not None:
        g, beta = gates(g, beta, rate, bias)
    batch = linear.tokens(q, k, v, g, beta, scale=scale, normalise=normalise)
    linear.steps(batch, pool, slots, draft_slots, parents, out)


def gates(
    a: torch.Tensor, b: torch.Tensor, rate: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log decay and beta from a layer's projections."""
    shifted = a.float() if bias is None else a.float() + bias.float()
    return rate.float() * linear.softplus(shifted), b.float().sigmoid()
