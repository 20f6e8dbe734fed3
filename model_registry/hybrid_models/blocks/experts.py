# SPDX-License-Identifier: Apache-2.0
"""A layer of experts with its router."""

from __future__ import annotations

import torch
from torch import nn

from hybrid_models.blocks.projection import project
from hybrid_models.kit import Kit, Routing


class RoutedMLP(nn.Module):
    """Gated feed-forward layers, a few of which each token of ``[T, hidden]`` takes.

    Checkpoints have it as `router` and `experts`.
    """

    def __init__(
        self,
        kit: Kit,
        layer: int,
        hidden: int,
        inner: int,
        count: int,
        routing: Routing,
        *,
        name: str,
    ) -> None:
        """Build it for layer number `layer`, with `inner` channels in each expert."""
        super().__init__()
        self.router = kit.router(hidden, count, name=f"{name}.router")
        self.experts = kit.experts(
            layer, hidden, inner, count, routing, name=f"{name}.experts"
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens ``[T, hidden]`` to the same."""
        result: torch.Tensor = self.experts(x, project(self.router, x))
        return result
