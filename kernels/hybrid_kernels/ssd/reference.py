# SPDX-License-Identifier: Apache-2.0
"""Plain PyTorch Mamba-2; the CPU path."""

from __future__ import annotations

import torch
from torch.nn import functional

from hybrid_kernels._common import linear


def prefill(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    skip: torch.Tensor | None,
    gate: torch.Tensor | None,
    bias: torch.Tensor | None,
    cu_seqlens: torch.Tensor,
    pool: torch.Tensor,
    slots: torch.Tensor,
    has_initial: torch.Tensor | None,
    boundary_slots: torch.Tensor | None,
    round_boundaries: bool,
    out: torch.Tensor,
) -> None:
    """Chunk by chunk, vectorised over heads."""
    result = torch.zeros_like(x, dtype=torch.float32)
    linear.prefill(
        _tokens(x, dt, a, b, c, bias),
        cu_seqlens,
        pool,
        slots,
        has_initial,
        boundary_slots,
        round_boundaries,
        result,
    )
    out.copy_(_finish(result, x, skip, gate))


def steps(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    skip: torch.Tensor | None,
    gate: torch.Tensor | None,
    bias: torch.Tensor | None,
    pool: torch.Tensor,
    slots: torch.Tensor,
    draft_slots: torch.Tensor,
    parents: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """One or more tokens per sequence, each from its parent's state."""
    result = torch.zeros_like(x, dtype=torch.float32)
    batch = _tokens(x, dt, a, b, c, bias)
    linear.steps(batch, pool, slots, draft_slots, parents, result)
    out.copy_(_finish(result, x, skip, gate))


def _tokens(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    bias: torch.Tensor | None,
) -> linear.Tokens:
    time = linear.softplus(dt.float() if bias is None else dt.float() + bias.float())
    value = x.float() * time[..., None]
    return linear.tokens(c, b, value, time * a.float(), None, scale=1.0)


def _finish(
    result: torch.Tensor,
    x: torch.Tensor,
    skip: torch.Tensor | None,
    gate: torch.Tensor | None,
) -> torch.Tensor:
    if skip is not None:
        result = result + x.float() * skip.float()[:, None]
    return result if gate is None else result * functional.silu(gate.float())
