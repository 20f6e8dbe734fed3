# SPDX-License-Identifier: Apache-2.0
"""Plain PyTorch linear attention with one decay per head; the CPU path.

The recurrence is `hybrid_kernels._common.linear`'s.
"""

from __future__ import annotations

import torch

from hybrid_kernels._common.checks import check_shape
from hybrid_kernels._common.linear import Operands, prefill, steps

__all__ = ["operands", "prefill", "steps"]


def operands(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    scale: float,
) -> Operands:
    """The layer as an instance of the shared recurrence."""
    if decay.ndim > 1:
        check_shape("decay", decay, tuple(v.shape[:-1]))
        return Operands(q, k, v, decay, scale=scale)
    check_shape("decay", decay, tuple(v.shape[-2:-1]))
    # A view with stride 0 over tokens: nothing is written out.
    return Operands(q, k, v, decay.expand(v.shape[:-1]), scale=scale)
