# SPDX-License-Identifier: Apache-2.0
"""Phi-4-mini-flash (SambaY), of its definition: the scan token by token, the four
products of differential attention one by one."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tests.models.references import causal

Config = dict[str, Any]


class Mamba(nn.Module):
    """Mamba-1; `memory` is what the scan gave last."""

    memory: torch.Tensor

    def __init__(self, config: Config) -> None:
        super().__init__()
        hidden, self.state = config["hidden_size"], config["mamba_d_state"]
        inner, self.taps = config["mamba_expand"] * hidden, config["mamba_d_conv"]
        self.steps = math.ceil(hidden / 16)
        self.in_proj = nn.Linear(hidden, 2 * inner, bias=False)
        self.conv1d = nn.Conv1d(inner, inner, self.taps, groups=inner)
        self.x_proj = nn.Linear(inner, self.steps + 2 * self.state, bias=False)
        self.dt_proj = nn.Linear(self.steps, inner)
        self.A_log = nn.Parameter(torch.zeros(inner, self.state))
        self.D = nn.Parameter(torch.zeros(inner))
        self.out_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x, gate = self.in_proj(tokens).chunk(2, dim=-1)
        padded = functional.pad(x.T, (self.taps - 1, 0))
        x = functional.silu(self.conv1d(padded[None])[0].T)
        dt, b, c = self.x_proj(x).split([self.steps, self.state, self.state], dim=-1)
        dt = functional.softplus(self.dt_proj(dt))
        state = torch.zeros_like(self.A_log)
        found = []
        for n in range(len(tokens)):
            decay = torch.exp(-self.A_log.exp() * dt[n][:, None])
            state = decay * state + (dt[n] * x[n])[:, None] * b[n]
            found.append(state @ c[n] + self.D * x[n])
        self.memory = torch.stack(found)
        return self.out_proj(self.memory * functional.silu(gate))


class GatedMemoryUnit(nn.Module):
    """Gates the memory of another layer."""

    def __init__(self, config: Config, source: Mamba) -> None:
        super().__init__()
        hidden = config["hidden_size"]
        inner = config["mamba_expand"] * hidden
        self.in_proj = nn.Linear(hidden, inner, bias=False)
        self.out_proj = nn.Linear(inner, hidden, bias=False)
        self.source = [source]  # not a module of this one, too

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        gate = functional.silu(self.in_proj(tokens))
        return self.out_proj(gate * self.source[0].memory)


class Differential(nn.Module):
    """What is learned of a difference."""

    def __init__(self, head: int) -> None:
        super().__init__()
        for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
            setattr(self, name, nn.Parameter(0.3 * torch.randn(head)))
        self.subln = nn.RMSNorm(2 * head, eps=1e-5)
        self.subln.weight.data.uniform_(0.7, 1.3)


class Attention(nn.Module):
    """Differential attention; `known` are the keys and values that it made last."""

    known: tuple[torch.Tensor, torch.Tensor]

    def __init__(
        self, config: Config, number: int, window: int | None, source: list[Any]
    ) -> None:
        super().__init__()
        hidden, self.heads = config["hidden_size"], config["num_attention_heads"]
        self.kv_heads, self.head = config["num_key_value_heads"], hidden // self.heads
        width = self.heads + (0 if source else 2 * self.kv_heads)
        self.Wqkv = nn.Linear(hidden, width * self.head)
        self.out_proj = nn.Linear(hidden, hidden)
        self.inner_cross_attn = Differential(self.head)
        self.initial = 0.8 - 0.6 * math.exp(-0.3 * number)
        self.window, self.source = window, source

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        heads = self.Wqkv(tokens).view(len(tokens), -1, self.head)
        q, made = heads.split([self.heads, heads.shape[1] - self.heads], dim=1)
        if not self.source:
            self.known = made[:, : self.kv_heads], made[:, self.kv_heads :]
        k, v = self.source[0].known if self.source else self.known
        of_first = self._seen(q[:, ::2], k[:, ::2], v)
        of_second = self._seen(q[:, 1::2], k[:, 1::2], v)
        learned = self.inner_cross_attn
        factor = (
            torch.exp(learned.lambda_q1 @ learned.lambda_k1)
            - torch.exp(learned.lambda_q2 @ learned.lambda_k2)
            + self.initial
        )
        found = learned.subln(of_first - factor * of_second) * (1 - self.initial)
        return self.out_proj(found.flatten(1))

    def _seen(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Values of both heads of each pair, side by side."""
        times = q.shape[1] // k.shape[1]
        k = k.repeat_interleave(times, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * self.head**-0.5
        weights = causal(scores, self.window)
        both = (v[:, half::2].repeat_interleave(times, dim=1) for half in (0, 1))
        return torch.cat(
            [torch.einsum("hqk,khd->qhd", weights, one) for one in both], dim=-1
        )


class MLP(nn.Module):
    """The feed-forward layer."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        self.fc1 = nn.Linear(hidden, 2 * inner, bias=False)
        self.fc2 = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.fc1(x).chunk(2, dim=-1)
        return self.fc2(functional.silu(gate) * up)


class Layer(nn.Module):
    """Both parts, each behind a norm."""

    def __init__(self, config: Config, mixer: nn.Module) -> None:
        super().__init__()
        hidden, eps = config["hidden_size"], config["layer_norm_eps"]
        self.input_layernorm = nn.LayerNorm(hidden, eps)
        self.attn = mixer
        self.post_attention_layernorm = nn.LayerNorm(hidden, eps)
        self.mlp = MLP(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Embedding, layers, norm."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        hidden, eps = config["hidden_size"], config["layer_norm_eps"]
        self.embed_tokens = nn.Embedding(config["vocab_size"], hidden)
        self.layers = nn.ModuleList(Layer(config, m) for m in _mixers(config))
        self.final_layernorm = nn.LayerNorm(hidden, eps)


def _mixers(config: Config) -> list[nn.Module]:
    """Of all layers: those of the second half read two of the first."""
    half, found = config["num_hidden_layers"] // 2, list[Any]()
    for number in range(2 * half):
        is_cross = number >= half + 2
        if number % 2:
            window = config["sliding_window"] if number < half else None
            source = [found[half + 1]] if is_cross else []
            found.append(Attention(config, number, window, source))
        elif is_cross:
            found.append(GatedMemoryUnit(config, found[half]))
        else:
            found.append(Mamba(config))
    return found


class Model(nn.Module):
    """With the embedding as its head."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.model = Decoder(config)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            x = layer(x)
        return self.model.final_layernorm(x) @ self.model.embed_tokens.weight.T


def build(config: Config) -> nn.Module:
    """The model."""
    return Model(config)
