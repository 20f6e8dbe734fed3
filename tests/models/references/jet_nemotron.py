# SPDX-License-Identifier: Apache-2.0
"""Jet-Nemotron, of its definition: the delta rule token by token, a convolution whose
taps each token makes, attention as a product with a mask."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tests.models.references import causal

Config = dict[str, Any]


class Norm(nn.Module):
    """RMS norm."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, x.shape[-1:], self.weight, self.eps)


class Generator(nn.Module):
    """The taps of each token."""

    def __init__(self, hidden: int, inner: int, outs: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(hidden, inner, bias=False)
        self.w2 = nn.Linear(inner, outs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(functional.silu(self.w1(x)))


class Jet(nn.Module):
    """The state layer."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        own, hidden = config["efficient_attention_config"]["jet"], config["hidden_size"]
        self.heads, self.head = own["num_heads"], own["head_dim"]
        self.value, self.taps = int(self.head * own["expand_v"]), own["conv_size"]
        keys, values = self.heads * self.head, self.heads * self.value
        outs = {"q": keys, "k": keys, "v": values, "g": values}
        outs |= {"a": self.heads, "b": self.heads}
        for name, out in outs.items():
            setattr(self, f"{name}_proj", nn.Linear(hidden, out, bias=False))
        self.dynamic_conv1d = nn.Module()
        self.dynamic_conv1d.kernel_generator = Generator(
            hidden, values // own["dconv_generator_reduction"], values * self.taps
        )
        self.A_log = nn.Parameter(torch.zeros(self.heads))
        self.dt_bias = nn.Parameter(torch.zeros(self.heads))
        self.o_norm = Norm(self.value, float(own["norm_eps"]))
        self.o_proj = nn.Linear(values, hidden, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        count = len(tokens)
        taps = self.dynamic_conv1d.kernel_generator(tokens)
        taps = taps.view(count, -1, self.taps)
        v = functional.pad(self.v_proj(tokens), (0, 0, self.taps - 1, 0))
        v = sum(v[n : n + count] * taps[..., n] for n in range(self.taps))
        v = functional.silu(v).view(count, self.heads, self.value)
        q, k = (
            functional.normalize(
                functional.silu(made).view(count, self.heads, self.head), dim=-1
            )
            for made in (self.q_proj(tokens), self.k_proj(tokens))
        )
        steps = functional.softplus(self.a_proj(tokens) + self.dt_bias)
        decays = torch.exp(-self.A_log.exp() * steps)
        strengths = self.b_proj(tokens).sigmoid()
        state = torch.zeros(self.heads, self.value, self.head)
        found = []
        for n in range(count):
            state = state * decays[n, :, None, None]
            error = v[n] - torch.einsum("hvk,hk->hv", state, k[n])
            written = strengths[n, :, None] * error
            state = state + written[:, :, None] * k[n, :, None]
            found.append(torch.einsum("hvk,hk->hv", state, q[n]) * self.head**-0.5)
        gate = functional.silu(self.g_proj(tokens)).view(count, self.heads, self.value)
        return self.o_proj((self.o_norm(torch.stack(found)) * gate).flatten(1))


class Attention(nn.Module):
    """Over a window, or all tokens."""

    def __init__(self, config: Config, kind: str) -> None:
        super().__init__()
        hidden, self.heads = config["hidden_size"], config["num_attention_heads"]
        self.kv_heads, self.head = config["num_key_value_heads"], hidden // self.heads
        self.theta, self.window = config["rope_theta"], None
        if kind == "swa":
            own = config["efficient_attention_config"]["swa"]
            self.window = own["window_size"] + 1
        self.q_proj = nn.Linear(hidden, self.heads * self.head)
        self.k_proj = nn.Linear(hidden, self.kv_heads * self.head)
        self.v_proj = nn.Linear(hidden, self.kv_heads * self.head)
        self.o_proj = nn.Linear(self.heads * self.head, hidden, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            made.view(len(tokens), -1, self.head)
            for made in (self.q_proj(tokens), self.k_proj(tokens), self.v_proj(tokens))
        )
        times = self.heads // self.kv_heads
        q, k = self.turned(q), self.turned(k)
        k, v = (x.repeat_interleave(times, dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * self.head**-0.5
        found = torch.einsum("hqk,khd->qhd", causal(scores, self.window), v)
        return self.o_proj(found.flatten(1))

    def turned(self, x: torch.Tensor) -> torch.Tensor:
        """By positions: pairs of the two halves of a head."""
        steps = torch.arange(0, self.head, 2) / self.head
        angles = torch.arange(len(x))[:, None] * self.theta**-steps
        one = torch.polar(torch.ones_like(angles), angles)[:, None]
        first, second = x.chunk(2, dim=-1)
        both = torch.complex(first, second) * one
        return torch.cat([both.real, both.imag], dim=-1)


class MLP(nn.Module):
    """The feed-forward layer."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Both blocks, each behind a norm."""

    def __init__(self, config: Config, kind: str) -> None:
        super().__init__()
        hidden, eps = config["hidden_size"], config["rms_norm_eps"]
        self.input_layernorm = Norm(hidden, eps)
        self.post_attention_layernorm = Norm(hidden, eps)
        self.self_attn = Jet(config) if kind == "jet" else Attention(config, kind)
        self.mlp = MLP(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Model(nn.Module):
    """With the embedding as its head."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        hidden = config["hidden_size"]
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(config["vocab_size"], hidden)
        layers = (Layer(config, kind) for kind in config["layer_types"])
        self.model.layers = nn.ModuleList(layers)
        self.model.norm = Norm(hidden, config["rms_norm_eps"])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            x = layer(x)
        return self.model.norm(x) @ self.model.embed_tokens.weight.T


def build(config: Config) -> nn.Module:
    """The model."""
    return Model(config)
