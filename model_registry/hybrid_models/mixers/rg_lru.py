# SPDX-License-Identifier: Apache-2.0
"""The recurrent block of Griffin (De et al. 2024, arXiv:2402.19427): a convolution and
a real-gated linear recurrent unit, beside a branch of their own that multiplies them.

Gates are block-diagonal, so ranks take whole blocks.  `T` tokens, `D` channels of one
rank in `B` blocks, `W` taps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional

from hybrid_models.blocks.convolution import Convolution
from hybrid_models.blocks.projection import project
from hybrid_models.kit import Kit, Placement, StateTensor, part
from hybrid_models.sharding import sharded
from hybrid_plugin.mixers import rg_lru
from hybrid_plugin.mixers.mixing import mix
from hybrid_plugin.mixers.state_pass import StatePass


@dataclass(frozen=True, slots=True)
class RecurrentShape:
    """Of one layer, over all ranks."""

    hidden: int
    width: int
    blocks: int
    """Of the gates."""
    taps: int

    def state_tensors(self, placement: Placement) -> tuple[StateTensor, ...]:
        """The last inputs of the convolution, and the state of each channel."""
        part(placement, self.blocks)  # whole blocks, or nothing
        width = part(placement, self.width)
        return (
            StateTensor((width, self.taps - 1), placement.conv_dtype, is_conv=True),
            StateTensor((width,), torch.float32),
        )


class RGLRU(nn.Module):
    """Tokens ``[T, hidden]`` to the same.

    Checkpoints have it as `linear_y`, `linear_x`, `conv_1d`, `rg_lru` with weights of
    two gates and `recurrent_param`, and `linear_out`.
    """

    STACKED: ClassVar[Mapping[str, tuple[str, Any]]] = {
        "linear_y": ("in_proj", 0),
        "linear_x": ("in_proj", 1),
    }

    def __init__(self, shape: RecurrentShape, kit: Kit, layer: int, name: str) -> None:
        """Build layer number `layer`.

        Raises:
            ValueError: if ranks cannot share the blocks of its gates.
        """
        super().__init__()
        width = shape.width
        self.in_proj = kit.column(
            shape.hidden, [width, width], name=f"{name}.in_proj", bias=True
        )
        self.conv_1d = Convolution(kit, [width], shape.taps, bias=True)
        self.rg_lru = _Unit(shape, kit)
        self.linear_out = kit.row(
            width, shape.hidden, name=f"{name}.linear_out", bias=True
        )
        self.states = kit.states(
            layer,
            shape.state_tensors(kit),
            self._mix,
            width=part(kit, width),
            name=f"{name}.states",
            captured=True,
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Tokens ``[T, hidden]`` to the same."""
        y, x = project(self.in_proj, hidden).chunk(2, dim=-1)
        branch = functional.gelu(y, approximate="tanh")
        return project(self.linear_out, self.states(x.contiguous()) * branch)

    def _mix(
        self,
        state_pass: StatePass,
        inputs: Sequence[torch.Tensor],
        pools: Sequence[torch.Tensor],
        out: torch.Tensor,
    ) -> None:
        """`kit.Mix` of ``[T, D]``."""
        weights = rg_lru.Weights(
            convolution=self.conv_1d.weight,
            bias=self.conv_1d.bias,
            activation=None,
            A=self.rg_lru.recurrent_param,
            gates=self.rg_lru.gates,
        )
        mix(rg_lru, weights, state_pass, inputs, pools, out)


class _Unit(nn.Module):
    """Weights of the unit's gates, and its decay."""

    def __init__(self, shape: RecurrentShape, kit: Kit) -> None:
        super().__init__()
        blocks, size = shape.blocks, shape.width // shape.blocks
        self.input_gate_weight = sharded(kit, [blocks], (size, size))
        self.input_gate_bias = sharded(kit, [blocks], (size,))
        self.recurrent_gate_weight = sharded(kit, [blocks], (size, size))
        self.recurrent_gate_bias = sharded(kit, [blocks], (size,))
        self.recurrent_param = sharded(
            kit, [shape.width], dtype=torch.float32, of=_decay_rate
        )

    def gates(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of input and recurrence, ``[T, D]``, before the logistic function."""
        blocks = x.view(len(x), *self.input_gate_bias.shape).transpose(0, 1)
        pairs = (
            (self.input_gate_weight, self.input_gate_bias),
            (self.recurrent_gate_weight, self.recurrent_gate_bias),
        )
        inputs, recurrence = (
            torch.baddbmm(bias[:, None], blocks, weight).transpose(0, 1).reshape_as(x)
            for weight, bias in pairs
        )
        return inputs, recurrence


def _decay_rate(loaded: torch.Tensor) -> torch.Tensor:
    """``A`` of the parameter Lambda: section 2.4 of the paper, with c = 8."""
    return -8.0 * functional.softplus(loaded)
