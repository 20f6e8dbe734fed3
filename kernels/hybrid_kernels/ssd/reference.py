# SPDX-License-Identifier: Apache-2.0
"""Plain PyTorch Mamba-2; the CPU path.

The recurrence is `hybrid_kernels._common.linear`'s, with ``q = C, k = B, v = dt x``
and ``g = dt A``.
"""

from __future__ import annotations

import torch

from hybrid_kernels._common.linear import Operands, prefill, steps

__all__ = ["operands", "prefill", "steps"]


def operands(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    skip: torch.Tensor | None,
    gate: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
) -> Operands:
    """The layer as an instance of the shared recurrence."""
    return Operands(
        C,
        B,
        x,
        dt,
        A=A,
        dt_bias=dt_bias,
        scale_v=True,
        skip=skip,
        gate=gate,
        names=("C", "B", "x"),
    )
