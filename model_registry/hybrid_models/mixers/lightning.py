# SPDX-License-Identifier: Apache-2.0
"""Lightning attention (Qin et al. 2024, "Lightning Attention-2", arXiv:2401.04658):
linear attention with one constant decay for each head.

`T` tokens, `H` heads of `K` channels, of one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional

from hybrid_models.blocks.projection import project
from hybrid_models.blocks.wide_norm import WideNorm
from hybrid_models.kit import Kit, Placement, StateTensor, part
from hybrid_plugin.mixers import lightning
from hybrid_plugin.mixers.mixing import mix
from hybrid_plugin.mixers.state_pass import StatePass


@dataclass(frozen=True, slots=True)
class LightningShape:
    """Of one layer, over all ranks."""

    hidden: int
    heads: int
    head: int
    eps: float
    """Of the norm behind it."""

    def state_tensors(self, placement: Placement) -> tuple[StateTensor, ...]:
        """The state of each head.

        In float32: the slowest heads add up thousands of tokens.
        """
        heads = part(placement, self.heads)
        return (StateTensor((heads, self.head, self.head), torch.float32),)


class LightningAttention(nn.Module):
    """Tokens ``[T, hidden]`` to the same: MiniMax's block.

    Checkpoints have it as `qkv_proj`, with queries, keys and values of one head side by
    side, `output_gate`, `norm` and `out_proj`.
    """

    STACKED: ClassVar[Mapping[str, tuple[str, Any]]] = {
        "self_attn.qkv_proj": ("self_attn.in_proj", 0),
        "self_attn.output_gate": ("self_attn.in_proj", 1),
    }

    def __init__(
        self,
        shape: LightningShape,
        decays: Callable[[], torch.Tensor],
        kit: Kit,
        layer: int,
        name: str,
    ) -> None:
        """Build layer number `layer`.

        Args:
            shape: of the layer.
            decays: makes the log decay for each token of all heads, ``[heads]``.
            kit: of the engine.
            layer: its number.
            name: of the module.

        Raises:
            ValueError: if ranks cannot share its heads.
        """
        super().__init__()
        inner = shape.heads * shape.head
        self.in_proj = kit.column(
            shape.hidden, [3 * inner, inner], name=f"{name}.in_proj"
        )
        self.norm = WideNorm(kit, inner, shape.eps)
        self.out_proj = kit.row(inner, shape.hidden, name=f"{name}.out_proj")
        self._heads, self._head = part(kit, shape.heads), shape.head
        self._sizes = [3 * part(kit, inner), part(kit, inner)]
        own = decays().narrow(0, kit.rank * self._heads, self._heads)
        self.register_buffer("decay", own.float().contiguous(), persistent=False)
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
        qkv, gate = torch.split(project(self.in_proj, hidden), self._sizes, dim=-1)
        heads = functional.silu(qkv).view(-1, self._heads, 3 * self._head)
        normed = self.norm(self.states(*heads.chunk(3, dim=-1)))
        return project(self.out_proj, torch.sigmoid(gate) * normed)

    def _decay(self) -> torch.Tensor:
        found = self.decay
        assert isinstance(found, torch.Tensor)
        return found

    def _mix(
        self,
        state_pass: StatePass,
        inputs: Sequence[torch.Tensor],
        pools: Sequence[torch.Tensor],
        out: torch.Tensor,
    ) -> None:
        """`kit.Mix` of queries, keys and values, ``[T, H, K]`` each."""
        weights = lightning.Weights(decay=self._decay(), scale=1.0)
        heads = out.view(len(out), self._heads, -1)
        mix(lightning, weights, state_pass, inputs, pools, heads)
