# SPDX-License-Identifier: Apache-2.0
"""GigaChat 3.5: gated delta nets, gated attention over latent vectors in some of their
places, experts, and norms that gate themselves.

It follows SGLang's implementation, for transformers has none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional
from transformers import PretrainedConfig

from hybrid_models.architecture import Architecture, numbers
from hybrid_models.blocks.experts import BalancedMLP
from hybrid_models.blocks.gated_norm import Activation
from hybrid_models.blocks.latent_attention import LatentAttention, LatentAttentionShape
from hybrid_models.blocks.low_rank_norm import LowRankNorm
from hybrid_models.blocks.mlp import GatedMLP
from hybrid_models.blocks.projection import project
from hybrid_models.kit import Kit, LatentShape, Placement, Routing, StateTensor
from hybrid_models.mixers.gated_delta_net import DeltaShape, PackedDeltaNet
from hybrid_models.sharding import plain
from hybrid_models.weights import EXPERT_PARTS, GATE_UP, Names

GATE_RANK = 16
"""Channels through which norms gate themselves, which no configuration gives."""
DEFAULTS: dict[str, Any] = {
    "attention_bias": False,
    "first_k_dense_replace": 1,
    "full_attention_layers": (),
    "gated_attention": True,
    "layernorm_gating_weight": 2.0,
    "layernorm_type": "pre_post",
    "linear_gating_type": "",
    "linear_sigmoid_gate_scale": 2.0,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_shared_experts": 2,
    "norm_topk_prob": True,
    "norm_type": "ZeroCenteredGatedNorm",
    "output_gate_type": "sigmoid",
    "q_lora_rank": 1536,
    "rope_interleave": True,
    "rope_theta": 100000.0,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "swiglu_limit": None,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_mla_scaling_factor": True,
    "use_shared_expert_sigmoid": False,
}
"""Of the configuration."""


class Config(PretrainedConfig):  # type: ignore[no-untyped-call]
    """Of the published checkpoints."""

    model_type = "gigachat3_5"
    rope_parameters = None
    max_position_embeddings: ClassVar[int] = 4096

    def __init__(self, **given: Any) -> None:
        """Take what is given, and fill in the rest."""
        filled = DEFAULTS | given
        if not filled.get("layer_types"):
            filled["layer_types"] = _kinds(filled)
        super().__init__(**filled)


class GigaChat35(Architecture):
    """`GigaChat35ForCausalLM`."""

    NAMES = Names(
        {
            **PackedDeltaNet.RENAMES,
            **PackedDeltaNet.renames("self_attn"),
            ".self_attn.gate_proj.": ".self_attn.attn_gate.",
            ".gate_up_lowrank.": ".gate_up_projection.",
            ".gate_down_lowrank.": ".gate_down_projection.",
            ".mlp.gate.e_score": ".mlp.e_score",
            ".mlp.gate.": ".mlp.router.",
        },
        GATE_UP,
        experts=EXPERT_PARTS,
    )
    CONFIG = Config

    def build_layer(self, config: Any, kit: Kit, number: int, name: str) -> nn.Module:
        """One layer."""
        return Layer(config, kit, number, name)

    def build_norm(self, config: Any, kit: Kit) -> nn.Module:
        """Of the kind of all others."""
        return norm(config, kit, config.hidden_size)

    @classmethod
    def attention_layers(cls, config: Any) -> list[int]:
        """As the configuration has them."""
        return numbers(config.layer_types, "attention", "full_attention")

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


class Layer(nn.Module):
    """Attention of either kind, then experts, each between norms."""

    def __init__(self, config: Any, kit: Kit, number: int, name: str) -> None:
        """Build layer `number`.

        Raises:
            ValueError: for what is not served.
        """
        super().__init__()
        hidden, kind = config.hidden_size, config.layernorm_type
        if config.swiglu_limit or config.use_shared_expert_sigmoid:
            raise ValueError(
                "GigaChat 3.5 with bounds in experts (swiglu_limit), or gated shared "
                "ones (use_shared_expert_sigmoid), is not served"
            )
        before, after = kind in ("pre", "pre_post"), kind in ("post", "pre_post")
        self.input_layernorm = norm(config, kit, hidden, wanted=before)
        self.post_self_attn_layernorm = norm(config, kit, hidden, wanted=after)
        self.post_attention_layernorm = norm(config, kit, hidden, wanted=before)
        self.post_feedforward_layernorm = norm(config, kit, hidden, wanted=after)
        place = f"{name}.self_attn"
        self.is_linear = config.layer_types[number] == "linear_attention"
        self.self_attn: nn.Module
        if self.is_linear:
            self.self_attn = PackedDeltaNet(delta_shape(config), kit, number, place)
        else:
            self.self_attn = GatedAttention(config, kit, number, place)
        self.mlp = feed_forward(config, kit, number, f"{name}.mlp")

    def forward(self, positions: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Tokens ``[T, hidden]`` to the same."""
        x = self.input_layernorm(hidden)
        x = self.self_attn(x) if self.is_linear else self.self_attn(positions, x)
        hidden = hidden + self.post_self_attn_layernorm(x)
        x = self.mlp(self.post_attention_layernorm(hidden))
        result: torch.Tensor = hidden + self.post_feedforward_layernorm(x)
        return result


class GatedAttention(LatentAttention):
    """Attention over latent vectors, whose output the tokens gate."""

    def __init__(self, config: Any, kit: Kit, number: int, name: str) -> None:
        """Build that of layer `number`."""
        shape = attention_shape(config)

        def build_norm(size: int) -> nn.Module:
            scaled = config.use_mla_scaling_factor
            scale = (config.hidden_size / size) ** 0.5 if scaled else 1.0
            return norm(config, kit, size, scale=scale)

        super().__init__(shape, build_norm, kit, number, name)
        self.attn_gate = None
        if config.gated_attention:
            width = shape.attention.heads * shape.attention.value
            self.attn_gate = kit.column(
                config.hidden_size, [width], name=f"{name}.attn_gate"
            )

    def gated(self, hidden: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
        """By the tokens."""
        if self.attn_gate is None:
            return found
        return found * torch.sigmoid(project(self.attn_gate, hidden))


def experts(config: Any, kit: Kit, number: int, name: str) -> BalancedMLP:
    """Of layer `number`, some of which all tokens take."""
    groups = config.n_group or 1
    routing = Routing(
        config.num_experts_per_tok,
        scoring=config.scoring_func,
        renormalise=config.norm_topk_prob,
        scale=config.routed_scaling_factor,
        groups=groups if groups > 1 else None,
        top_groups=config.topk_group if groups > 1 else None,
    )
    return BalancedMLP(
        kit,
        number,
        config.hidden_size,
        config.moe_intermediate_size,
        config.n_routed_experts,
        routing,
        shared=config.n_shared_experts or 0,
        name=name,
    )


def feed_forward(config: Any, kit: Kit, number: int, name: str) -> nn.Module:
    """Of layer `number`: with experts behind the first few layers."""
    first, every = config.first_k_dense_replace, config.moe_layer_freq
    if number >= first and number % every == 0:
        return experts(config, kit, number, name)
    return GatedMLP(kit, config.hidden_size, config.intermediate_size, name=name)


def norm(
    config: Any, kit: Kit, size: int, *, scale: float = 1.0, wanted: bool = True
) -> nn.Module:
    """Of the kind that the configuration names; nothing where none is wanted.

    Raises:
        ValueError: for a kind that is not served.
    """
    if not wanted:
        return nn.Identity()
    kind, eps = config.norm_type, config.rms_norm_eps
    if kind in ("ZeroCenteredGatedNorm", "GatedNorm"):
        return LowRankNorm(
            kit,
            size,
            eps,
            rank=GATE_RANK,
            factor=config.layernorm_gating_weight,
            of=_from_zero if kind == "ZeroCenteredGatedNorm" else plain,
            scale=scale,
        )
    if kind in ("LlamaRMSNorm", "ZeroCenteredRMSNorm") and scale == 1.0:
        return kit.norm(size, eps, centred=kind == "ZeroCenteredRMSNorm")
    raise ValueError(f"GigaChat 3.5 with norms {kind!r} of scale {scale} is not served")


def delta_shape(config: Any) -> DeltaShape:
    """Of a state layer."""
    return DeltaShape(
        hidden=config.hidden_size,
        key_heads=config.linear_num_key_heads,
        value_heads=config.linear_num_value_heads,
        key_head=config.linear_key_head_dim,
        value_head=config.linear_value_head_dim,
        taps=config.linear_conv_kernel_dim,
        eps=config.rms_norm_eps,
        gate=_GATES[config.output_gate_type],
        norm_of=_scaled(
            config.linear_sigmoid_gate_scale,
            "zero_centered" in str(config.linear_gating_type).lower(),
        ),
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
        rope={"rope_type": "default"} | config.rope_parameters,
        neighbours=config.rope_interleave,
        bias=config.attention_bias,
    )


_GATES: dict[str, Activation] = {
    "sigmoid": torch.sigmoid,
    "silu": functional.silu,
    "swish": functional.silu,
}


def _kinds(given: dict[str, Any]) -> list[str]:
    """Of layers, where the configuration gives numbers."""
    count = given.get("num_hidden_layers", 0)
    kinds = ["linear_attention"] * count
    for number in given["full_attention_layers"] or ():
        kinds[number] = "full_attention"
    return kinds


def _from_zero(loaded: torch.Tensor) -> torch.Tensor:
    return 1.0 + loaded


def _scaled(scale: float, is_centred: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda loaded: scale * (1.0 + loaded if is_centred else loaded)
