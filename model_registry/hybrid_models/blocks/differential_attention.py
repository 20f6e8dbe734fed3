# SPDX-License-Identifier: Apache-2.0
"""Differential attention (Ye et al. 2024, "Differential Transformer",
arXiv:2410.05258).

Heads of queries, keys and values come in pairs.  Both queries of a pair weigh the
values of both heads, each by its own head of keys; of the two results the difference is
taken.

An engine's attention does that in one call, in which a pair of key heads is one head of
twice the width: the first query of a pair has zeros behind it, the second one before
it, so that each meets its own half of the keys alone.  Keys and values stay as they
are, and a cache holds as many bytes of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from hybrid_models.blocks.projection import project
from hybrid_models.kit import Kit, own_part_of_keys, part
from hybrid_models.sharding import sharded

NORM_EPS = 1e-5
"""Of the norm of differences, which no configuration gives."""
KeysAndValues = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class DifferentialShape:
    """Of one layer, over all ranks."""

    hidden: int
    heads: int
    kv_heads: int
    head: int
    window: int | None = None
    """Tokens that a token sees, itself counted; None for all."""

    def __post_init__(self) -> None:
        """Require pairs.

        Raises:
            ValueError: for a number of heads that is odd.
        """
        if self.heads % 2 or self.kv_heads % 2:
            raise ValueError(
                f"differential attention pairs heads: {self.heads} of queries and "
                f"{self.kv_heads} of keys cannot all be paired"
            )


class DifferentialAttention(nn.Module):
    """Tokens ``[T, hidden]`` to the same.

    Checkpoints have it as `Wqkv` (queries alone where a layer reads the keys and values
    of another one), `out_proj`, and below `inner_cross_attn` `subln` and four vectors
    `lambda`.
    """

    attn: nn.Module
    """What another layer may have as its source."""

    def __init__(
        self,
        shape: DifferentialShape,
        kit: Kit,
        layer: int,
        name: str,
        source: DifferentialAttention | None = None,
    ) -> None:
        """Build layer number `layer`.

        Args:
            shape: of it.
            kit: of the engine.
            layer: its number.
            name: of this module.
            source: the layer whose keys and values it reads; None for its own.

        Raises:
            ValueError: if ranks cannot share the pairs of heads.
        """
        super().__init__()
        hidden, head, pair = shape.hidden, shape.head, 2 * shape.head
        pairs, kv_pairs = shape.heads // 2, shape.kv_heads // 2
        own = part(kit, pairs) * pair
        own_kv = own_part_of_keys(kit, kv_pairs) * pair
        self._sizes = [own, own_kv, own_kv]
        place = f"{name}.qkv_proj"
        if source is None:
            self.qkv_proj = kit.qkv(
                hidden, pair, pairs, kv_pairs, name=place, bias=True
            )
        else:
            self.qkv_proj = kit.column(hidden, [pairs * pair], name=place, bias=True)
        self.out_proj = kit.row(
            pairs * pair, hidden, name=f"{name}.out_proj", bias=True
        )
        self.attn = kit.attention(
            layer,
            shape.heads,
            kv_pairs,
            pair,
            scale=head**-0.5,
            name=f"{name}.attn",
            window=shape.window,
            source=None if source is None else source.attn,
        )
        self.inner_cross_attn = Difference(kit, head, layer)
        self._head = head

    def forward(
        self, hidden: torch.Tensor, known: KeysAndValues | None = None
    ) -> tuple[torch.Tensor, KeysAndValues]:
        """Tokens ``[T, hidden]`` to the same, and the keys and values ``[T, ...]``.

        Args:
            hidden: the tokens.
            known: what the layer that this one reads gave of them; None where it makes
                its own.
        """
        q = project(self.qkv_proj, hidden)
        if known is None:
            q, *made = torch.split(q, self._sizes, dim=-1)
            known = made[0], made[1]
        found = self.attn(halved(q, self._head), *known)
        return project(self.out_proj, self.inner_cross_attn(found)), known


def halved(q: torch.Tensor, head: int) -> torch.Tensor:
    """Queries of pairs, each with zeros where the other one's keys are.

    Args:
        q: ``[T, heads * head]``.
        head: channels of a head.

    Returns:
        ``[T, heads * 2 * head]``.
    """
    pairs = q.view(len(q), q.shape[1] // (2 * head), 2, head)
    first, second = pairs.unbind(-2)
    both = functional.pad(first, (0, head)), functional.pad(second, (head, 0))
    return torch.stack(both, dim=-2).flatten(1)


class Difference(nn.Module):
    """``(1 - initial) * norm(first - factor * second)`` of the results of each pair.

    The factor is ``exp(q1 . k1) - exp(q2 . k2) + initial``, the same for all pairs of
    the layer; what it starts from depends on the layer's depth.
    """

    def __init__(self, kit: Kit, head: int, layer: int) -> None:
        """Build that of layer number `layer`, for heads of `head` channels."""
        super().__init__()
        self.lambda_q1, self.lambda_k1 = _vector(kit, head), _vector(kit, head)
        self.lambda_q2, self.lambda_k2 = _vector(kit, head), _vector(kit, head)
        self.subln = kit.norm(2 * head, NORM_EPS)
        self._initial = 0.8 - 0.6 * math.exp(-0.3 * layer)
        self._pair = 2 * head

    def forward(self, found: torch.Tensor) -> torch.Tensor:
        """``[T, heads * 2 * head]``, of this rank, to ``[T, heads * head]``."""
        rows, width = found.shape
        results = found.view(rows, width // (2 * self._pair), 2, self._pair)
        first, second = results.float().unbind(-2)
        difference = first - self._factor() * second
        flat = difference.to(found.dtype).view(-1, self._pair)
        normed: torch.Tensor = self.subln(flat).view(rows, width // 2)
        return normed * (1 - self._initial)

    def _factor(self) -> torch.Tensor:
        plus = torch.dot(self.lambda_q1, self.lambda_k1).exp()
        minus = torch.dot(self.lambda_q2, self.lambda_k2).exp()
        return plus - minus + self._initial


def _vector(kit: Kit, head: int) -> nn.Parameter:
    return sharded(kit, [head], dtype=torch.float32, whole=[True])
