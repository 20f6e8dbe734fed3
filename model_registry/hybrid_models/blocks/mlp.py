# SPDX-License-Identifier: Apache-2.0
"""A gated feed-forward layer."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from hybrid_models.blocks.projection import project
from hybrid_models.kit import Elementwise, Kit


class GatedMLP(nn.Module):
    """``down(act(gate(x)) * up(x))``, of tokens ``[T, hidden]``.

    Checkpoints have it as `gate_proj`, `up_proj` and `down_proj`.
    """

    def __init__(
        self,
        kit: Kit,
        hidden: int,
        inner: int,
        *,
        name: str,
        bias: bool = False,
        activation: Elementwise = functional.silu,
    ) -> None:
        """Build it with `inner` channels over all ranks."""
        super().__init__()
        self.gate_up_proj = kit.column(
            hidden, [inner, inner], name=f"{name}.gate_up_proj", bias=bias
        )
        self.down_proj = kit.row(inner, hidden, name=f"{name}.down_proj", bias=bias)
        is_silu = activation is functional.silu  # which engines multiply in one kernel
        self._gated = kit.silu_gated() if is_silu else _gated_by(activation)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens ``[T, hidden]`` to the same."""
        return project(self.down_proj, self._gated(project(self.gate_up_proj, x)))


def _gated_by(activation: Elementwise) -> Elementwise:
    """The same of another activation as `Kit.silu_gated`."""

    def gated(both: torch.Tensor) -> torch.Tensor:
        gate, up = both.chunk(2, dim=-1)
        return activation(gate) * up

    return gated
