# SPDX-License-Identifier: Apache-2.0
"""GigaChat 3.5, of the parts of transformers' Qwen3-Next and DeepSeek-V3 that its
configuration names, and of norms as SGLang has them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional


class Norm(nn.Module):
    """RMS norm, and a gate made of its output through 16 channels."""

    def __init__(self, size: int, config: dict[str, Any], scale: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self.gate_up_projection = nn.Linear(size, 16, bias=False)
        self.gate_down_projection = nn.Linear(16, size, bias=False)
        self.eps, self.scale = config["rms_norm_eps"], scale
        self.factor = config["layernorm_gating_weight"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.rms_norm(x, x.shape[-1:], 1 + self.weight, self.eps)
        gate = self.gate_down_projection(functional.silu(self.gate_up_projection(y)))
        return self.factor * y * gate.sigmoid() * self.scale


class HeadNorm(nn.Module):
    """Of a delta net's heads, behind which a gate multiplies."""

    def __init__(self, size: int, config: dict[str, Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self.eps, self.scale = (
            config["rms_norm_eps"],
            config["linear_sigmoid_gate_scale"],
        )

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        weight = self.scale * (1 + self.weight)
        return functional.rms_norm(x, x.shape[-1:], weight, self.eps) * gate.sigmoid()


class Layer(nn.Module):
    """Attention of either kind, then experts, each between norms."""

    def __init__(self, number: int, config: dict[str, Any], of: Any) -> None:
        from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek
        from transformers.models.qwen3_next import modeling_qwen3_next as qwen

        super().__init__()
        hidden = config["hidden_size"]
        for name in (
            "input_layernorm",
            "post_self_attn_layernorm",
            "post_attention_layernorm",
            "post_feedforward_layernorm",
        ):
            setattr(self, name, Norm(hidden, config))
        self.is_linear = of.layer_types[number] == "linear_attention"
        if self.is_linear:
            self.self_attn = qwen.Qwen3NextGatedDeltaNet(of, number)
            self.self_attn.norm = HeadNorm(of.linear_value_head_dim, config)
        else:
            self.self_attn = deepseek.DeepseekV3Attention(of, number)
            inner = config["num_attention_heads"] * config["v_head_dim"]
            self.self_attn.gate_proj = nn.Linear(hidden, inner, bias=False)
            for kind in ("q", "kv"):
                size = config[f"{kind}_lora_rank"]
                norm = Norm(size, config, (hidden / size) ** 0.5)
                setattr(self.self_attn, f"{kind}_a_layernorm", norm)
            self.self_attn.o_proj.register_forward_pre_hook(self._gate)
        dense = number < config["first_k_dense_replace"]
        self.mlp = (deepseek.DeepseekV3MLP if dense else deepseek.DeepseekV3MoE)(of)

    def _gate(self, _: nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        return (inputs[0] * self.self_attn.gate_proj(self._tokens).sigmoid(),)

    def forward(self, hidden: torch.Tensor, turned: Any) -> torch.Tensor:
        x = self._tokens = self.input_layernorm(hidden)
        x = self.self_attn(x) if self.is_linear else self.self_attn(x, turned, None)[0]
        hidden = hidden + self.post_self_attn_layernorm(x)
        x = self.mlp(self.post_attention_layernorm(hidden))
        return hidden + self.post_feedforward_layernorm(x)


class Decoder(nn.Module):
    """Embedding, layers, norm."""

    def __init__(self, config: dict[str, Any], of: Any) -> None:
        from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek

        super().__init__()
        count = config["num_hidden_layers"]
        self.embed_tokens = nn.Embedding(config["vocab_size"], config["hidden_size"])
        self.layers = nn.ModuleList(Layer(i, config, of) for i in range(count))
        self.norm = Norm(config["hidden_size"], config)
        self.rotary = deepseek.DeepseekV3RotaryEmbedding(of)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed_tokens(tokens[None])
        turned = self.rotary(hidden, torch.arange(len(tokens))[None])
        for layer in self.layers:
            hidden = layer(hidden, turned)
        return self.norm(hidden)[0]


class Model(nn.Module):
    """Decoder and head."""

    def __init__(self, config: dict[str, Any]) -> None:
        from transformers import DeepseekV3Config

        super().__init__()
        of = DeepseekV3Config(**config)
        of._attn_implementation = "sdpa"
        of._experts_implementation = "eager"
        self.model = Decoder(config, of)
        self.lm_head = nn.Linear(
            config["hidden_size"], config["vocab_size"], bias=False
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.model(tokens))


def build(config: dict[str, Any]) -> nn.Module:
    """The model."""
    return Model(config)
