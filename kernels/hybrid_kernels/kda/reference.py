# SPDX-License-Identifier: Apache-2.0
"""Plain PyTorch Kimi delta attention; the CPU path.

The recurrence is `hybrid_kernels._common.linear`'s, with one decay per key channel:
it tells the two delta rules apart by the decay's dimensions.
"""

from __future__ import annotations

import torch

from hybrid_kernels._common.checks import require
from hybrid_kernels._common.linear import Operands, prefill, steps
from hybrid_kernels.gated_delta_rule import reference as scalar

__all__ = ["operands", "prefill", "steps"]


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
    require(g.ndim == v.ndim, f"the decay has {g.ndim} dimensions, expected {v.ndim}")
    return scalar.operands(q, k, v, g, beta, A, dt_bias, scale, use_qk_l2norm)
