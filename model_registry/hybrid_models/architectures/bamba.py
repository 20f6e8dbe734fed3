# SPDX-License-Identifier: Apache-2.0
"""Bamba: Mamba-2 layers, and attention in some of their places."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hybrid_models.blocks.attention import Attention, AttentionShape
from hybrid_models.blocks.mlp import GatedMLP
from hybrid_models.blocks.residual import PreNormArchitecture, add_and_norm
from hybrid_models.kit import Kit, Placement, StateTensor
from hybrid_models.mixers.mamba2 import Mamba2, Mamba2Shape
from hybrid_models.weights import GATE_UP, QKV, Names


class Bamba(PreNormArchitecture):
    """`BambaForCausalLM`."""

    NAMES = Names(
        {**Mamba2.RENAMES, "model.final_layernorm.": "model.norm."}, {**QKV, **GATE_UP}
    )

    def build_layer(self, config: Any, kit: Kit, number: int, name: str) -> nn.Module:
        """One layer."""
        return Layer(config, kit, number, name)

    @classmethod
    def attention_layers(cls, config: Any) -> list[int]:
        """As the configuration has them."""
        return sorted(config.attn_layer_indices or ())

    @classmethod
    def state_layers(cls, config: Any) -> list[int]:
        """All others."""
        attention = cls.attention_layers(config)
        return [n for n in range(config.num_hidden_layers) if n not in attention]

    @classmethod
    def state_tensors(
        cls, config: Any, placement: Placement
    ) -> tuple[StateTensor, ...]:
        """Those of Mamba-2."""
        return mamba2_shape(config).state_tensors(placement)


class Layer(nn.Module):
    """Mamba-2 or attention, then a feed-forward layer, each behind a norm."""

    def __init__(self, config: Any, kit: Kit, number: int, name: str) -> None:
        """Build layer `number`."""
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = kit.norm(hidden, eps)
        self.pre_ff_layernorm = kit.norm(hidden, eps)
        self.feed_forward = GatedMLP(
            kit,
            hidden,
            config.intermediate_size,
            name=f"{name}.feed_forward",
            bias=config.mlp_bias,
        )
        self.has_attention = number in Bamba.attention_layers(config)
        if self.has_attention:
            self.self_attn = Attention(
                attention_shape(config), kit, number, f"{name}.self_attn"
            )
        else:
            self.mamba = Mamba2(mamba2_shape(config), kit, number, f"{name}.mamba")

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


def mamba2_shape(config: Any) -> Mamba2Shape:
    """Of a state layer."""
    return Mamba2Shape(
        hidden=config.hidden_size,
        heads=config.mamba_n_heads,
        head=config.mamba_d_head,
        groups=config.mamba_n_groups,
        state=config.mamba_d_state,
        taps=config.mamba_d_conv,
        eps=config.rms_norm_eps,
        bias=config.mamba_proj_bias,
        conv_bias=config.mamba_conv_bias,
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
        rope=config.rope_parameters,
        bias=config.attention_bias,
        out_bias=config.attention_bias,
    )
