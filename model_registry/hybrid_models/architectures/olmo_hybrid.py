# SPDX-License-Identifier: Apache-2.0
"""OLMo-Hybrid: gated delta nets, and attention in every few layers.

State layers have their norms before the blocks, attention layers behind them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hybrid_models.architecture import Architecture, numbers
from hybrid_models.blocks.attention import Attention, AttentionShape
from hybrid_models.blocks.mlp import GatedMLP
from hybrid_models.blocks.wide_norm import WideNorm
from hybrid_models.kit import Kit, Placement, StateTensor
from hybrid_models.mixers.gated_delta_net import DeltaShape, GatedDeltaNet
from hybrid_models.weights import GATE_UP, QKV, Names

GATED_NORM_EPS = 1e-5
"""Of the norm behind a delta net, which the configuration does not give."""


class OlmoHybrid(Architecture):
    """`OlmoHybridForCausalLM`."""

    NAMES = Names(
        {
            **GatedDeltaNet.RENAMES,
            ".attention_layer_norm.": ".input_layernorm.",
            ".feedforward_layer_norm.": ".post_attention_layernorm.",
        },
        {**GatedDeltaNet.stacked("linear_attn"), **QKV, **GATE_UP},
    )

    def build_layer(self, config: Any, kit: Kit, number: int, name: str) -> nn.Module:
        """One layer."""
        if config.layer_types[number] == "full_attention":
            return AttentionLayer(config, kit, number, name)
        return StateLayer(config, kit, number, name)

    @classmethod
    def attention_layers(cls, config: Any) -> list[int]:
        """As the configuration has them."""
        return numbers(config.layer_types, "full_attention")

    @classmethod
    def state_layers(cls, config: Any) -> list[int]:
        """Likewise."""
        return numbers(config.layer_types, "linear_attention")

    @classmethod
    def state_tensors(
        cls, config: Any, placement: Placement
    ) -> tuple[StateTensor, ...]:
        """Those of the gated delta net."""
        return delta_shape(config).state_tensors(placement)


class StateLayer(nn.Module):
    """A delta net, then a feed-forward layer, each behind a norm."""

    def __init__(self, config: Any, kit: Kit, number: int, name: str) -> None:
        """Build layer `number`."""
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = kit.norm(hidden, eps)
        self.post_attention_layernorm = kit.norm(hidden, eps)
        self.linear_attn = GatedDeltaNet(
            delta_shape(config), kit, number, f"{name}.linear_attn"
        )
        self.mlp = GatedMLP(kit, hidden, config.intermediate_size, name=f"{name}.mlp")

    def forward(self, positions: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Tokens ``[T, hidden]`` to the same."""
        hidden = hidden + self.linear_attn(self.input_layernorm(hidden))
        result: torch.Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return result


class AttentionLayer(nn.Module):
    """Attention, then a feed-forward layer, each before a norm."""

    def __init__(self, config: Any, kit: Kit, number: int, name: str) -> None:
        """Build layer `number`."""
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = NormedAttention(config, kit, number, f"{name}.self_attn")
        self.post_attention_layernorm = kit.norm(hidden, eps)
        self.mlp = GatedMLP(kit, hidden, config.intermediate_size, name=f"{name}.mlp")
        self.post_feedforward_layernorm = kit.norm(hidden, eps)

    def forward(self, positions: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Tokens ``[T, hidden]`` to the same."""
        mixed = self.self_attn(positions, hidden)
        hidden = hidden + self.post_attention_layernorm(mixed)
        result: torch.Tensor = hidden + self.post_feedforward_layernorm(
            self.mlp(hidden)
        )
        return result


class NormedAttention(Attention):
    """Attention with norms of all queries together, and of all keys."""

    def __init__(self, config: Any, kit: Kit, number: int, name: str) -> None:
        """Build layer `number`."""
        shape = attention_shape(config)
        super().__init__(shape, kit, number, name)
        eps = config.rms_norm_eps
        self.q_norm = WideNorm(kit, shape.heads * shape.head, eps)
        self.k_norm = WideNorm(kit, shape.kv_heads * shape.head, eps)

    def prepare(
        self, q: torch.Tensor, k: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Their norms."""
        return self.q_norm(q), self.k_norm(k)


def delta_shape(config: Any) -> DeltaShape:
    """Of a state layer."""
    return DeltaShape(
        hidden=config.hidden_size,
        key_heads=config.linear_num_key_heads,
        value_heads=config.linear_num_value_heads,
        key_head=config.linear_key_head_dim,
        value_head=config.linear_value_head_dim,
        taps=config.linear_conv_kernel_dim,
        eps=GATED_NORM_EPS,
        write_scale=2.0 if config.linear_allow_neg_eigval else 1.0,
    )


def attention_shape(config: Any) -> AttentionShape:
    """Of an attention layer; published models have no positions."""
    heads, rope = config.num_attention_heads, config.rope_parameters or {}
    return AttentionShape(
        hidden=config.hidden_size,
        heads=heads,
        kv_heads=config.num_key_value_heads,
        head=getattr(config, "head_dim", None) or config.hidden_size // heads,
        longest=config.max_position_embeddings,
        rope=None if rope.get("rope_theta") is None else rope,
        bias=config.attention_bias,
        out_bias=config.attention_bias,
    )
