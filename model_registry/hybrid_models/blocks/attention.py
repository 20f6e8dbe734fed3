# SPDX-License-Identifier: Apache-2.0
"""Grouped-query attention with rotary positions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hybrid_models.blocks.projection import project
from hybrid_models.kit import Kit, own_part_of_keys, part


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Of one layer, over all ranks."""

    hidden: int
    heads: int
    kv_heads: int
    head: int
    longest: int
    """Positions that the model was made for."""
    rope: Mapping[str, Any] | None = None
    """As transformers' `rope_parameters`; None without positions."""
    bias: bool = False
    """Of the projections to queries, keys and values."""
    out_bias: bool = False
    scale: float | None = None
    """By default ``head ** -0.5``."""
    window: int | None = None
    """Tokens that a token sees, itself counted; None for all."""


class Attention(nn.Module):
    """Tokens ``[T, hidden]`` at positions ``[T]`` to ``[T, hidden]``.

    Checkpoints have it as `q_proj`, `k_proj`, `v_proj` and `o_proj`.
    """

    def __init__(self, shape: AttentionShape, kit: Kit, layer: int, name: str) -> None:
        """Build layer number `layer`."""
        super().__init__()
        heads, kv_heads, head = shape.heads, shape.kv_heads, shape.head
        own = part(kit, heads) * head
        own_kv = own_part_of_keys(kit, kv_heads) * head
        self._sizes = [own, own_kv, own_kv]
        self.qkv_proj = kit.qkv(
            shape.hidden,
            head,
            heads,
            kv_heads,
            name=f"{name}.qkv_proj",
            bias=shape.bias,
        )
        self.o_proj = kit.row(
            heads * head, shape.hidden, name=f"{name}.o_proj", bias=shape.out_bias
        )
        self._rope = None
        if shape.rope is not None:
            self._rope = kit.rope(head, shape.rope, shape.longest)
        self.attn = kit.attention(
            layer,
            heads,
            kv_heads,
            head,
            scale=head**-0.5 if shape.scale is None else shape.scale,
            name=f"{name}.attn",
            window=shape.window,
        )

    def forward(self, positions: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Tokens ``[T, hidden]`` to the same."""
        q, k, v = torch.split(project(self.qkv_proj, hidden), self._sizes, dim=-1)
        q, k = self.prepare(q, k)
        if self._rope is not None:
            q, k = self._rope(positions, q.contiguous(), k.contiguous())
        return project(self.o_proj, self.attn(q, k, v))

    def prepare(
        self, q: torch.Tensor, k: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What is done to queries and keys before they are turned; nothing here."""
        return q, k
