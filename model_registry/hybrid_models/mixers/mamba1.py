# SPDX-License-Identifier: Apache-2.0
"""Mamba-1 (Gu and Dao 2023, "Mamba", arXiv:2312.00752).

`T` tokens, `I` channels of one rank, `K` state dimensions, `W` taps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import ClassVar

import torch
from hybrid_kernels import selective_scan
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
class Mamba1Shape:
    """Of one layer, over all ranks."""

    hidden: int
    inner: int
    state: int
    taps: int
    dt_rank: int
    """Of what time steps are made of."""
    bias: bool = False
    """Of the projections."""
    conv_bias: bool = True
    norm_eps: float | None = None
    """Of norms of time steps, B and C, as Jamba has them; None without."""

    def state_tensors(self, placement: Placement) -> tuple[StateTensor, ...]:
        """The last inputs of the convolution, and the state of each channel."""
        inner = part(placement, self.inner)
        return (
            StateTensor((inner, self.taps - 1), placement.conv_dtype, is_conv=True),
            StateTensor((inner, self.state), placement.state_dtype),
        )


class Mamba1(nn.Module):
    """Tokens ``[T, hidden]`` to the same.

    Checkpoints have it as `in_proj` (x, gate), `conv1d`, `x_proj` (dt, B, C),
    `dt_proj`, `A_log`, `D` and `out_proj`; `RENAMES` has what they are called here.
    """

    MIXER: ClassVar[ModuleType] = selective
    """What runs a pass, of what `forward` gives the state layer."""
    RENAMES: ClassVar[Mapping[str, str]] = {".A_log": ".A", ".dt_proj.bias": ".dt_bias"}

    def __init__(self, shape: Mamba1Shape, kit: Kit, layer: int, name: str) -> None:
        """Build layer number `layer`.

        Raises:
            ValueError: if ranks cannot share its channels.
        """
        super().__init__()
        hidden, inner, state = shape.hidden, shape.inner, shape.state
        self.in_proj = kit.column(
            hidden, [inner, inner], name=f"{name}.in_proj", bias=shape.bias
        )
        self.conv1d = Convolution(kit, [inner], shape.taps, bias=shape.conv_bias)
        self.x_proj = kit.row(inner, shape.dt_rank + 2 * state, name=f"{name}.x_proj")
        self.dt_proj = kit.column(shape.dt_rank, [inner], name=f"{name}.dt_proj")
        self.dt_bias = sharded(kit, [inner], dtype=torch.float32)
        self.A = sharded(kit, [inner], (state,), dtype=torch.float32, of=minus_exp)
        self.D = sharded(kit, [inner], dtype=torch.float32)
        self._norm_eps = shape.norm_eps
        if shape.norm_eps is not None:
            self.dt_layernorm = kit.norm(shape.dt_rank, shape.norm_eps)
            self.b_layernorm = kit.norm(state, shape.norm_eps)
            self.c_layernorm = kit.norm(state, shape.norm_eps)
        self.out_proj = kit.row(inner, hidden, name=f"{name}.out_proj", bias=shape.bias)
        self._selected = [shape.dt_rank, state, state]
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
        x, gate = project(self.in_proj, hidden).chunk(2, dim=-1)
        return project(self.out_proj, self.states(x, gate))

    def _select(
        self, x: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Time steps ``[T, I]``, B and C ``[T, K]``, of what the convolution gives."""
        made = project(self.x_proj, x)
        if self._norm_eps is None:
            dt, b, c = torch.split(made, self._selected, dim=-1)
            dt = dt.contiguous()
        else:
            norms = self.dt_layernorm, self.b_layernorm, self.c_layernorm
            dt, b, c = norm_parts(made, norms, self._norm_eps)
        return project(self.dt_proj, dt), b, c

    def _mix(
        self,
        state_pass: StatePass,
        inputs: Sequence[torch.Tensor],
        pools: Sequence[torch.Tensor],
        out: torch.Tensor,
    ) -> None:
        """`kit.Mix` of inputs and gates, ``[T, I]``, or what else `MIXER` takes."""
        select: Select = self._select
        if self._goes_by_rows:
            select = in_place(select, len(out))
        weights = selective.Weights(
            kernels=selective_scan,
            convolution=self.conv1d.weight,
            bias=self.conv1d.bias,
            activation="silu",
            A=self.A,
            skip=self.D,
            dt_bias=self.dt_bias,
            select=select,
        )
        mix(self.MIXER, weights, state_pass, inputs, pools, out)
