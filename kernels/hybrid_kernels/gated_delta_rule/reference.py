# SPDX-License-Identifier: Apache-2.0
"""Plain PyTorch gated delta rule; the CPU path.

The recurrence is `hybrid_kernels._common.linear`'s, with one decay per head.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from hybrid_kernels._common.linear import Operands, prefill, steps

__all__ = ["gates", "operands", "prefill", "steps"]


def operands(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    A: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    scale: float | None,
    use_qk_l2norm: bool,
) -> Operands:
    """The layer as an instance of the shared recurrence."""
    return Operands(
        q,
        k,
        v,
        g,
        beta,
        A=A,
        dt_bias=dt_bias,
        scale=k.shape[-1] ** -0.5 if scale is None else scale,
        use_qk_l2norm=use_qk_l2norm,
    )


def gates(
    a: torch.Tensor, b: torch.Tensor, A: torch.Tensor, dt_bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log decay and beta from a layer's projections."""
    shifted = a.float() if dt_bias is None else a.float() + dt_bias.float()
    return A.float() * functional.softplus(shifted), b.float().sigmoid()
