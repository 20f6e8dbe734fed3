# SPDX-License-Identifier: Apache-2.0
"""An RMS norm over channels that ranks share."""

from __future__ import annotations

import torch
from torch import nn

from hybrid_models.kit import Kit
from hybrid_models.sharding import sharded


class WideNorm(nn.Module):
    """``norm(x) * weight``, in float32, over the channels of all ranks."""

    def __init__(self, kit: Kit, size: int, eps: float) -> None:
        """Build it for `size` channels over all ranks.

        Raises:
            ValueError: if ranks cannot share them.
        """
        super().__init__()
        self.weight = sharded(kit, [size])
        self._kit, self._size, self._eps = kit, size, eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens ``[T, size / ranks]`` to the same."""
        wide = x.float()
        total = wide.square().sum(dim=-1, keepdim=True)
        if self._kit.ranks > 1:
            total = self._kit.sum_over_ranks(total)
        normed = wide * torch.rsqrt(total / self._size + self._eps)
        result: torch.Tensor = self.weight * normed.to(x.dtype)
        return result
