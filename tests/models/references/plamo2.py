# SPDX-License-Identifier: Apache-2.0
"""PLaMo 2, of its definition: the recurrence token by token, attention as a product
with a mask."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tests.models.references import causal

Config = dict[str, Any]


class Norm(nn.Module):
    """RMS norm whose weight is counted from an offset."""

    def __init__(self, config: Config, offset: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(config["hidden_size"]))
        self.eps, self.offset = config["rms_norm_eps"], offset

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, x.shape[-1:], self.offset + self.weight, self.eps)


class Mamba(nn.Module):
    """The state layer."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        hidden, self.heads = config["hidden_size"], config["mamba_num_heads"]
        self.head, self.state = config["hidden_size_per_head"], config["mamba_d_state"]
        inner, steps = self.heads * self.head, max(64, hidden // 16)
        self.eps = config["rms_norm_eps"]
        self.in_proj = nn.Linear(hidden, 2 * inner, bias=False)
        self.taps = config["mamba_d_conv"]
        self.conv1d = nn.Conv1d(inner, inner, self.taps, groups=inner, bias=False)
        self.bcdt_proj = nn.Linear(inner, steps + 2 * self.state, bias=False)
        self.dt_proj = nn.Linear(steps, self.heads, bias=False)
        for name in ("dt_bias", "A_log", "D"):
            setattr(self, name, nn.Parameter(torch.zeros(self.heads)))
        self.dt_norm_weight = nn.Parameter(torch.ones(steps))
        self.B_norm_weight = nn.Parameter(torch.ones(self.state))
        self.C_norm_weight = nn.Parameter(torch.ones(self.state))
        self.out_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        count = len(tokens)
        gates, x = (
            self.in_proj(tokens)
            .view(count, self.heads, 2 * self.head)
            .split(self.head, dim=-1)
        )
        padded = functional.pad(x.reshape(count, -1).T, (self.taps - 1, 0))
        x = functional.silu(self.conv1d(padded[None])[0].T)
        b, c, steps = self.bcdt_proj(x).split(
            [self.state, self.state, len(self.dt_norm_weight)], dim=-1
        )
        b = functional.rms_norm(b, b.shape[-1:], self.B_norm_weight, self.eps)
        c = functional.rms_norm(c, c.shape[-1:], self.C_norm_weight, self.eps)
        steps = functional.rms_norm(
            steps, steps.shape[-1:], self.dt_norm_weight, self.eps
        )
        steps = functional.softplus(self.dt_proj(steps) + self.dt_bias)
        x = x.view(count, self.heads, self.head)
        state = torch.zeros(self.heads, self.head, self.state)
        found = []
        for n in range(count):
            decay = torch.exp(-self.A_log.exp() * steps[n])[:, None, None]
            written = (steps[n][:, None] * x[n])[:, :, None] * b[n]
            state = decay * state + written
            found.append(state @ c[n] + self.D[:, None] * x[n])
        out = torch.stack(found) * functional.silu(gates)
        return self.out_proj(out.flatten(1))


class Attention(nn.Module):
    """Over a window, or all tokens."""

    def __init__(self, config: Config, number: int) -> None:
        super().__init__()
        hidden, self.head = config["hidden_size"], config["hidden_size_per_head"]
        self.heads = config["num_attention_heads"]
        self.kv_heads = config["num_key_value_heads"]
        width = self.heads + 2 * self.kv_heads
        self.qkv_proj = nn.Linear(hidden, width * self.head, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head, hidden, bias=False)
        self.q_weight = nn.Parameter(torch.ones(self.heads, self.head))
        self.k_weight = nn.Parameter(torch.ones(self.kv_heads, self.head))
        is_full = number in config["full_attention_idx"]
        self.window = None if is_full else config["attention_window_size"] + 1

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        count = len(tokens)
        heads = self.qkv_proj(tokens).view(count, -1, self.head)
        sizes = [self.heads, self.kv_heads, self.kv_heads]
        q, k, v = heads.split(sizes, dim=1)
        q = self.turned(functional.rms_norm(q, q.shape[-1:], eps=1e-6) * self.q_weight)
        k = self.turned(functional.rms_norm(k, k.shape[-1:], eps=1e-6) * self.k_weight)
        times = self.heads // self.kv_heads
        k, v = (x.repeat_interleave(times, dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * self.head**-0.5
        found = torch.einsum("hqk,khd->qhd", causal(scores, self.window), v)
        return self.o_proj(found.flatten(1))

    def turned(self, x: torch.Tensor) -> torch.Tensor:
        """By positions: pairs of the two halves of a head."""
        steps = torch.arange(0, self.head, 2) / self.head
        angles = torch.arange(len(x))[:, None] * 10000.0**-steps
        one = torch.polar(torch.ones_like(angles), angles)[:, None]
        first, second = x.chunk(2, dim=-1)
        both = torch.complex(first, second) * one
        return torch.cat([both.real, both.imag], dim=-1)


class MLP(nn.Module):
    """The feed-forward layer."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        self.gate_up_proj = nn.Linear(hidden, 2 * inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(functional.silu(gate) * up)


class Layer(nn.Module):
    """Both blocks, each between norms."""

    def __init__(self, config: Config, number: int) -> None:
        super().__init__()
        step = config["mamba_step"]
        has_attention = number % step == step // 2
        self.mixer = Attention(config, number) if has_attention else Mamba(config)
        self.mlp = MLP(config)
        self.pre_mixer_norm = Norm(config, 1.0)
        self.post_mixer_norm = Norm(config, 1 / 5)
        self.pre_mlp_norm = Norm(config, 1.0)
        self.post_mlp_norm = Norm(config, 1 / 5**1.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.post_mixer_norm(self.mixer(self.pre_mixer_norm(x)))
        return x + self.post_mlp_norm(self.mlp(self.pre_mlp_norm(x)))


class Decoder(nn.Module):
    """Embedding, layers, norm."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config["vocab_size"], config["hidden_size"])
        layers = (Layer(config, n) for n in range(config["num_hidden_layers"]))
        self.layers = nn.Module()
        self.layers.layers = nn.ModuleList(layers)
        self.norm = Norm(config, 1.0)


class Model(nn.Module):
    """With the embedding as its head."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.model = Decoder(config)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.model.embed_tokens(tokens)
        for layer in self.model.layers.layers:
            x = layer(x)
        return self.model.norm(x) @ self.model.embed_tokens.weight.T


def build(config: Config) -> nn.Module:
    """The model."""
    return Model(config)
