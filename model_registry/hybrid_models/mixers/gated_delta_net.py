# SPDX-License-Identifier: Apache-2.0
"""Gated delta net (Yang, Kautz, Hatamizadeh 2024, "Gated Delta Networks",
arXiv:2412.06464).

`T` tokens, `H` key heads of `K` channels, `HV` value heads of `V`, `W` taps; all of one
rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from hybrid_models.blocks.convolution import Convolution
from hybrid_models.blocks.gated_norm import GatedHeadNorm
from hybrid_models.blocks.projection import project
from hybrid_models.kit import Kit, Placement, StateTensor, part
from hybrid_models.sharding import minus_exp, sharded
from hybrid_plugin.mixers import gated_delta_net
from hybrid_plugin.mixers.mixing import mix
from hybrid_plugin.mixers.state_pass import StatePass


@dataclass(frozen=True, slots=True)
class DeltaShape:
    """Of one layer, over all ranks."""

    hidden: int
    key_heads: int
    value_heads: int
    key_head: int
    value_head: int
    taps: int
    eps: float
    """Of the gated norm."""
    write_scale: float = 1.0
    """Of the write strength; 2 where eigenvalues may be negative."""

    @property
    def parts(self) -> list[int]:
        """Channels of queries, keys and values."""
        keys = self.key_heads * self.key_head
        return [keys, keys, self.value_heads * self.value_head]

    def state_tensors(self, placement: Placement) -> tuple[StateTensor, ...]:
        """The last inputs of the convolution, and the state of each value head."""
        channels = sum(part(placement, size) for size in self.parts)
        heads = part(placement, self.value_heads)
        return (
            StateTensor((channels, self.taps - 1), placement.conv_dtype, is_conv=True),
            StateTensor((heads, self.value_head, self.key_head), placement.state_dtype),
        )


_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "g_proj", "a_proj", "b_proj")
_CONVOLUTIONS = ("q_conv1d", "k_conv1d", "v_conv1d")


class GatedDeltaNet(nn.Module):
    """Tokens ``[T, hidden]`` to the same.

    Checkpoints have it as `q_proj`, `k_proj`, `v_proj`, `g_proj` (gate), `a_proj`
    (decay), `b_proj` (write strength), a convolution for each of the first three,
    `A_log`, `dt_bias`, `o_norm` and `o_proj`; `RENAMES` and `stacked` have what they
    are called here.
    """

    RENAMES: ClassVar[Mapping[str, str]] = {".A_log": ".A"}

    @staticmethod
    def stacked(name: str) -> dict[str, tuple[str, Any]]:
        """Modules of a checkpoint that are parts of one here.

        Args:
            name: of this module in a layer.
        """
        parts = {"in_proj": _PROJECTIONS, "conv1d": _CONVOLUTIONS}
        return {
            f"{name}.{old}": (f"{name}.{new}", number)
            for new, olds in parts.items()
            for number, old in enumerate(olds)
        }

    def __init__(self, shape: DeltaShape, kit: Kit, layer: int, name: str) -> None:
        """Build layer number `layer`.

        Raises:
            ValueError: if ranks cannot share its heads.
        """
        super().__init__()
        heads, parts = shape.value_heads, shape.parts
        outs = [*parts, parts[2], heads, heads]
        self.in_proj = kit.column(shape.hidden, outs, name=f"{name}.in_proj")
        self.conv1d = Convolution(kit, parts, shape.taps, bias=False)
        self.A = sharded(kit, [heads], dtype=torch.float32, of=minus_exp)
        self.dt_bias = sharded(kit, [heads], dtype=torch.float32)
        self.o_norm = GatedHeadNorm(kit, shape.value_head, shape.eps)
        self.o_proj = kit.row(parts[2], shape.hidden, name=f"{name}.o_proj")
        own, width = part(kit, heads), part(kit, parts[2])
        self._sizes = [self.conv1d.weight.shape[0], width, own, own]
        self._key_heads = part(kit, shape.key_heads)
        self._value_heads, self._write_scale = own, shape.write_scale
        self.states = kit.states(
            layer,
            shape.state_tensors(kit),
            self._mix,
            width=width,
            name=f"{name}.states",
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Tokens ``[T, hidden]`` to the same."""
        projected = project(self.in_proj, hidden)
        mixed, gate, a, b = torch.split(projected, self._sizes, dim=-1)
        # The kernels read these as they are; of others they take views.
        states = self.states(mixed, a.contiguous(), b.contiguous())
        return project(self.o_proj, self.o_norm(states, gate))

    def _mix(
        self,
        state_pass: StatePass,
        inputs: Sequence[torch.Tensor],
        pools: Sequence[torch.Tensor],
        out: torch.Tensor,
    ) -> None:
        """`kit.Mix` of queries, keys and values together, decays and write strengths.

        That is ``[T, 2 * H * K + HV * V]`` and twice ``[T, HV]``.
        """
        weights = gated_delta_net.Weights(
            convolution=self.conv1d.weight,
            bias=None,
            activation="silu",
            A=self.A,
            dt_bias=self.dt_bias,
            key_heads=self._key_heads,
            write_scale=self._write_scale,
        )
        heads = out.view(len(out), self._value_heads, -1)
        mix(gated_delta_net, weights, state_pass, inputs, pools, heads)
