# SPDX-License-Identifier: Apache-2.0
"""Mamba-2's recurrence behind Mamba-1's selection (PLaMo 2).

`T` tokens, `H` heads of `P` channels of one rank, `K` state dimensions, `W` taps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from hybrid_kernels import ssd
from torch import nn

from hybrid_models.blocks.convolution import Convolution
from hybrid_models.blocks.part_norm import norm_parts
from hybrid_models.blocks.projection import Select, in_place, project
from hybrid_models.kit import Kit, Placement, StateTensor, part
from hybrid_models.sharding import minus_exp, sharded
from hybrid_plugin.mixers import selective
from hybrid_plugin.mixers.mixing import mix
from hybrid_plugin.mixers.state_pass import StatePass


@dataclass(frozen=True, slots=True)
class SelectiveShape:
    """Of one layer, over all ranks."""

    hidden: int
    heads: int
    head: int
    state: int
    taps: int
    dt_rank: int
    """Of what time steps are made of."""
    eps: float
    """Of norms of time steps, B and C."""

    @property
    def inner(self) -> int:
        """Channels of all heads."""
        return self.heads * self.head

    def state_tensors(self, placement: Placement) -> tuple[StateTensor, ...]:
        """The last inputs of the convolution, and the state of each head."""
        heads = part(placement, self.heads)
        channels = heads * self.head
        return (
            StateTensor((channels, self.taps - 1), placement.conv_dtype, is_conv=True),
            StateTensor((heads, self.head, self.state), placement.state_dtype),
        )


class SelectiveSSD(nn.Module):
    """Tokens ``[T, hidden]`` to the same.

    Checkpoints have it as `in_proj` (gate and x of one head side by side), `conv1d`,
    `bcdt_proj` (B, C, dt), a weight of a norm for each of these, `dt_proj`, `dt_bias`,
    `A_log`, `D` and `out_proj`; `RENAMES` has what they are called here.
    """

    RENAMES: ClassVar[Mapping[str, str]] = {
        ".A_log": ".A",
        ".dt_norm_weight": ".dt_norm.weight",
        ".B_norm_weight": ".b_norm.weight",
        ".C_norm_weight": ".c_norm.weight",
    }

    def __init__(self, shape: SelectiveShape, kit: Kit, layer: int, name: str) -> None:
        """Build layer number `layer`.

        Raises:
            ValueError: if ranks cannot share its heads.
        """
        super().__init__()
        hidden, inner, state, rank = (
            shape.hidden,
            shape.inner,
            shape.state,
            shape.dt_rank,
        )
        self._heads = part(kit, shape.heads)
        self.in_proj = kit.column(hidden, [2 * inner], name=f"{name}.in_proj")
        self.conv1d = Convolution(kit, [inner], shape.taps, bias=False)
        self.bcdt_proj = kit.row(inner, 2 * state + rank, name=f"{name}.bcdt_proj")
        self.dt_proj = kit.column(rank, [shape.heads], name=f"{name}.dt_proj")
        self.dt_norm = kit.norm(rank, shape.eps)
        self.b_norm = kit.norm(state, shape.eps)
        self.c_norm = kit.norm(state, shape.eps)
        self.A = sharded(kit, [shape.heads], dtype=torch.float32, of=minus_exp)
        self.D = sharded(kit, [shape.heads], dtype=torch.float32)
        self.dt_bias = sharded(kit, [shape.heads], dtype=torch.float32)
        self.out_proj = kit.row(inner, hidden, name=f"{name}.out_proj")
        self._eps = shape.eps
        self._goes_by_rows = kit.goes_by_rows
        self.states = kit.states(
            layer,
            shape.state_tensors(kit),
            self._mix,
            width=part(kit, inner),
            name=f"{name}.states",
            captured=True,
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Tokens ``[T, hidden]`` to the same."""
        both = project(self.in_proj, hidden).view(len(hidden), self._heads, 2, -1)
        gate, x = (one.contiguous() for one in both.unbind(2))
        return project(self.out_proj, self.states(x.flatten(1), gate))

    def _select(
        self, x: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Time steps ``[T, H]``, B and C ``[T, 1, K]``, of what the convolution
        gives."""
        norms = self.b_norm, self.c_norm, self.dt_norm
        b, c, dt = norm_parts(project(self.bcdt_proj, x), norms, self._eps)
        return project(self.dt_proj, dt), b.unsqueeze(1), c.unsqueeze(1)

    def _mix(
        self,
        state_pass: StatePass,
        inputs: Sequence[torch.Tensor],
        pools: Sequence[torch.Tensor],
        out: torch.Tensor,
    ) -> None:
        """`kit.Mix` of inputs ``[T, H * P]`` and gates ``[T, H, P]``."""
        select: Select = self._select
        if self._goes_by_rows:
            select = in_place(select, len(out))
        weights = selective.Weights(
            kernels=ssd,
            convolution=self.conv1d.weight,
            bias=None,
            activation="silu",
            A=self.A,
            skip=self.D,
            dt_bias=self.dt_bias,
            select=select,
        )
        heads = out.view(len(out), self._heads, -1)
        mix(selective, weights, state_pass, inputs, pools, heads)
