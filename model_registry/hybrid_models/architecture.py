# SPDX-License-Identifier: Apache-2.0
"""What a file of `architectures` defines: a decoder, and what engines ask of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from hybrid_models.kit import Kit, Placement, StateTensor
from hybrid_models.weights import Names


class Architecture(nn.Module):
    """A decoder: embedding, layers, norm.  The head is the engine's.

    Subclasses say what layers there are, and build one.  `config` is the model's
    configuration as transformers has it.
    """

    NAMES: ClassVar[Names] = Names()
    """How the checkpoint's names become those of parameters."""
    CONFIG: ClassVar[type[Any] | None] = None
    """Of the model, where transformers has none that takes what was published."""
    LONGEST: ClassVar[int] = 8192
    """Tokens of the longest sequences of its training, where configurations name none:
    SGLang takes it for the longest that it serves."""
    STATES: ClassVar[int] = 2
    """Number of tensors in `state_tensors`."""
    captures_prefills: ClassVar[bool] = False
    """Whether SGLang may capture graphs of prefills, with the state layers in them."""

    def __init__(self, config: Any, kit: Kit, *, name: str = "model") -> None:
        """Build the model, without weights.

        Args:
            config: of the model.
            kit: of the engine.
            name: of this module.

        Raises:
            ValueError: if ranks cannot share it.
        """
        super().__init__()
        self.embed_tokens = kit.embedding(
            config.vocab_size, config.hidden_size, name=f"{name}.embed_tokens"
        )
        self.layers = kit.layers(
            config.num_hidden_layers,
            lambda number, layer: self.build_layer(config, kit, number, layer),
            name=f"{name}.layers",
        )
        self.norm = self.build_norm(config, kit)

    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Hidden states ``[T, hidden]`` of tokens ``[T]`` at their positions ``[T]``.

        Args:
            ids: of the tokens.
            positions: of them in their sequences.
            embeds: ``[T, hidden]`` in the place of `ids`.
        """
        hidden = self.embed(ids, embeds)
        for layer in self.layers:
            hidden = layer(positions, hidden)
        result: torch.Tensor = self.norm(hidden)
        return result

    def embed(self, ids: torch.Tensor, embeds: torch.Tensor | None) -> torch.Tensor:
        """What the first layer takes, ``[T, hidden]``: of `embeds`, if given."""
        result: torch.Tensor = self.embed_tokens(ids) if embeds is None else embeds
        return result

    def build_layer(self, config: Any, kit: Kit, number: int, name: str) -> nn.Module:
        """One layer: positions ``[T]`` and tokens ``[T, hidden]`` to these."""
        raise NotImplementedError

    def build_norm(self, config: Any, kit: Kit) -> nn.Module:
        """What follows the layers."""
        return kit.norm(config.hidden_size, config.rms_norm_eps)

    @classmethod
    def attention_layers(cls, config: Any) -> Sequence[int]:
        """Numbers of the layers that keep keys and values of all tokens."""
        raise NotImplementedError

    @classmethod
    def state_layers(cls, config: Any) -> Sequence[int]:
        """Numbers of the layers that keep a state."""
        raise NotImplementedError

    @classmethod
    def state_tensors(
        cls, config: Any, placement: Placement
    ) -> tuple[StateTensor, ...]:
        """What each state layer keeps of a sequence."""
        raise NotImplementedError

    @classmethod
    def logit_cap(cls, config: Any) -> float | None:
        """Bound ``c`` of logits, ``c * tanh(logits / c)``; None without."""
        return None

    @classmethod
    def logit_scale(cls, config: Any) -> float:
        """Factor of the logits."""
        return 1.0


def numbers(kinds: Sequence[Any], *wanted: Any) -> list[int]:
    """Where in a list of kinds of layers some kinds are."""
    return [number for number, kind in enumerate(kinds) if kind in wanted]
