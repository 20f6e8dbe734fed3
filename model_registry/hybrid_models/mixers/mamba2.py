# SPDX-License-Identifier: Apache-2.0
"""Mamba-2 (Dao and Gu 2024, "Transformers are SSMs", arXiv:2405.21060).

`T` tokens, `H` heads of `P` channels, `G` groups of `K` state dimensions, `W` taps; all
of one rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from hybrid_models.blocks.convolution import Convolution
from hybrid_models.blocks.gated_norm import GatedNorm
from hybrid_models.blocks.projection import project
from hybrid_models.kit import Kit, Placement, StateTensor, part
from hybrid_models.sharding import minus_exp, sharded
from hybrid_plugin.mixers import mamba2
from hybrid_plugin.mixers.mixing import mix
from hybrid_plugin.mixers.state_pass import StatePass


@dataclass(frozen=True, slots=True)
class Mamba2Shape:
    """Of one layer, over all ranks."""

    hidden: int
    heads: int
    head: int
    groups: int
    """Of B and C."""
    state: int
    taps: int
    eps: float
    """Of the gated norm."""
    bias: bool = False
    """Of the projections."""
    conv_bias: bool = True
    norm_groups: int = 1
    """Parts of the channels that are normalised apart."""
    least_step: float = 0.0
    """Bound of time steps, from below."""

    @property
    def inner(self) -> int:
        """Channels of all heads."""
        return self.heads * self.head

    def shares_groups(self, placement: Placement) -> bool:
        """Whether ranks share the groups: otherwise each of them has all."""
        return self.groups % placement.ranks == 0

    def own_groups(self, placement: Placement) -> int:
        """Groups of one rank."""
        if self.shares_groups(placement):
            return part(placement, self.groups)
        return self.groups

    def state_tensors(self, placement: Placement) -> tuple[StateTensor, ...]:
        """The last inputs of the convolution, and the state of each head."""
        heads = part(placement, self.heads)
        groups = self.own_groups(placement)
        channels = heads * self.head + 2 * groups * self.state
        return (
            StateTensor((channels, self.taps - 1), placement.conv_dtype, is_conv=True),
            StateTensor((heads, self.head, self.state), placement.state_dtype),
        )


class Mamba2(nn.Module):
    """Tokens ``[T, hidden]`` to the same.

    Checkpoints have it as `in_proj` (gate, x, B, C, dt), `conv1d`, `A_log`, `D`,
    `dt_bias`, `norm` and `out_proj`; `RENAMES` has what they are called here.
    """

    RENAMES: ClassVar[Mapping[str, str]] = {
        ".A_log": ".A",
    }

    def __init__(self, shape: Mamba2Shape, kit: Kit, layer: int, name: str) -> None:
        """Build layer number `layer`.

        Raises:
            ValueError: if ranks cannot share its heads, or its groups.
        """
        super().__init__()
        heads, inner = shape.heads, shape.inner
        groups = shape.groups * shape.state
        is_whole = not shape.shares_groups(kit)
        if is_whole and shape.groups != 1:
            raise ValueError(
                f"tensor parallelism of {kit.ranks} does not divide the {shape.groups} "
                "groups of this model's Mamba-2 layers: use fewer ranks"
            )
        parts, whole = [inner, groups, groups], [False, is_whole, is_whole]
        self.in_proj = kit.column(
            shape.hidden,
            [inner, *parts, heads],
            name=f"{name}.in_proj",
            bias=shape.bias,
            whole=[False, *whole, False],
        )
        self.conv1d = Convolution(
            kit, parts, shape.taps, bias=shape.conv_bias, whole=whole
        )
        self.A = sharded(kit, [heads], dtype=torch.float32, of=minus_exp)
        self.D = sharded(kit, [heads], dtype=torch.float32)
        self.dt_bias = sharded(kit, [heads], dtype=torch.float32)
        self._least = None
        if shape.least_step > 0:  # before softplus
            self._least = math.log(math.expm1(shape.least_step))
        self.norm = GatedNorm(kit, inner, shape.norm_groups, shape.eps)
        self.out_proj = kit.row(
            inner, shape.hidden, name=f"{name}.out_proj", bias=shape.bias
        )
        self._inner, self._heads = part(kit, inner), part(kit, heads)
        self._channels = self.conv1d.weight.shape[0]
        self.states = kit.states(
            layer,
            shape.state_tensors(kit),
            self._mix,
            width=self._inner,
            name=f"{name}.states",
            captured=True,
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Tokens ``[T, hidden]`` to the same."""
        sizes = [self._inner, self._channels, self._heads]
        gate, mixed, dt = torch.split(project(self.in_proj, hidden), sizes, dim=-1)
        if self._least is not None:
            dt = torch.maximum(dt.float(), self._least - self.dt_bias)
        return project(self.out_proj, self.norm(self.states(mixed, dt), gate))

    def _mix(
        self,
        state_pass: StatePass,
        inputs: Sequence[torch.Tensor],
        pools: Sequence[torch.Tensor],
        out: torch.Tensor,
    ) -> None:
        """`kit.Mix` of inputs ``[T, H * P + 2 * G * K]`` and time steps ``[T, H]``."""
        weights = mamba2.Weights(
            convolution=self.conv1d.weight,
            bias=self.conv1d.bias,
            activation="silu",
            A=self.A,
            skip=self.D,
            dt_bias=self.dt_bias,
        )
        heads = out.view(len(out), self._heads, -1)
        mix(mamba2, weights, state_pass, inputs, pools, heads)
