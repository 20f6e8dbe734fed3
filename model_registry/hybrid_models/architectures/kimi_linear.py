# SPDX-License-Identifier: Apache-2.0
"""Kimi Linear: Kimi delta attention, attention over latent vectors without rotary
embedding in some of its places, experts.

It follows the paper (Kimi Team 2025, arXiv:2510.26692) and what transformers computes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hybrid_models.blocks.experts import BalancedMLP
from hybrid_models.blocks.latent_attention import LatentAttention, LatentAttentionShape
from hybrid_models.blocks.mlp import GatedMLP
from hybrid_models.blocks.residual import PreNormArchitecture, add_and_norm
from hybrid_models.kit import Kit, LatentShape, Placement, Routing, StateTensor
from hybrid_models.mixers.gated_delta_net import DeltaShape
from hybrid_models.mixers.kimi_delta import KimiDelta
from hybrid_models.weights import GATE_UP, Names

OF_LATER_MODELS = (
    "activation_situ_beta",
    "attn_res_block_size",
    "mla_use_output_gate",
    "routed_expert_hidden_size",
)
"""Fields of the configuration that Kimi K3 sets, and that nothing here reads."""


class KimiLinear(PreNormArchitecture):
    """`KimiLinearForCausalLM`."""

    NAMES = Names(
        {
            **KimiDelta.RENAMES,
            ".block_sparse_moe.gate.e_score": ".mlp.e_score",
            ".block_sparse_moe.gate.": ".mlp.router.",
            ".block_sparse_moe.": ".mlp.",
        },
        {**KimiDelta.stacked("self_attn"), **GATE_UP},
        experts={"w1": "gate", "w3": "up", "w2": "down"},
    )

    def build_layer(self, config: Any, kit: Kit, number: int, name: str) -> nn.Module:
        """One layer.

        Raises:
            ValueError: for what is not served.
        """
        for field in OF_LATER_MODELS:
            if getattr(config, field, None):
                raise ValueError(f"Kimi Linear with {field} is not served")
        if not getattr(config, "mla_use_nope", False):
            raise ValueError("Kimi Linear without mla_use_nope is not served")
        return Layer(config, kit, number, name)

    @classmethod
    def attention_layers(cls, config: Any) -> list[int]:
        """As the configuration has them, which counts layers from one."""
        return [n - 1 for n in config.linear_attn_config["full_attn_layers"]]

    @classmethod
    def state_layers(cls, config: Any) -> list[int]:
        """Likewise."""
        return [n - 1 for n in config.linear_attn_config["kda_layers"]]

    @classmethod
    def state_tensors(
        cls, config: Any, placement: Placement
    ) -> tuple[StateTensor, ...]:
        """Those of Kimi delta attention."""
        return delta_shape(config).state_tensors(placement)


class Layer(nn.Module):
    """Attention of either kind, then experts, each behind a norm."""

    def __init__(self, config: Any, kit: Kit, number: int, name: str) -> None:
        """Build layer `number`."""
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = kit.norm(hidden, eps)
        self.post_attention_layernorm = kit.norm(hidden, eps)
        place = f"{name}.self_attn"
        self.is_linear = number in KimiLinear.state_layers(config)
        self.self_attn: nn.Module
        if self.is_linear:
            self.self_attn = KimiDelta(delta_shape(config), kit, number, place)
        else:
            self.self_attn = LatentAttention(
                attention_shape(config),
                lambda size: kit.norm(size, eps),
                kit,
                number,
                place,
            )
        self.mlp = feed_forward(config, kit, number, f"{name}.mlp")

    def forward(
        self,
        positions: torch.Tensor,
        hidden: torch.Tensor,
        added: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `PreNormArchitecture` has it."""
        x, hidden = add_and_norm(self.input_layernorm, hidden, added)
        x = self.self_attn(x) if self.is_linear else self.self_attn(positions, x)
        x, hidden = add_and_norm(self.post_attention_layernorm, hidden, x)
        return hidden, self.mlp(x)


def feed_forward(config: Any, kit: Kit, number: int, name: str) -> nn.Module:
    """Of layer `number`: with experts behind the first few layers."""
    first, every = config.first_k_dense_replace, config.moe_layer_freq
    if number < first or number % every:
        return GatedMLP(kit, config.hidden_size, config.intermediate_size, name=name)
    groups = config.num_expert_group
    routing = Routing(
        config.num_experts_per_token,
        scoring=config.moe_router_activation_func,
        renormalise=config.moe_renormalize,
        scale=config.routed_scaling_factor,
        groups=groups if groups > 1 else None,
        top_groups=config.topk_group if groups > 1 else None,
    )
    return BalancedMLP(
        kit,
        number,
        config.hidden_size,
        config.moe_intermediate_size,
        config.num_experts,
        routing,
        shared=config.num_shared_experts,
        name=name,
    )


def delta_shape(config: Any) -> DeltaShape:
    """Of a state layer, whose states have full precision, as in vLLM and SGLang."""
    given = config.linear_attn_config
    heads, head = given["num_heads"], given["head_dim"]
    return DeltaShape(
        hidden=config.hidden_size,
        key_heads=heads,
        value_heads=heads,
        key_head=head,
        value_head=head,
        taps=given["short_conv_kernel_size"],
        eps=config.rms_norm_eps,
        gate=torch.sigmoid,
        state_dtype=torch.float32,
    )


def attention_shape(config: Any) -> LatentAttentionShape:
    """Of an attention layer."""
    return LatentAttentionShape(
        hidden=config.hidden_size,
        attention=LatentShape(
            config.num_attention_heads,
            config.qk_nope_head_dim,
            config.qk_rope_head_dim,
            config.v_head_dim,
            config.kv_lora_rank,
        ),
        query_latent=config.q_lora_rank,
        longest=config.max_position_embeddings,
        rope=None,
    )
