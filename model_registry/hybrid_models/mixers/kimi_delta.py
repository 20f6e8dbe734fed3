# SPDX-License-Identifier: Apache-2.0
"""Kimi delta attention (Kimi Team 2025, "Kimi Linear", arXiv:2510.26692).

`T` tokens, `H` heads of `K` channels, each of which has a decay of its own; all of one
rank.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from hybrid_models.blocks.projection import project
from hybrid_models.kit import Kit
from hybrid_models.mixers.gated_delta_net import CONVOLUTIONS, DeltaNet, DeltaShape
from hybrid_plugin.mixers import kda


class KimiDelta(DeltaNet):
    """Tokens ``[T, hidden]`` to the same.

    Checkpoints have it as `q_proj`, `k_proj`, `v_proj`, a convolution for each of them,
    `b_proj` (write strength), `f_a_proj` and `f_b_proj` (decays), `g_a_proj` and
    `g_b_proj` (gate), `A_log`, `dt_bias`, `o_norm` and `o_proj`; `RENAMES` and
    `stacked` have what they are called here.
    """

    RULE: ClassVar[Any] = kda

    @staticmethod
    def stacked(name: str) -> dict[str, tuple[str, Any]]:
        """Modules of a checkpoint that are parts of one here.

        Args:
            name: of this module in a layer.
        """
        parts = {"in_proj": ("q_proj", "k_proj", "v_proj"), "conv1d": CONVOLUTIONS}
        return {
            f"{name}.{old}": (f"{name}.{new}", number)
            for new, olds in parts.items()
            for number, old in enumerate(olds)
        }

    def __init__(self, shape: DeltaShape, kit: Kit, layer: int, name: str) -> None:
        """Build layer number `layer`, with as many heads of keys as of values.

        Raises:
            ValueError: if ranks cannot share its heads.
        """
        super().__init__(shape, kit, layer, name)
        hidden, inner, width = shape.hidden, shape.key_head, shape.parts[2]
        self.in_proj = kit.column(hidden, shape.parts, name=f"{name}.in_proj")
        self.b_proj = kit.column(hidden, [shape.value_heads], name=f"{name}.b_proj")
        self.f_a_proj = kit.replicated(hidden, inner, name=f"{name}.f_a_proj")
        self.f_b_proj = kit.column(inner, [width], name=f"{name}.f_b_proj")
        self.g_a_proj = kit.replicated(hidden, inner, name=f"{name}.g_a_proj")
        self.g_b_proj = kit.column(inner, [width], name=f"{name}.g_b_proj")

    @staticmethod
    def decays(shape: DeltaShape) -> tuple[int, ...]:
        """One of each channel."""
        return (shape.key_head,)

    def projected(self, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Of decays and gates through the channels of a head."""
        decays = project(self.f_b_proj, project(self.f_a_proj, hidden))
        gate = project(self.g_b_proj, project(self.g_a_proj, hidden))
        return (
            project(self.in_proj, hidden),
            gate,
            decays.view(len(hidden), self._value_heads, -1),
            project(self.b_proj, hidden),
        )
