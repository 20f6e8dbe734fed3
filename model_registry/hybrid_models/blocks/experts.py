# SPDX-License-Identifier: Apache-2.0
"""Layers of experts with their router."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from hybrid_models.blocks.mlp import GatedMLP
from hybrid_models.blocks.projection import project
from hybrid_models.kit import Kit, Routing
from hybrid_models.sharding import sharded


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


class BalancedMLP(RoutedMLP):
    """One whose experts are chosen by scores and a bias, beside experts that all tokens
    take (DeepSeek-V3, arXiv:2412.19437).

    Checkpoints have `e_score_correction_bias` and `shared_experts` besides.
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
        shared: int,
        name: str,
    ) -> None:
        """Build it for layer number `layer`; `shared` experts are all tokens'."""
        bias = sharded(kit, [count], dtype=torch.float32, whole=[True])
        routing = replace(routing, bias=bias)
        super().__init__(kit, layer, hidden, inner, count, routing, name=name)
        self.e_score_correction_bias = bias
        self.shared_experts = None
        if shared:
            self.shared_experts = GatedMLP(
                kit, hidden, inner * shared, name=f"{name}.shared_experts"
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens ``[T, hidden]`` to the same."""
        found = super().forward(x)
        return found if self.shared_experts is None else found + self.shared_experts(x)
