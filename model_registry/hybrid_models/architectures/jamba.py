# SPDX-License-Identifier: Apache-2.0
"""Jamba: Mamba-1 layers, attention without positions in some of their places, and
experts in every few layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hybrid_models.architecture import numbers
from hybrid_models.blocks.attention import Attention, AttentionShape
from hybrid_models.blocks.experts import RoutedMLP
from hybrid_models.blocks.mlp import GatedMLP
from hybrid_models.blocks.residual import PreNormArchitecture, add_and_norm
from hybrid_models.kit import Kit, Placement, Routing, StateTensor
from hybrid_models.mixers.mamba1 import Mamba1, Mamba1Shape
from hybrid_models.weights import GATE_UP, QKV, Names


class Jamba(PreNormArchitecture):
    """`JambaForCausalLM`."""

    NAMES = Names(
        {**Mamba1.RENAMES, "model.final_layernorm.": "model.norm."},
        {**QKV, **GATE_UP},
        experts={"gate_proj": "gate", "up_proj": "up", "down_proj": "down"},
    )

    def build_layer(self, config: Any, kit: Kit, number: int, name: str) -> nn.Module:
        """One layer."""
        return Layer(config, kit, number, name)

    @classmethod
    def attention_layers(cls, config: Any) -> list[int]:
        """Every few layers."""
        return numbers(config.layers_block_type, "attention")

    @classmethod
    def state_layers(cls, config: Any) -> list[int]:
        """All others."""
        return numbers(config.layers_block_type, "mamba")

    @classmethod
    def state_tensors(
        cls, config: Any, placement: Placement
    ) -> tuple[StateTensor, ...]:
        """Those of Mamba-1."""
        return mamba1_shape(config).state_tensors(placement)


class Layer(nn.Module):
    """Mamba-1 or attention, then a feed-forward layer, each behind a norm."""

    def __init__(self, config: Any, kit: Kit, number: int, name: str) -> None:
        """Build layer `number`."""
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = kit.norm(hidden, eps)
        self.pre_ff_layernorm = kit.norm(hidden, eps)
        self.feed_forward = feed_forward(config, kit, number, f"{name}.feed_forward")
        self.has_attention = config.layers_block_type[number] == "attention"
        if self.has_attention:
            self.self_attn = Attention(
                attention_shape(config), kit, number, f"{name}.self_attn"
            )
        else:
            self.mamba = Mamba1(mamba1_shape(config), kit, number, f"{name}.mamba")

    def forward(
        self,
        positions: torch.Tensor,
        hidden: torch.Tensor,
        added: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `PreNormArchitecture` has it."""
        x, hidden = add_and_norm(self.input_layernorm, hidden, added)
        mixed = self.self_attn(positions, x) if self.has_attention else self.mamba(x)
        x, hidden = add_and_norm(self.pre_ff_layernorm, hidden, mixed)
        return hidden, self.feed_forward(x)


def feed_forward(config: Any, kit: Kit, number: int, name: str) -> nn.Module:
    """Of layer `number`: with experts in every few layers."""
    hidden, inner = config.hidden_size, config.intermediate_size
    count = config.layers_num_experts[number]
    if count == 1:
        return GatedMLP(kit, hidden, inner, name=name)
    routing = Routing(config.num_experts_per_tok, renormalise=False)
    return RoutedMLP(kit, number, hidden, inner, count, routing, name=name)


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
        norm_eps=config.rms_norm_eps,
    )


def attention_shape(config: Any) -> AttentionShape:
    """Of an attention layer."""
    heads = config.num_attention_heads
    return AttentionShape(
        hidden=config.hidden_size,
        heads=heads,
        kv_heads=config.num_key_value_heads,
        head=getattr(config, "head_dim", None) or config.hidden_size // heads,
        longest=config.max_position_embeddings,
    )
