# SPDX-License-Identifier: Apache-2.0
"""MiniMax-Text-01 and MiniMax-M1: lightning attention, softmax attention in every few
layers, and experts in all of them.

Their published checkpoints have a configuration of their own; those that were
converted for transformers have another, and other names.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from hybrid_models.architecture import Architecture, numbers
from hybrid_models.blocks.attention import Attention, AttentionShape
from hybrid_models.blocks.experts import RoutedMLP
from hybrid_models.kit import Kit, Placement, Routing, StateTensor
from hybrid_models.mixers.lightning import LightningAttention, LightningShape
from hybrid_models.weights import QKV, Names

NORM_EPS = 1e-6
"""Of the norm behind lightning attention, which no configuration gives."""
TINY = 1e-5
"""Keeps the decay of the last layer below one."""
_EXPERTS = {"w1": "gate", "w3": "up", "w2": "down"}


class MiniMax(Architecture):
    """`MiniMaxForCausalLM`."""

    NAMES = Names(
        {".block_sparse_moe.": ".mlp.", ".mlp.gate.": ".mlp.router."},
        {**LightningAttention.STACKED, **QKV},
        experts=_EXPERTS,
        derived=(".slope_rate", ".query_decay", ".key_decay", ".diagonal_decay"),
    )
    STATES = 1

    def build_layer(self, config: Any, kit: Kit, number: int, name: str) -> nn.Module:
        """One layer."""
        return Layer(config, kit, number, name)

    @classmethod
    def attention_layers(cls, config: Any) -> list[int]:
        """As the configuration has them."""
        return numbers(layer_types(config), "full_attention")

    @classmethod
    def state_layers(cls, config: Any) -> list[int]:
        """Likewise."""
        return numbers(layer_types(config), "linear_attention")

    @classmethod
    def state_tensors(
        cls, config: Any, placement: Placement
    ) -> tuple[StateTensor, ...]:
        """Those of lightning attention."""
        return lightning_shape(config).state_tensors(placement)


class PublishedConfig(PretrainedConfig):  # type: ignore[no-untyped-call]
    """Of the published checkpoints."""

    model_type = "minimax_text_01"


class MiniMaxText01(MiniMax):
    """`MiniMaxText01ForCausalLM`."""

    CONFIG = PublishedConfig


class M1Config(PublishedConfig):  # type: ignore[no-untyped-call]
    """Of the published checkpoints."""

    model_type = "minimax_m1"


class MiniMaxM1(MiniMax):
    """`MiniMaxM1ForCausalLM`."""

    CONFIG = M1Config


@dataclass(frozen=True, slots=True)
class Residual:
    """``alpha * x + beta * layer(x)``, of a norm's output ``x``."""

    alpha: float
    beta: float

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Both together."""
        both: torch.Tensor = x * self.alpha + out * self.beta
        return both


class Layer(nn.Module):
    """Attention of either kind, then experts, each behind a norm."""

    def __init__(self, config: Any, kit: Kit, number: int, name: str) -> None:
        """Build layer `number`."""
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = kit.norm(hidden, eps)
        self.post_attention_layernorm = kit.norm(hidden, eps)
        self.is_linear = layer_types(config)[number] == "linear_attention"
        self.self_attn: nn.Module
        if self.is_linear:
            self.self_attn = LightningAttention(
                lightning_shape(config),
                partial(decays, config, number),
                kit,
                number,
                f"{name}.self_attn",
            )
        else:
            self.self_attn = Attention(
                attention_shape(config), kit, number, f"{name}.self_attn"
            )
        self.mlp = RoutedMLP(
            kit,
            number,
            hidden,
            config.intermediate_size,
            config.num_local_experts,
            Routing(config.num_experts_per_tok),
            name=f"{name}.mlp",
        )
        kind = "linear_attn" if self.is_linear else "full_attn"
        self._after_attention = residual(config, kind)
        self._after_mlp = residual(config, "mlp")

    def forward(self, positions: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Tokens ``[T, hidden]`` to the same."""
        x = self.input_layernorm(hidden)
        mixed = self.self_attn(x) if self.is_linear else self.self_attn(positions, x)
        x = self.post_attention_layernorm(self._after_attention(x, mixed))
        result: torch.Tensor = self._after_mlp(x, self.mlp(x))
        return result


def layer_types(config: Any) -> list[str]:
    """Of all layers."""
    published = getattr(config, "attn_type_list", None)
    if published is None:
        return list(config.layer_types)
    return ["full_attention" if kind else "linear_attention" for kind in published]


_PUBLISHED = {
    "linear_attn": "layernorm_linear_attention",
    "full_attn": "layernorm_full_attention",
    "mlp": "layernorm_mlp",
}


def residual(config: Any, kind: str) -> Residual:
    """What follows a kind of block.

    Raises:
        ValueError: for a model whose residual goes past the norms.
    """
    if not getattr(config, "postnorm", True):
        raise ValueError("MiniMax without postnorm is not supported")
    published = _PUBLISHED[kind]
    if hasattr(config, f"{published}_alpha"):
        return Residual(
            getattr(config, f"{published}_alpha"), getattr(config, f"{published}_beta")
        )
    return Residual(
        getattr(config, f"{kind}_alpha_factor"), getattr(config, f"{kind}_beta_factor")
    )


def decays(config: Any, layer: int) -> torch.Tensor:
    """Log decay for each token, ``[heads]``: slower in later heads and layers.

    The slopes are those of ALiBi (Press et al. 2022, arXiv:2108.12409).
    """
    heads, last = config.num_attention_heads, config.num_hidden_layers - 1
    slopes = torch.exp2(-8.0 / heads * (torch.arange(heads) + 1))
    factor: float = 1 - layer / (last + TINY) + TINY
    return -slopes * factor


def head_of(config: Any) -> int:
    """Channels of a head."""
    head: int | None = getattr(config, "head_dim", None)
    return head or config.hidden_size // config.num_attention_heads


def lightning_shape(config: Any) -> LightningShape:
    """Of a state layer."""
    return LightningShape(
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        head=head_of(config),
        eps=NORM_EPS,
    )


def attention_shape(config: Any) -> AttentionShape:
    """Of an attention layer."""
    head = head_of(config)
    rope = dict(getattr(config, "rope_parameters", None) or {})
    rope.setdefault("rope_theta", getattr(config, "rope_theta", None))
    turned = getattr(config, "rotary_dim", None)
    if turned is not None:
        rope["partial_rotary_factor"] = turned / head
    return AttentionShape(
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head=head,
        longest=config.max_position_embeddings,
        rope=rope,
        window=getattr(config, "sliding_window", None),
    )
