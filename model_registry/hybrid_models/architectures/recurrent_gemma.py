# SPDX-License-Identifier: Apache-2.0
"""RecurrentGemma: gated linear recurrences, and attention over a window."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from hybrid_models.architecture import numbers
from hybrid_models.blocks.attention import Attention, AttentionShape
from hybrid_models.blocks.mlp import GatedMLP
from hybrid_models.blocks.residual import PreNormArchitecture, add_and_norm
from hybrid_models.kit import Kit, Placement, StateTensor
from hybrid_models.mixers.rg_lru import RGLRU, RecurrentShape
from hybrid_models.weights import GATE_UP, QKV, Names


class RecurrentGemma(PreNormArchitecture):
    """`RecurrentGemmaForCausalLM`."""

    NAMES = Names(
        {"model.final_norm.": "model.norm."}, {**QKV, **GATE_UP, **RGLRU.STACKED}
    )

    def __init__(self, config: Any, kit: Kit, *, name: str = "model") -> None:
        """Build the model, without weights."""
        super().__init__(config, kit, name=name)
        # Rounded, as it was trained.
        root = torch.tensor(config.hidden_size**0.5, device="cpu")
        self._scale = root.bfloat16().item()

    def embed(self, ids: torch.Tensor, embeds: torch.Tensor | None) -> torch.Tensor:
        """Scaled."""
        return super().embed(ids, embeds) * self._scale

    def build_layer(self, config: Any, kit: Kit, number: int, name: str) -> nn.Module:
        """One layer."""
        return Layer(config, kit, number, name)

    def build_norm(self, config: Any, kit: Kit) -> nn.Module:
        """Gemma's."""
        return kit.norm(config.hidden_size, config.rms_norm_eps, centred=True)

    @classmethod
    def attention_layers(cls, config: Any) -> list[int]:
        """As the configuration has them."""
        return numbers(config.layers_block_type, "attention")

    @classmethod
    def state_layers(cls, config: Any) -> list[int]:
        """Likewise."""
        return numbers(config.layers_block_type, "recurrent")

    @classmethod
    def state_tensors(
        cls, config: Any, placement: Placement
    ) -> tuple[StateTensor, ...]:
        """Those of the recurrence."""
        return recurrent_shape(config).state_tensors(placement)

    @classmethod
    def logit_cap(cls, config: Any) -> float | None:
        """As trained."""
        cap: float | None = config.logits_soft_cap
        return cap


class Layer(nn.Module):
    """A recurrence or attention, then a feed-forward layer, each behind a norm."""

    def __init__(self, config: Any, kit: Kit, number: int, name: str) -> None:
        """Build layer `number`."""
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.temporal_pre_norm = kit.norm(hidden, eps, centred=True)
        self.channel_pre_norm = kit.norm(hidden, eps, centred=True)
        self.has_attention = config.layers_block_type[number] == "attention"
        place = f"{name}.temporal_block"
        self.temporal_block: nn.Module
        if self.has_attention:
            self.temporal_block = Attention(attention_shape(config), kit, number, place)
        else:
            self.temporal_block = RGLRU(recurrent_shape(config), kit, number, place)
        self.mlp_block = GatedMLP(
            kit,
            hidden,
            config.intermediate_size // 2,
            name=f"{name}.mlp_block",
            bias=True,
            activation=partial(functional.gelu, approximate="tanh"),
        )

    def forward(
        self,
        positions: torch.Tensor,
        hidden: torch.Tensor,
        added: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `PreNormArchitecture` has it."""
        x, hidden = add_and_norm(self.temporal_pre_norm, hidden, added)
        mixed = (
            self.temporal_block(positions, x)
            if self.has_attention
            else self.temporal_block(x)
        )
        x, hidden = add_and_norm(self.channel_pre_norm, hidden, mixed)
        return hidden, self.mlp_block(x)


def recurrent_shape(config: Any) -> RecurrentShape:
    """Of a state layer."""
    return RecurrentShape(
        hidden=config.hidden_size,
        width=config.lru_width,
        blocks=config.num_attention_heads,
        taps=config.conv1d_width,
    )


def attention_shape(config: Any) -> AttentionShape:
    """Of an attention layer."""
    return AttentionShape(
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head=config.head_dim,
        longest=getattr(config, "max_position_embeddings", RecurrentGemma.LONGEST),
        rope=config.rope_parameters,
        bias=config.attention_bias,
        out_bias=True,
        window=config.attention_window_size,
    )
