# SPDX-License-Identifier: Apache-2.0
"""Norms behind a state layer, which a gate multiplies."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from hybrid_kernels import gated_norm
from torch import nn
from torch.nn import functional

from hybrid_models.kit import Kit, part
from hybrid_models.sharding import plain, sharded

Activation = Callable[[torch.Tensor], torch.Tensor]
_NAMES: Mapping[Activation, str] = {functional.silu: "silu", torch.sigmoid: "sigmoid"}
"""What the kernel calls an activation."""


class GatedNorm(nn.Module):
    """``norm(x * silu(gate)) * weight``, in float32, by groups of channels.

    A group that is wider than what a rank has is normalised over all its ranks.
    """

    def __init__(self, kit: Kit, size: int, groups: int, eps: float) -> None:
        """Build it for `size` channels over all ranks, normalised in `groups` parts.

        Raises:
            ValueError: if a group lies on some of the ranks only.
        """
        super().__init__()
        self.weight = sharded(kit, [size])
        self._kit, self._eps = kit, eps
        self._spans_ranks = groups == 1 and kit.ranks > 1
        self._groups = 1 if self._spans_ranks else part(kit, groups)
        self._width = size // groups

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Tokens ``[T, size / ranks]`` to the same."""
        if self._spans_ranks or torch.compiler.is_compiling():  # which fuses it itself
            return self._by_steps(x, gate)
        x_groups, gate_groups = (
            one.view(len(one), self._groups, self._width) for one in (x, gate)
        )
        weight = self.weight.detach().view(self._groups, self._width)
        found = gated_norm.norm_of_gated(x_groups, gate_groups, weight, self._eps)
        return found.view(x.shape)

    def _by_steps(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """The same in PyTorch's operations."""
        gated = x.float() * functional.silu(gate.float())
        grouped = gated.view(*gated.shape[:-1], self._groups, -1)
        total = grouped.square().sum(dim=-1, keepdim=True)
        if self._spans_ranks:
            total = self._kit.sum_over_ranks(total)
        normed = grouped * torch.rsqrt(total / self._width + self._eps)
        result: torch.Tensor = self.weight * normed.view_as(gated).to(x.dtype)
        return result


class GatedHeadNorm(nn.Module):
    """``norm(x) * weight * act(gate)``, in float32, head by head.

    All heads have the same weight.  One kernel rounds once; with a compiler, or another
    activation, the weight multiplies what is rounded.
    """

    def __init__(
        self,
        kit: Kit,
        head: int,
        eps: float,
        activation: Activation = functional.silu,
        of: Callable[[torch.Tensor], torch.Tensor] = plain,
    ) -> None:
        """Build it for heads of `head` channels, with weights `of` the checkpoint's."""
        super().__init__()
        self.weight = sharded(kit, [head], whole=[True], of=of)
        self._head, self._eps, self._activation = head, eps, activation
        self._name = _NAMES.get(activation)

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Tokens ``[T, heads * head]`` to the same."""
        if self._name is None or torch.compiler.is_compiling():
            return self._by_steps(x, gate)
        x_heads, gate_heads = (
            one.view(len(one), x.shape[-1] // self._head, self._head)
            for one in (x, gate)
        )
        found = gated_norm.rms_norm(
            x_heads, gate_heads, self.weight.detach(), self._eps, activation=self._name
        )
        return found.view(x.shape)

    def _by_steps(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """The same in PyTorch's operations."""
        heads = x.float().view(len(x), -1, self._head)
        scale = torch.rsqrt(heads.square().mean(dim=-1, keepdim=True) + self._eps)
        normed = (self.weight * (heads * scale).to(x.dtype)).view_as(x)
        return (normed.float() * self._activation(gate.float())).to(x.dtype)
