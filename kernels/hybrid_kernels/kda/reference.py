# SPDX-License-Identifier: Apache-2.0
"""Plain PyTorch Kimi delta attention; the CPU path.

The same recurrence as the gated delta rule; `hybrid_kernels._common.linear` tells
the two apart by the decay's last dimension.
"""

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
    linear.prefill(
        linear.tokens(q, k, v, g, beta, scale=scale, normalise=normalise),
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
    pool: torch.Tensor,
    slots: torch.Tensor,
    draft_slots: torch.Tensor,
    parents: torch.Tensor | None,
    scale: float,
    normalise: bool,
    out: torch.Tensor,
) -> None:
    """One or more tokens per sequence, each from its parent's state."""
    batch = linear.tokens(q, k, v, g, beta, scale=scale, normalise=normalise)
    linear.steps(batch, pool, slots, draft_slots, parents, out)
