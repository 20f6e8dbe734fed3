# SPDX-License-Identifier: Apache-2.0
"""Phi-4-mini-flash: SambaY, a decoder whose second half reads what the first half keeps
(Ren et al. 2025, "Decoder-Hybrid-Decoder Architecture for Efficient Reasoning with Long
Generation", arXiv:2507.06607).

The self-decoder alternates Mamba-1 and differential attention over a window; its last
two layers are Mamba-1 and attention over all tokens.  The cross-decoder alternates
gated memory units, which take what the scan of the former gives, and attention over the
keys and values of the latter.  It keeps nothing itself.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional
from transformers import PretrainedConfig

from hybrid_models.architecture import Architecture, numbers
from hybrid_models.blocks.differential_attention import (
    DifferentialAttention,
    DifferentialShape,
)
from hybrid_models.blocks.layer_norm import LayerNorm
from hybrid_models.blocks.mlp import GatedMLP
from hybrid_models.blocks.projection import project
from hybrid_models.kit import Kit, Placement, StateTensor
from hybrid_models.mixers.mamba1 import Mamba1, Mamba1Shape
from hybrid_models.weights import Names
from hybrid_plugin.mixers import ungated

STATE, MEMORY = "mamba", "memory"
WINDOW, FULL = "window", "full"
UNIT, READER = "gated_memory", "reader"
READ = {UNIT: MEMORY, READER: FULL}
"""Kinds of layers in the cross-decoder, and of those that they read."""
DEFAULTS: dict[str, Any] = {
    "hidden_size": 2560,
    "layer_norm_eps": 1e-5,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_state": 16,
    "mamba_dt_rank": "auto",
    "mamba_expand": 2,
    "mamba_proj_bias": False,
    "mb_per_layer": 2,
    "mlp_bias": False,
    "num_attention_heads": 40,
    "num_hidden_layers": 32,
    "num_key_value_heads": 20,
    "sliding_window": 512,
    "tie_word_embeddings": True,
}
"""Of the configuration."""


class Config(PretrainedConfig):  # type: ignore[no-untyped-call]
    """Of the published checkpoints.

    Engines find in it what their caches hold: `num_key_value_heads` counts pairs of
    heads, and `head_dim` is the width of a pair.
    """

    model_type = "phi4flash"
    has_no_defaults_at_init = True

    def __init__(self, **given: Any) -> None:
        """Take what is given, and fill in the rest.

        Engines would take `sliding_window` for the window of every layer.

        Raises:
            ValueError: for layers in another order than the published.
        """
        filled = DEFAULTS | given
        if "attention_window_size" not in filled:  # as published, not as written by us
            filled["attention_window_size"] = filled["sliding_window"]
            filled["num_key_value_heads"] //= 2
            width = filled["hidden_size"] // filled["num_attention_heads"]
            filled["head_dim"] = 2 * width
        filled["sliding_window"] = None
        if filled["mamba_dt_rank"] == "auto":
            filled["mamba_dt_rank"] = -(-filled["hidden_size"] // 16)
        filled["layers_block_type"] = _kinds(filled)
        super().__init__(**filled)


class Phi4Flash(Architecture):
    """`Phi4FlashForCausalLM`."""

    NAMES = Names(
        {
            **Mamba1.RENAMES,
            ".Wqkv.": ".qkv_proj.",
            ".mlp.fc1.": ".mlp.gate_up_proj.",
            ".mlp.fc2.": ".mlp.down_proj.",
            "model.final_layernorm.": "model.norm.",
        }
    )
    CONFIG = Config

    def __init__(self, config: Any, kit: Kit, *, name: str = "model") -> None:
        """Build the model, without weights."""
        self._full: list[DifferentialAttention] = []
        super().__init__(config, kit, name=name)
        del self._full  # its layer has it
        self._kinds: list[str] = list(config.layers_block_type)

    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As of every architecture; the cross-decoder is given what it reads.

        Between layers tokens are float32, as the model was trained.
        """
        hidden = self.embed(ids, embeds).float()
        made: dict[str, Any] = {}
        for kind, layer in zip(self._kinds, self.layers, strict=True):
            read = [made[READ[kind]]] if kind in READ else []
            hidden, made[kind] = layer(hidden, *read)
        result: torch.Tensor = self.norm(hidden)
        return result

    def build_layer(self, config: Any, kit: Kit, number: int, name: str) -> nn.Module:
        """One layer."""
        kind = config.layers_block_type[number]
        place = f"{name}.attn"
        mixer: nn.Module
        if kind in (STATE, MEMORY):
            mixer = MemoryMamba(mamba1_shape(config), kit, number, place)
        elif kind == UNIT:
            mixer = GatedMemory(config, kit, place)
        else:
            source = self._full[0] if kind == READER else None
            shape = attention_shape(config, kind)
            mixer = DifferentialAttention(shape, kit, number, place, source)
            if kind == FULL:
                self._full.append(mixer)
        return Layer(config, kit, mixer, name)

    def build_norm(self, config: Any, kit: Kit) -> nn.Module:
        """With a mean and a bias."""
        return LayerNorm(kit, config.hidden_size, config.layer_norm_eps)

    @classmethod
    def attention_layers(cls, config: Any) -> list[int]:
        """Those of the self-decoder."""
        return numbers(config.layers_block_type, WINDOW, FULL)

    @classmethod
    def state_layers(cls, config: Any) -> list[int]:
        """Likewise."""
        return numbers(config.layers_block_type, STATE, MEMORY)

    @classmethod
    def state_tensors(
        cls, config: Any, placement: Placement
    ) -> tuple[StateTensor, ...]:
        """Those of Mamba-1."""
        return mamba1_shape(config).state_tensors(placement)


class Layer(nn.Module):
    """A mixer, then a feed-forward layer, each behind a norm."""

    def __init__(self, config: Any, kit: Kit, mixer: nn.Module, name: str) -> None:
        """Build it around a mixer."""
        super().__init__()
        hidden, eps = config.hidden_size, config.layer_norm_eps
        self.attn = mixer
        self.input_layernorm = LayerNorm(kit, hidden, eps)
        self.post_attention_layernorm = LayerNorm(kit, hidden, eps)
        self.mlp = GatedMLP(
            kit,
            hidden,
            config.intermediate_size,
            name=f"{name}.mlp",
            bias=config.mlp_bias,
        )

    def forward(self, hidden: torch.Tensor, *read: Any) -> tuple[torch.Tensor, Any]:
        """Tokens ``[T, hidden]`` to the same, and what later layers may read.

        Args:
            hidden: the tokens.
            read: what the mixer takes from an earlier layer.
        """
        mixed, kept = self.attn(self.input_layernorm(hidden), *read)
        hidden = hidden + mixed
        return hidden + self.mlp(self.post_attention_layernorm(hidden)), kept


class MemoryMamba(Mamba1):
    """Mamba-1 that hands out the output of its scan, before the gate."""

    MIXER: ClassVar[ModuleType] = ungated

    def forward(  # type: ignore[override]
        self, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens ``[T, hidden]`` to the same, and the memory ``[T, inner]``, of this
        rank."""
        x, gate = project(self.in_proj, hidden).chunk(2, dim=-1)
        memory = self.states(x)
        return project(self.out_proj, functional.silu(gate) * memory), memory


class GatedMemory(nn.Module):
    """``out(silu(in(x)) * memory)``, of tokens ``[T, hidden]``.

    Checkpoints have it as `in_proj` and `out_proj`.
    """

    def __init__(self, config: Any, kit: Kit, name: str) -> None:
        """Build it."""
        super().__init__()
        hidden, bias = config.hidden_size, config.mamba_proj_bias
        inner = config.mamba_expand * hidden
        self.in_proj = kit.column(hidden, [inner], name=f"{name}.in_proj", bias=bias)
        self.out_proj = kit.row(inner, hidden, name=f"{name}.out_proj", bias=bias)

    def forward(
        self, hidden: torch.Tensor, memory: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens ``[T, hidden]`` to the same, and the memory as it was."""
        gate = functional.silu(project(self.in_proj, hidden))
        return project(self.out_proj, gate * memory), memory


def mamba1_shape(config: Any) -> Mamba1Shape:
    """Of a state layer."""
    return Mamba1Shape(
        hidden=config.hidden_size,
        inner=config.mamba_expand * config.hidden_size,
        state=config.mamba_d_state,
        taps=config.mamba_d_conv,
        dt_rank=config.mamba_dt_rank,
        bias=config.mamba_proj_bias,
        conv_bias=config.mamba_conv_bias,
    )


def attention_shape(config: Any, kind: str) -> DifferentialShape:
    """Of an attention layer of some kind."""
    return DifferentialShape(
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=2 * config.num_key_value_heads,
        head=config.head_dim // 2,
        window=config.attention_window_size if kind == WINDOW else None,
    )


def _kinds(given: dict[str, Any]) -> list[str]:
    """Of layers.

    Raises:
        ValueError: if they would not be as in the published models.
    """
    count = given["num_hidden_layers"]
    if given["mb_per_layer"] != 2 or count % 4:
        raise ValueError(
            "Phi-4-mini-flash has a multiple of four layers, every second one a Mamba "
            f"layer: {count} of them with mb_per_layer {given['mb_per_layer']} are not "
            "served"
        )
    half = count // 2
    return (
        [STATE, WINDOW] * (half // 2)
        + [MEMORY, FULL]
        + [UNIT, READER] * (half // 2 - 1)
    )
