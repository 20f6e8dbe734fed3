# SPDX-License-Identifier: Apache-2.0
"""What a model class needs of an engine: its layers, without its names for them.

Sizes are those of the whole model.  A kit cuts them among the ranks of tensor
parallelism, and tensors that pass between layers are one rank's.  `T` is the tokens of
a pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import nn

from hybrid_plugin.mixers.state_pass import StatePass


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One tensor of what a state layer keeps of a sequence, as one rank has it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_conv: bool = False
    """Whether it holds the last inputs of a convolution, ``[channels, inputs]``, and
    not a recurrence."""


class Placement(Protocol):
    """How a model lies on one rank, known before there is a model."""

    @property
    def ranks(self) -> int:
        """Ranks of tensor parallelism."""

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and of tokens between layers."""

    @property
    def conv_dtype(self) -> torch.dtype:
        """Of the states of convolutions."""

    @property
    def state_dtype(self) -> torch.dtype:
        """Of recurrent states, where the model does not fix it."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A `Placement` by its values."""

    ranks: int
    dtype: torch.dtype
    conv_dtype: torch.dtype
    state_dtype: torch.dtype


Elementwise = Callable[[torch.Tensor], torch.Tensor]
"""Of tokens ``[T, ...]``, each by itself."""

Choose = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Of a router's output ``[T, ...]``: weights ``[T, top]``, float32, and numbers of
experts, as many."""


@dataclass(frozen=True, slots=True)
class Routing:
    """How a token's experts are chosen, and weighed."""

    top: int
    """Experts of a token."""
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    """Makes scores of a router's logits."""
    renormalise: bool = True
    """Whether the weights of the chosen ones add up to one."""
    scale: float = 1.0
    """Of the weights, after that."""
    groups: int | None = None
    """Experts are chosen among those of the best groups; None for among all."""
    top_groups: int | None = None
    """Groups of a token."""
    bias: nn.Parameter | None = None
    """``[experts]``, float32: added to the scores by which experts are chosen, not to
    their weights."""
    choose: Choose | None = None
    """Does all of that itself, but for `top`; None for as the other fields say."""


class Mix(Protocol):
    """The part of a state layer that reads and writes states."""

    def __call__(
        self,
        state_pass: StatePass,
        inputs: Sequence[torch.Tensor],
        pools: Sequence[torch.Tensor],
        out: torch.Tensor,
    ) -> None:
        """Run a pass.  It may read weights, and is never part of a compiled graph.

        Args:
            state_pass: the sequences.
            inputs: what the layer gave, ``[T, ...]`` each.
            pools: ``[slots, *shape]`` for each `StateTensor`, with any strides.
            out: ``[T, width]``; written but for padding at the end, which is zero.  In
                a pass of single tokens alone, padding has slots, and is written too.
                What of it the pass calls `padding` may hold anything.
        """


@dataclass(frozen=True, slots=True)
class LatentShape:
    """Of attention over latent vectors, of which a token has one for all heads."""

    heads: int
    plain: int
    """Channels of a head's queries and keys that are not turned."""
    turned: int
    """Channels of them that are; those of keys are equal in all heads."""
    value: int
    """Channels of a head's values."""
    latent: int
    """Channels of the vector that keys and values are projections of."""

    @property
    def head(self) -> int:
        """Channels of a head's queries."""
        return self.plain + self.turned


Rope = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]
]
"""Positions ``[T]``, queries and keys ``[T, heads * head]`` to both, turned."""


class Kit(Placement, Protocol):
    """An engine's layers; one object for each model that is built.

    `name` is the full name of the layer's module, as checkpoints have it up to the
    renames of the architecture: engines look quantisation and adapters up by it.
    """

    @property
    def rank(self) -> int:
        """Of this process among `ranks`."""

    @property
    def goes_by_rows(self) -> bool:
        """Whether linear layers must be given all tokens of a pass, each in its row."""

    def embedding(self, vocabulary: int, hidden: int, *, name: str) -> nn.Module:
        """Token ids ``[T]`` to ``[T, hidden]``."""

    def head(
        self, vocabulary: int, hidden: int, *, name: str, tied: nn.Module | None = None
    ) -> nn.Module:
        """What the engine makes logits with.

        Args:
            vocabulary: number of tokens.
            hidden: size of the model.
            name: of the module.
            tied: the embedding whose weight it shares; None for one of its own.
        """

    def column(
        self,
        inner: int,
        outs: Sequence[int],
        *,
        name: str,
        bias: bool = False,
        whole: Sequence[bool] = (),
    ) -> nn.Module:
        """A projection ``[T, inner]`` to this rank's part of each of `outs`.

        Args:
            inner: size of the input.
            outs: sizes of the parts of the output, in order; the checkpoint may have
                one tensor for all of them, or one for each.
            name: of the module.
            bias: whether it has one.
            whole: for each part, whether every rank has all of it; no part by default.
        """

    def row(self, inner: int, out: int, *, name: str, bias: bool = False) -> nn.Module:
        """A projection of what `column` gives, ``[T, inner / ranks]``, to ``[T, out]``,
        summed over ranks."""

    def replicated(
        self, inner: int, out: int, *, name: str, bias: bool = False
    ) -> nn.Module:
        """A projection ``[T, inner]`` to ``[T, out]`` that every rank computes."""

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
        """Projections to queries, keys and values, side by side; where there are fewer
        key heads than ranks, several ranks have the same one."""

    def norm(self, size: int, eps: float, *, centred: bool = False) -> nn.Module:
        """RMS norm of the last dimension; `centred`: its weight is one less than the
        factor, as in Gemma.

        Given a second tensor as well, it normalises the sum of both, and returns that
        norm and the sum.  Engines do so in one kernel, and may write into both tensors.
        """

    def silu_gated(self) -> Elementwise:
        """``[T, 2 * n]`` to the product ``[T, n]`` of SiLU of the first half and the
        second half."""

    def rope(
        self,
        head: int,
        parameters: Mapping[str, Any],
        longest: int,
        *,
        neox: bool = True,
    ) -> Rope:
        """Rotary embedding.

        Args:
            head: size of a head.
            parameters: as transformers' `rope_parameters`, with `rope_theta`.
            longest: positions that the model was made for; a kit whose engine serves
                fewer needs no more.
            neox: whether halves of a head are turned against each other, and not
                neighbours.
        """

    def attention(
        self,
        layer: int,
        heads: int,
        kv_heads: int,
        head: int,
        *,
        scale: float,
        name: str,
        window: int | None = None,
        source: nn.Module | None = None,
    ) -> nn.Module:
        """Causal attention over the engine's cache: queries ``[T, heads * head]``, keys
        and values, of this rank, to ``[T, heads * head]``.

        Args:
            layer: number of the layer, whose cache it is.
            heads: of queries.
            kv_heads: of keys and values.
            head: size of a head.
            scale: of the products.
            name: of the module.
            window: tokens that a token sees, itself counted; None for all.
            source: attention of an earlier layer, with as many heads of keys, whose
                cache this layer reads; it keeps nothing itself, and its `forward` is
                given the keys and values that `source` was given in the pass.  None
                for a cache of its own.

        Raises:
            ValueError: if the engine's options forbid a shared cache.
        """

    def latent_attention(
        self,
        layer: int,
        shape: LatentShape,
        expand: nn.Module,
        *,
        scale: float,
        name: str,
    ) -> nn.Module:
        """Causal attention over latent vectors: queries ``[T, heads, head]`` of this
        rank, vectors ``[T, latent]`` and turned keys ``[T, turned]`` to ``[T, heads *
        value]``.

        Args:
            layer: number of the layer, whose cache it is.
            shape: over all ranks.
            expand: `column` of one part, from a vector to plain keys and values of
                each head, ``[heads * (plain + value)]``.
            scale: of the products.
            name: of the module.

        Raises:
            ValueError: if the kit has none.
        """

    def router(self, hidden: int, count: int, *, name: str) -> nn.Module:
        """A projection to logits of experts, ``[T, count]``, never quantised."""

    def experts(
        self,
        layer: int,
        hidden: int,
        inner: int,
        count: int,
        routing: Routing,
        *,
        name: str,
    ) -> nn.Module:
        """Gated feed-forward layers with SiLU: tokens ``[T, hidden]`` and logits of a
        router to ``[T, hidden]``, summed over ranks.

        The attribute `weights.EXPERTS` of the module takes tensors of a checkpoint.

        Args:
            layer: number of the layer.
            hidden: size of the model.
            inner: channels of an expert.
            count: experts.
            routing: of tokens to them.
            name: of the module.
        """

    def states(
        self,
        layer: int,
        tensors: Sequence[StateTensor],
        mix: Mix,
        *,
        width: int,
        name: str,
        captured: bool = False,
    ) -> nn.Module:
        """A state layer: inputs ``[T, ...]`` to ``[T, width]``, by `mix`.

        Args:
            layer: number of the layer, whose states they are.
            tensors: of a sequence.
            mix: what runs a pass; a method of the module that calls the layer.
            width: of the output, of this rank.
            name: of the module.
            captured: whether a CUDA graph may hold what `mix` does with prompts: that
                waits for no device, and what it launches goes by shapes alone.
                Prompts of a model with another layer run without graphs.
        """

    def layers(
        self, count: int, build: Callable[[int, str], nn.Module], *, name: str
    ) -> nn.ModuleList:
        """The layers of the model, each built by its number and its name."""

    def sum_over_ranks(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' tensors, on each of them."""


def part(placement: Placement, size: int) -> int:
    """What one rank has of a size.

    Raises:
        ValueError: if ranks cannot share it.
    """
    if size % placement.ranks:
        raise ValueError(
            f"tensor parallelism of {placement.ranks} does not divide {size} heads or "
            "channels of this model: use fewer ranks"
        )
    return size // placement.ranks


def own_part_of_keys(placement: Placement, kv_heads: int) -> int:
    """Heads of keys of one rank; several ranks have the same one where those are more.

    Raises:
        ValueError: if ranks cannot share them.
    """
    if placement.ranks > kv_heads and placement.ranks % kv_heads == 0:
        return 1
    return part(placement, kv_heads)
