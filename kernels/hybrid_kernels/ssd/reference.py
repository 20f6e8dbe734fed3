# SPDX-License-Identifier: Apache-2.0
"""Plain PyTorch Mamba-2; the CPU path.

The recurrence is `hybrid_kernels._common.linear`'s, with ``q = C, k = B, v = dt x``
and ``g = dt a``.
"""

from __future__ import annotations

import torch

from hybrid_kernels._common.linear import Operands, prefill, steps

__all__ = ["operands", "prefill", "steps"]


def operands(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    skip: torch.Tensor | None,
    gate: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> Operands:
    """The layer as an instance of the shared recurrence."""
    return Operands(
        c,
        b,
        x,
        dt,
        rate=a,
        bias=bias,
        scale_v=True,
        skip=skip,
        gate=gate,
        names=("c", "b", "x"),
    )
