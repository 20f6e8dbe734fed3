# SPDX-License-Identifier: Apache-2.0
"""Compressed convolutional attention (https://arxiv.org/abs/2510.04476): queries, keys
and values that know the tokens before them.

Two convolutions run one behind the other over queries and keys: one by channels, one
that mixes the channels of a head.  Values take half of their channels from the token
before.  All of it is kept by two short convolutions: of queries and keys, one that
gives the first convolution at every token that the second one looks at; of values, one
that delays them.  `C` channels of queries and keys, `N` taps of the second convolution.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional

from hybrid_models.blocks.projection import project
from hybrid_models.kit import Kit, Placement, StateTensor, part
from hybrid_models.sharding import sharded
from hybrid_plugin.mixers import short_conv
from hybrid_plugin.mixers.mixing import mix
from hybrid_plugin.mixers.state_pass import StatePass


@dataclass(frozen=True, slots=True)
class ConvolvedShape:
    """Of one layer, over all ranks."""

    hidden: int
    heads: int
    kv_heads: int
    head: int
    first_taps: int
    """Of the convolution by channels."""
    second_taps: int
    """Of the one behind it."""

    @property
    def taps(self) -> int:
        """That both see together."""
        return self.first_taps + self.second_taps - 1

    @property
    def delayed(self) -> int:
        """Channels of values that are those of the token before."""
        return self.kv_heads * self.head // 2

    def sizes(self, placement: Placement) -> list[int]:
        """Channels of one rank's queries, and of its keys."""
        return [part(placement, n) * self.head for n in (self.heads, self.kv_heads)]

    def state_tensors(self, placement: Placement) -> tuple[StateTensor, ...]:
        """The last inputs of both short convolutions."""
        dtype = placement.conv_dtype
        channels = sum(self.sizes(placement)) * self.second_taps
        return (
            StateTensor((channels, self.taps - 1), dtype, is_conv=True),
            StateTensor((self.delayed, 1), dtype, is_conv=True),
        )


class ConvolvedQKV(nn.Module):
    """Tokens ``[T, hidden]`` to queries, keys and values, of this rank.

    Checkpoints have it as `q_proj`, `k_proj`, `v_proj_current`, `v_proj_delayed`,
    `conv_qk_depthwise` and `conv_qk_grouped`.
    """

    STACKED: ClassVar[Mapping[str, tuple[str, Any]]] = {
        "q_proj": ("in_proj", 0),
        "k_proj": ("in_proj", 1),
        "v_proj_current": ("in_proj", 2),
        "v_proj_delayed": ("in_proj", 3),
    }

    def __init__(self, shape: ConvolvedShape, kit: Kit, layer: int, name: str) -> None:
        """Build layer number `layer`.

        Raises:
            ValueError: if ranks cannot share its heads of keys.
        """
        super().__init__()
        self._head, self._taps = shape.head, shape.second_taps
        self._sizes = shape.sizes(kit)
        self._rank, self._halves = kit.rank, [shape.delayed, shape.delayed]
        channels = [shape.heads * shape.head, shape.kv_heads * shape.head]
        self.in_proj = kit.column(
            shape.hidden,
            [*channels, *self._halves],
            name=f"{name}.in_proj",
            whole=[False, False, True, True],
        )
        self.conv_qk_depthwise = _First(kit, channels, shape)
        self.conv_qk_grouped = _Second(kit, channels, shape)
        # A convolution that gives the input before.
        before = torch.tensor([1, 0], dtype=kit.dtype).repeat(shape.delayed, 1)
        self.register_buffer("_before", before, persistent=False)
        self._width = sum(self._sizes) * shape.second_taps
        self.states = kit.states(
            layer,
            shape.state_tensors(kit),
            self._mix,
            width=self._width + shape.delayed,
            name=f"{name}.states",
            captured=True,
        )

    def forward(
        self, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tokens ``[T, hidden]`` to ``[T, heads * head]`` each."""
        sizes = [sum(self._sizes), *self._halves]
        qk, now, before = torch.split(project(self.in_proj, hidden), sizes, dim=-1)
        repeated = qk.repeat_interleave(self._taps, dim=-1)
        convolved, before = torch.split(
            self.states(repeated, before.contiguous()),
            [self._width, sizes[2]],
            dim=-1,
        )
        q, k = self._residuals(qk)
        added = self.conv_qk_grouped(convolved) + torch.cat([q, k], dim=-1)
        q, k = torch.split(added, self._sizes, dim=-1)
        own = self._sizes[1]
        v = torch.cat([now, before], dim=-1).narrow(-1, self._rank * own, own)
        return q, k, v

    def _residuals(self, qk: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What is added to queries and keys: halves of them and of each other."""
        heads = qk.view(len(qk), -1, self._head)
        counts = [size // self._head for size in self._sizes]
        q, k = torch.split(heads, counts, dim=1)
        groups = counts[0] // counts[1]
        q = (q + k.repeat_interleave(groups, dim=1)) * 0.5
        k = q.view(len(qk), counts[1], groups, -1).mean(dim=2)
        return q.flatten(1), k.flatten(1)

    def _mix(
        self,
        state_pass: StatePass,
        inputs: Sequence[torch.Tensor],
        pools: Sequence[torch.Tensor],
        out: torch.Tensor,
    ) -> None:
        """`kit.Mix` of ``[T, C * N]`` and ``[T, D]``."""
        first = short_conv.Weights(
            self.conv_qk_depthwise.weight.flatten(0, 1),
            self.conv_qk_depthwise.bias.flatten(),
        )
        delay = short_conv.Weights(self.get_buffer("_before"), None)
        outs = out[:, : self._width], out[:, self._width :]
        mix(short_conv, first, state_pass, inputs[:1], pools[:1], outs[0])
        mix(short_conv, delay, state_pass, inputs[1:], pools[1:], outs[1])


class _First(nn.Module):
    """The convolution by channels, once for each token that the other one sees.

    ``weight [C, N, taps of both]`` and ``bias [C, N]``, made of the checkpoint's.
    """

    def __init__(
        self, kit: Kit, channels: Sequence[int], shape: ConvolvedShape
    ) -> None:
        super().__init__()
        count = shape.second_taps
        self.weight = sharded(
            kit, channels, (count, shape.taps), of=partial(_shifted, count=count)
        )
        self.bias = sharded(
            kit, channels, (count,), of=lambda bias: bias.expand(-1, count)
        )


class _Second(nn.Module):
    """The convolution that mixes a head's channels, of what `_First` gives."""

    def __init__(
        self, kit: Kit, channels: Sequence[int], shape: ConvolvedShape
    ) -> None:
        super().__init__()
        self.weight = sharded(kit, channels, (shape.head, shape.second_taps))
        self.bias = sharded(kit, channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[T, C * N]`` to ``[T, C]``."""
        head = self.weight.shape[1]
        weight = self.weight.view(-1, head, head * self.weight.shape[2])
        heads = x.reshape(len(x), weight.shape[0], -1).transpose(0, 1)
        bias = self.bias.view(-1, 1, head)
        mixed = torch.baddbmm(bias, heads, weight.transpose(1, 2))
        return mixed.transpose(0, 1).flatten(1)


def _shifted(weight: torch.Tensor, *, count: int) -> torch.Tensor:
    """``[n, taps]`` to ``[n, count, taps + count - 1]``: ever one token later."""
    return torch.stack(
        [functional.pad(weight, (late, count - 1 - late)) for late in range(count)],
        dim=1,
    )
