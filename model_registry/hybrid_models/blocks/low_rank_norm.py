# SPDX-License-Identifier: Apache-2.0
"""An RMS norm whose output gates itself through a few channels (GigaChat 3.5)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from hybrid_models.kit import Kit
from hybrid_models.sharding import plain, sharded


class LowRankNorm(nn.Module):
    """``y * factor * sigmoid(up(silu(down(y))))`` of a norm's ``y``, times a scale.

    Checkpoints have it as `weight`, `gate_up_projection` (which makes few channels) and
    `gate_down_projection`.
    """

    def __init__(
        self,
        kit: Kit,
        size: int,
        eps: float,
        *,
        rank: int,
        factor: float,
        of: Callable[[torch.Tensor], torch.Tensor] = plain,
        scale: float = 1.0,
    ) -> None:
        """Build it for `size` channels, with weights `of` the checkpoint's."""
        super().__init__()
        self.weight = sharded(kit, [size], whole=[True], dtype=torch.float32, of=of)
        self.gate_up_projection = _Matrix(kit, rank, size)
        self.gate_down_projection = _Matrix(kit, size, rank)
        self._eps, self._factor, self._scale = eps, factor, scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[T, size]`` to the same."""
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self._eps)
        y = (wide * scale * self.weight).to(x.dtype)
        few = functional.silu(self.gate_up_projection(y).float()).to(x.dtype)
        gate = torch.sigmoid(self.gate_down_projection(few).float()).to(x.dtype)
        return y * self._factor * gate * self._scale


class _Matrix(nn.Module):
    """A projection that every rank computes, never quantised."""

    def __init__(self, kit: Kit, out: int, inner: int) -> None:
        super().__init__()
        self.weight = sharded(kit, [out], (inner,), whole=[True])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight)
