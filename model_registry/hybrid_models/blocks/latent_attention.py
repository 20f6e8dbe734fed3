# SPDX-License-Identifier: Apache-2.0
"""Attention over latent vectors (DeepSeek-V2, arXiv:2405.04434)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hybrid_models.blocks.projection import project
from hybrid_models.kit import Kit, LatentShape, Rope, part

BuildNorm = Callable[[int], nn.Module]
"""Of a number of latent channels."""


@dataclass(frozen=True, slots=True)
class LatentAttentionShape:
    """Of one layer, over all ranks."""

    hidden: int
    attention: LatentShape
    query_latent: int | None
    """Channels between two projections to queries; None for one projection."""
    longest: int
    """Positions that the model was made for."""
    rope: Mapping[str, Any] | None
    """As transformers' `rope_parameters`; None where nothing is turned."""
    neighbours: bool = False
    """Whether neighbours are turned against each other, and not halves."""
    bias: bool = False
    """Of projections to and from latent channels, and of the last one."""

    @property
    def scale(self) -> float:
        """Of the products; longer contexts than trained have sharper attention."""
        scale = float(self.attention.head**-0.5)
        if self.rope is None:
            return scale
        per_factor = self.rope.get("mscale_all_dim", 0)
        if self.rope["rope_type"] == "default" or not per_factor:
            return scale
        factor = self.rope["factor"]
        stretch = 1.0 if factor <= 1 else 0.1 * per_factor * math.log(factor) + 1.0
        return scale * stretch * stretch


class LatentAttention(nn.Module):
    """Tokens ``[T, hidden]`` at positions ``[T]`` to ``[T, hidden]``.

    Checkpoints have it as `q_proj`, or `q_a_proj`, `q_a_layernorm` and `q_b_proj`, and
    `kv_a_proj_with_mqa`, `kv_a_layernorm`, `kv_b_proj` and `o_proj`.
    """

    def __init__(
        self,
        shape: LatentAttentionShape,
        build_norm: BuildNorm,
        kit: Kit,
        layer: int,
        name: str,
    ) -> None:
        """Build layer number `layer`."""
        super().__init__()
        inner, hidden, bias = shape.attention, shape.hidden, shape.bias
        outs = [inner.heads * inner.head]
        self._inner, self._heads = inner, part(kit, inner.heads)
        if shape.query_latent is None:
            self.q_a_proj, self.q_a_layernorm = None, None
            self.q_proj = kit.column(hidden, outs, name=f"{name}.q_proj")
        else:
            size = shape.query_latent
            self.q_a_proj = kit.replicated(
                hidden, size, name=f"{name}.q_a_proj", bias=bias
            )
            self.q_a_layernorm = build_norm(size)
            self.q_b_proj = kit.column(size, outs, name=f"{name}.q_b_proj")
        self.kv_a_proj_with_mqa = kit.replicated(
            hidden,
            inner.latent + inner.turned,
            name=f"{name}.kv_a_proj_with_mqa",
            bias=bias,
        )
        self.kv_a_layernorm = build_norm(inner.latent)
        self.kv_b_proj = kit.column(
            inner.latent,
            [inner.heads * (inner.plain + inner.value)],
            name=f"{name}.kv_b_proj",
        )
        self.attn = kit.latent_attention(
            layer, inner, self.kv_b_proj, scale=shape.scale, name=f"{name}.attn"
        )
        self.o_proj = kit.row(
            inner.heads * inner.value, hidden, name=f"{name}.o_proj", bias=bias
        )
        self._rope: Rope | None = None
        if shape.rope is not None:
            self._rope = kit.rope(
                inner.turned, shape.rope, shape.longest, neox=not shape.neighbours
            )

    def forward(self, positions: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Tokens ``[T, hidden]`` to the same."""
        inner = self._inner
        q = self._queries(hidden).view(len(hidden), self._heads, inner.head)
        latent, turned = torch.split(
            project(self.kv_a_proj_with_mqa, hidden),
            [inner.latent, inner.turned],
            dim=-1,
        )
        turned = turned.contiguous()
        if self._rope is not None:
            plain, of_q = torch.split(q, [inner.plain, inner.turned], dim=-1)
            of_q, turned = self._rope(positions, of_q.reshape(len(q), -1), turned)
            q = torch.cat([plain, of_q.view(len(q), self._heads, -1)], dim=-1)
        latent = self.kv_a_layernorm(latent.contiguous())
        return project(self.o_proj, self.gated(hidden, self.attn(q, latent, turned)))

    def gated(self, hidden: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
        """What is done to ``[T, heads * value]`` before the last projection; nothing
        here."""
        return found

    def _queries(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.q_a_proj is None or self.q_a_layernorm is None:
            return project(self.q_proj, hidden)
        latent = self.q_a_layernorm(project(self.q_a_proj, hidden))
        return project(self.q_b_proj, latent)
