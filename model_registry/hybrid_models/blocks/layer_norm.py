# SPDX-License-Identifier: Apache-2.0
"""A layer norm, which subtracts the mean and adds a bias."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from hybrid_models.kit import Kit
from hybrid_models.sharding import sharded


class LayerNorm(nn.Module):
    """Over the last dimension, of tokens in whatever type to the model's."""

    def __init__(self, kit: Kit, size: int, eps: float) -> None:
        """Build it for `size` channels, all of which every rank has."""
        super().__init__()
        self.weight = sharded(kit, [size], whole=[True])
        self.bias = sharded(kit, [size], whole=[True])
        self._eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[T, size]`` to the same."""
        x = x.to(self.weight.dtype)
        return functional.layer_norm(
            x, self.weight.shape, self.weight, self.bias, self._eps
        )
