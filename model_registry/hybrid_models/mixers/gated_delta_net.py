# SPDX-License-Identifier: Apache-2.0
"""Gated delta net (Yang, Kautz, Hatamizadeh 2024, "Gated Delta Networks",
arXiv:2412.06464).

`T` tokens, `H` key heads of `K` channels, `HV` value heads of `V`, `W` taps; all of one
rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional

from hybrid_models.blocks.convolution import Convolution
from hybrid_models.blocks.gated_norm import Activation, GatedHeadNorm
from hybrid_models.blocks.projection import project
from hybrid_models.kit import Kit, Placement, StateTensor, part
from hybrid_models.sharding import minus_exp, plain, sharded
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
    gate: Activation = functional.silu
    """Of the gated norm."""
    norm_of: Callable[[torch.Tensor], torch.Tensor] = plain
    """Makes that norm's weight of what the checkpoint has."""
    state_dtype: torch.dtype | None = None
    """Of the recurrent state; None for what the engine is told."""

    @property
    def parts(self) -> list[int]:
        """Channels of queries, keys and values."""
        keys = self.key_heads * self.key_head
        return [keys, keys, self.value_heads * self.value_head]

    def state_tensors(self, placement: Placement) -> tuple[StateTensor, ...]:
        """The last inputs of the convolution, and the state of each value head."""
        channels = sum(part(placement, size) for size in self.parts)
        heads = part(placement, self.value_heads)
        kind = self.state_dtype or placement.state_dtype
        return (
            StateTensor((channels, self.taps - 1), placement.conv_dtype, is_conv=True),
            StateTensor((heads, self.value_head, self.key_head), kind),
        )


_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "g_proj", "a_proj", "b_proj")
CONVOLUTIONS = ("q_conv1d", "k_conv1d", "v_conv1d")
"""In checkpoints that have them one by one."""


class DeltaNet(nn.Module):
    """Tokens ``[T, hidden]`` to the same, but for the projections in front."""

    RENAMES: ClassVar[Mapping[str, str]] = {".A_log": ".A"}
    RULE: ClassVar[Any] = gated_delta_net
    """The module of `hybrid_plugin.mixers` that runs it."""

    def __init__(self, shape: DeltaShape, kit: Kit, layer: int, name: str) -> None:
        """Build layer number `layer`.

        Raises:
            ValueError: if ranks cannot share its heads.
        """
        super().__init__()
        heads, parts = shape.value_heads, shape.parts
        self.conv1d = Convolution(kit, parts, shape.taps, bias=False)
        self.A = sharded(kit, [heads], dtype=torch.float32, of=minus_exp)
        self.dt_bias = sharded(kit, [heads], self.decays(shape), dtype=torch.float32)
        self.o_norm = GatedHeadNorm(
            kit, shape.value_head, shape.eps, shape.gate, shape.norm_of
        )
        self.o_proj = kit.row(parts[2], shape.hidden, name=f"{name}.o_proj")
        self._key_heads, self._value_heads = (
            part(kit, shape.key_heads),
            part(kit, heads),
        )
        self._write_scale = shape.write_scale
        self.states = kit.states(
            layer,
            shape.state_tensors(kit),
            self._mix,
            width=part(kit, parts[2]),
            name=f"{name}.states",
            captured=True,
        )

    @staticmethod
    def decays(shape: DeltaShape) -> tuple[int, ...]:
        """How many decays a head has, as dimensions; one here."""
        return ()

    def projected(self, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Queries, keys and values together, gates, decays and write strengths, of
        tokens ``[T, hidden]``."""
        raise NotImplementedError

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Tokens ``[T, hidden]`` to the same."""
        mixed, gate, a, b = self.projected(hidden)
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

        That is ``[T, 2 * H * K + HV * V]``, ``[T, HV, *decays]`` and ``[T, HV]``.
        """
        weights = self.RULE.Weights(
            convolution=self.conv1d.weight,
            bias=None,
            activation="silu",
            A=self.A,
            dt_bias=self.dt_bias,
            key_heads=self._key_heads,
            write_scale=self._write_scale,
        )
        heads = out.view(len(out), self._value_heads, -1)
        mix(self.RULE, weights, state_pass, inputs, pools, heads)


class GatedDeltaNet(DeltaNet):
    """One with a projection for each of its inputs.

    Checkpoints have it as `q_proj`, `k_proj`, `v_proj`, `g_proj` (gate), `a_proj`
    (decay), `b_proj` (write strength), a convolution for each of the first three,
    `A_log`, `dt_bias`, `o_norm` and `o_proj`; `RENAMES` and `stacked` have what they
    are called here.
    """

    @staticmethod
    def stacked(name: str) -> dict[str, tuple[str, Any]]:
        """Modules of a checkpoint that are parts of one here.

        Args:
            name: of this module in a layer.
        """
        parts = {"in_proj": _PROJECTIONS, "conv1d": CONVOLUTIONS}
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
        super().__init__(shape, kit, layer, name)
        heads, parts = shape.value_heads, shape.parts
        outs = [*parts, parts[2], heads, heads]
        self.in_proj = kit.column(shape.hidden, outs, name=f"{name}.in_proj")
        own = part(kit, heads)
        self._sizes = [self.conv1d.weight.shape[0], part(kit, parts[2]), own, own]

    def projected(self, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Parts of one projection."""
        return torch.split(project(self.in_proj, hidden), self._sizes, dim=-1)


class PackedDeltaNet(DeltaNet):
    """One whose projections are those of Qwen3-Next, key head by key head.

    Checkpoints have it as `in_proj_qkvz`, `in_proj_ba`, `conv1d`, `A_log`, `dt_bias`,
    `norm` and `out_proj`; `RENAMES` and `renames` have what they are called here.
    """

    @staticmethod
    def renames(name: str) -> dict[str, str]:
        """Of a module called `name` in a layer."""
        olds = {"norm": "o_norm", "out_proj": "o_proj"}
        return {f".{name}.{old}.": f".{name}.{new}." for old, new in olds.items()}

    def __init__(self, shape: DeltaShape, kit: Kit, layer: int, name: str) -> None:
        """Build layer number `layer`.

        Raises:
            ValueError: if ranks cannot share its heads.
        """
        super().__init__(shape, kit, layer, name)
        keys, values = shape.parts[1:]
        self.in_proj_qkvz = kit.column(
            shape.hidden, [2 * (keys + values)], name=f"{name}.in_proj_qkvz"
        )
        self.in_proj_ba = kit.column(
            shape.hidden, [2 * shape.value_heads], name=f"{name}.in_proj_ba"
        )
        wide = shape.value_heads // shape.key_heads * shape.value_head
        self._sizes = [shape.key_head, shape.key_head, wide, wide]

    def projected(self, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What is of one kind, of all heads."""
        count, heads = len(hidden), self._key_heads
        packed = project(self.in_proj_qkvz, hidden).view(count, heads, -1)
        *qkv, gate = torch.split(packed, self._sizes, dim=-1)
        mixed = torch.cat([x.reshape(count, -1) for x in qkv], dim=-1)
        both = project(self.in_proj_ba, hidden).view(count, heads, 2, -1)
        b, a = (x.reshape(count, -1) for x in both.unbind(2))
        return mixed, gate.reshape(count, -1), a, b
