# SPDX-License-Identifier: Apache-2.0
"""Plain PyTorch; the CPU path."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from hybrid_kernels.part_norm import Three


def rms_norms(x: torch.Tensor, weights: Three, eps: float) -> Three:
    """See `hybrid_kernels.part_norm.rms_norms`."""
    parts = torch.split(x, [len(one) for one in weights], dim=-1)
    first, second, third = (
        _rms_norm(part, weight, eps)
        for part, weight in zip(parts, weights, strict=True)
    )
    return first, second, third


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    values = x.float()
    scale = torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    normed = (values * scale).to(x.dtype)
    return (normed.float() * weight.float()).to(x.dtype).contiguous()
