# SPDX-License-Identifier: Apache-2.0
"""What the kits of both engines share: layers of the same names and arguments.

Engines' adapters replace linear layers by their type, so that each is an engine's own
class.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import nn

from hybrid_models.kit import Elementwise, Placed, own_part_of_keys, part
from hybrid_models.tiling import tile

Build: TypeAlias = Callable[..., nn.Module]


@dataclass(frozen=True, slots=True)
class EngineLayers:
    """An engine's classes."""

    embedding: Build
    column: Build
    """Of a size and a list of sizes."""
    row: Build
    replicated: Build
    qkv: Build
    norm: Build
    centred_norm: Build
    silu_gated: Build
    linear_options: Mapping[str, Any] = field(default_factory=dict)
    """That each linear layer is given besides."""


class EngineKit:
    """The part of a `hybrid_models.kit.Kit` that is alike in both engines."""

    def __init__(
        self, layers: EngineLayers, placed: Placed, rank: int, quantisation: Any
    ) -> None:
        """For one model.

        Args:
            layers: of the engine.
            placed: how the model lies on a rank.
            rank: of tensor parallelism.
            quantisation: the engine's; None without.
        """
        self._layers = layers
        self._quantisation = quantisation
        self.dtype = placed.dtype
        self.conv_dtype = placed.conv_dtype
        self.state_dtype = placed.state_dtype
        self.ranks = placed.ranks
        self.rank = rank
        self.goes_by_rows = False

    def embedding(self, vocabulary: int, hidden: int, *, name: str) -> nn.Module:
        """The engine's, cut along the vocabulary."""
        return self._layers.embedding(
            vocabulary, hidden, quant_config=self._quantisation, prefix=name
        )

    def column(
        self,
        inner: int,
        outs: Sequence[int],
        *,
        name: str,
        bias: bool = False,
        whole: Sequence[bool] = (),
    ) -> nn.Module:
        """The engine's, of all parts together.

        Raises:
            ValueError: if ranks cannot share a part.
        """
        for out, is_whole in zip(outs, whole or [False] * len(outs), strict=True):
            if not is_whole:
                part(self, out)
        return tile(
            self.ranks,
            outs,
            whole,
            lambda sizes: self._layers.column(
                inner, sizes, **self._linear(name, bias=bias)
            ),
        )

    def row(self, inner: int, out: int, *, name: str, bias: bool = False) -> nn.Module:
        """The engine's.

        Raises:
            ValueError: if ranks cannot share its input.
        """
        part(self, inner)
        return self._layers.row(inner, out, **self._linear(name, bias=bias))

    def replicated(
        self, inner: int, out: int, *, name: str, bias: bool = False
    ) -> nn.Module:
        """The engine's."""
        return self._layers.replicated(inner, out, **self._linear(name, bias=bias))

    def qkv(
        self,
        hidden: int,
        head: int,
        heads: int,
        kv_heads: int,
        *,
        name: str,
        bias: bool = False,
    ) -> nn.Module:
        """The engine's.

        Raises:
            ValueError: if ranks cannot share heads of queries, or of keys.
        """
        part(self, heads)
        own_part_of_keys(self, kv_heads)
        return self._layers.qkv(
            hidden, head, heads, kv_heads, **self._linear(name, bias=bias)
        )

    def router(self, hidden: int, count: int, *, name: str) -> nn.Module:
        """The engine's, in full precision."""
        options = self._linear(name, bias=False) | {"quant_config": None}
        return self._layers.replicated(hidden, count, **options)

    def norm(self, size: int, eps: float, *, centred: bool = False) -> nn.Module:
        """The engine's, of Gemma if centred."""
        layers = self._layers
        return (layers.centred_norm if centred else layers.norm)(size, eps=eps)

    def silu_gated(self) -> Elementwise:
        """The engine's."""
        return self._layers.silu_gated()

    def _linear(self, name: str, *, bias: bool) -> dict[str, Any]:
        """What every linear layer is given."""
        return {
            "bias": bias,
            "quant_config": self._quantisation,
            "prefix": name,
            **self._layers.linear_options,
        }
