# SPDX-License-Identifier: Apache-2.0
"""Plain PyTorch; the CPU path."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch.nn import functional

ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "swish": functional.silu,
    "sigmoid": torch.sigmoid,
}
"""What a gate may go through, by name."""


def rms_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    activation: str,
    out: torch.Tensor,
) -> None:
    """See `hybrid_kernels.gated_norm.rms_norm`."""
    values = x.float()
    scale = torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    opened = ACTIVATIONS[activation](gate.float())
    out.copy_(values * scale * weight.float() * opened)


def norm_of_gated(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
) -> None:
    """See `hybrid_kernels.gated_norm.norm_of_gated`."""
    gated = x.float() * functional.silu(gate.float())
    scale = torch.rsqrt(gated.square().mean(-1, keepdim=True) + eps)
    out.copy_((gated * scale).to(x.dtype).float() * weight.float())
