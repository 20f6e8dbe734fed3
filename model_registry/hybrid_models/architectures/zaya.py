# SPDX-License-Identifier: Apache-2.0
"""Zaya: compressed convolutional attention, and experts of which a token takes one or
none, chosen by routers that see what the routers before them saw.

Checkpoints are those of transformers' layout, as ZAYA1-8B is published.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from hybrid_models.architecture import Architecture
from hybrid_models.blocks.projection import project
from hybrid_models.kit import Kit, Placement, Routing, StateTensor
from hybrid_models.mixers.cca import ConvolvedQKV, ConvolvedShape
from hybrid_models.sharding import sharded
from hybrid_models.weights import EXPERT_PARTS, Names


class Zaya(Architecture):
    """`ZayaForCausalLM`."""

    NAMES = Names(stacked=ConvolvedQKV.STACKED, experts=EXPERT_PARTS)

    def __init__(self, config: Any, kit: Kit, *, name: str = "model") -> None:
        """Build the model, without weights.

        Raises:
            ValueError: for the layout of older checkpoints, or biases that no
                checkpoint has, or if ranks cannot share it.
        """
        if getattr(config, "zaya_layers", None):
            raise ValueError(
                "this checkpoint has the layout of ZAYA1-base, which is not the one "
                "that transformers has: only the latter is served"
            )
        if config.attention_bias or config.lm_head_bias:
            raise ValueError("Zaya with biases of attention or the head is not served")
        super().__init__(config, kit, name=name)
        self._dtype = kit.dtype
        self.input_hidden_states_scale = _channels(kit, config)
        self.input_hidden_states_bias = _channels(kit, config)

    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As of every architecture; layers hand on what their routers saw."""
        hidden = self.embed(ids, embeds)
        seen = None
        for layer in self.layers:
            hidden, seen = layer(positions, hidden, seen)
        result: torch.Tensor = self.norm(hidden.to(self._dtype))
        return result

    def embed(self, ids: torch.Tensor, embeds: torch.Tensor | None) -> torch.Tensor:
        """Tokens between layers are float32, whatever weights are."""
        found = super().embed(ids, embeds) + self.input_hidden_states_bias
        return (found * self.input_hidden_states_scale).float()

    def build_layer(self, config: Any, kit: Kit, number: int, name: str) -> nn.Module:
        """One layer."""
        return Layer(config, kit, number, name)

    @classmethod
    def attention_layers(cls, config: Any) -> list[int]:
        """All of them."""
        return list(range(config.num_hidden_layers))

    @classmethod
    def state_layers(cls, config: Any) -> list[int]:
        """All of them."""
        return list(range(config.num_hidden_layers))

    @classmethod
    def state_tensors(
        cls, config: Any, placement: Placement
    ) -> tuple[StateTensor, ...]:
        """Those of the convolutions."""
        return shape(config).state_tensors(placement)


class Layer(nn.Module):
    """Attention and experts, each behind a norm, and added with learned scales."""

    def __init__(self, config: Any, kit: Kit, number: int, name: str) -> None:
        """Build layer `number`."""
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = kit.norm(hidden, eps)
        self.post_attention_layernorm = kit.norm(hidden, eps)
        self.self_attn = Attention(config, kit, number, f"{name}.self_attn")
        self.mlp = Experts(config, kit, number, f"{name}.mlp")
        self.post_attention_residual_scale = ScaledSum(config, kit)
        self.post_mlp_residual_scale = ScaledSum(config, kit)
        self._dtype = kit.dtype

    def forward(
        self, positions: torch.Tensor, hidden: torch.Tensor, seen: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens ``[T, hidden]``, float32, to the same.

        Args:
            positions: ``[T]``.
            hidden: the tokens.
            seen: by the router of the layer before; None for the first layer.
        """
        x = self.input_layernorm(hidden.to(self._dtype))
        added = self.self_attn(positions, x)
        hidden = self.post_attention_residual_scale(added, hidden)
        x = self.post_attention_layernorm(hidden.to(self._dtype))
        added, seen = self.mlp(x, seen)
        return self.post_mlp_residual_scale(added, hidden), seen


class ScaledSum(nn.Module):
    """What a layer adds and what it is added to, each with a bias and a scale."""

    def __init__(self, config: Any, kit: Kit) -> None:
        """Build it."""
        super().__init__()
        self.hidden_states_scale = _channels(kit, config)
        self.hidden_states_bias = _channels(kit, config)
        self.residual_scale = _channels(kit, config)
        self.residual_bias = _channels(kit, config)

    def forward(self, added: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Both ``[T, hidden]`` to float32."""
        scaled = (added + self.hidden_states_bias) * self.hidden_states_scale
        return scaled + (hidden + self.residual_bias) * self.residual_scale


class Attention(nn.Module):
    """Attention of queries and keys whose length is that of their size's root."""

    def __init__(self, config: Any, kit: Kit, number: int, name: str) -> None:
        """Build that of layer `number`."""
        super().__init__()
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self._head = head = config.head_dim
        kind = config.layer_types[number]
        self.qkv_proj = ConvolvedQKV(shape(config), kit, number, f"{name}.qkv_proj")
        self.qk_norm = KeyScale(kit, kv_heads)
        self._rope = kit.rope(
            head, config.rope_parameters[kind], config.max_position_embeddings
        )
        self.attn = kit.attention(
            number,
            heads,
            kv_heads,
            head,
            scale=head**-0.5,
            name=f"{name}.attn",
            window=config.sliding_window if kind == "hybrid_sliding" else None,
        )
        self.o_proj = kit.row(heads * head, config.hidden_size, name=f"{name}.o_proj")

    def forward(self, positions: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Tokens ``[T, hidden]`` to the same."""
        q, k, v = self.qkv_proj(x)
        q = _unit(q.reshape(len(q), -1, self._head))
        k = _unit(k.reshape(len(k), -1, self._head)) * self.qk_norm.temp[:, None]
        q, k = self._rope(positions, q.flatten(-2), k.flatten(-2))
        return project(self.o_proj, self.attn(q, k, v.contiguous()))


class KeyScale(nn.Module):
    """``temp [heads of keys]``, of this rank."""

    def __init__(self, kit: Kit, kv_heads: int) -> None:
        """Build it."""
        super().__init__()
        self.temp = sharded(kit, [kv_heads])


class Experts(nn.Module):
    """Experts, and the router that chooses one for each token, or none."""

    def __init__(self, config: Any, kit: Kit, number: int, name: str) -> None:
        """Build those of layer `number`."""
        super().__init__()
        self.gate = Router(config, kit, number, f"{name}.gate")
        self.experts = kit.experts(
            number,
            config.hidden_size,
            config.moe_intermediate_size,
            config.num_experts,
            Routing(config.num_experts_per_tok, choose=self.gate.choose),
            name=f"{name}.experts",
        )

    def forward(
        self, x: torch.Tensor, seen: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens ``[T, hidden]``, and what the router before saw, to the same two."""
        logits, seen = self.gate(x, seen)
        return self.experts(x, logits), seen


class Router(nn.Module):
    """A small network of a projection of tokens, and of those of the layers before."""

    def __init__(self, config: Any, kit: Kit, number: int, name: str) -> None:
        """Build that of layer `number`."""
        super().__init__()
        size = config.router_hidden_size
        self._skip = config.num_experts
        self.down_proj = kit.replicated(
            config.hidden_size, size, name=f"{name}.down_proj", bias=True
        )
        self.router_states_scale = (
            sharded(kit, [size], whole=[True]) if number else None
        )
        self.router_mlp = RouterMLP(config, kit, f"{name}.router_mlp")
        self.balancing_biases = sharded(
            kit, [config.num_experts + 1], dtype=torch.float32, whole=[True]
        )

    def forward(
        self, x: torch.Tensor, seen: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits ``[T, experts + 1]``, and what the next router is given."""
        found = project(self.down_proj, x)
        if seen is not None and self.router_states_scale is not None:
            found = found + seen * self.router_states_scale
        return self.router_mlp(found), found

    def choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`kit.Choose`; the last one is no expert, so any other one counts nothing."""
        scores = logits.softmax(-1)
        best = (scores.float() + self.balancing_biases).argmax(-1, keepdim=True)
        skip = best == self._skip
        weights = scores.gather(-1, best).masked_fill(skip, 0)
        return weights.float(), best.masked_fill(skip, 0)


class RouterMLP(nn.Module):
    """A norm and three layers."""

    def __init__(self, config: Any, kit: Kit, name: str) -> None:
        """Build it."""
        super().__init__()
        size = config.router_hidden_size
        self.norm = kit.norm(size, config.rms_norm_eps)
        self.fc1 = kit.replicated(size, size, name=f"{name}.fc1", bias=True)
        self.fc2 = kit.replicated(size, size, name=f"{name}.fc2", bias=True)
        self.out_proj = kit.router(
            size, config.num_experts + 1, name=f"{name}.out_proj"
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[T, size]`` to logits."""
        x = functional.gelu(project(self.fc1, self.norm(x)))
        return project(self.out_proj, functional.gelu(project(self.fc2, x)))


def shape(config: Any) -> ConvolvedShape:
    """Of queries, keys and values."""
    return ConvolvedShape(
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head=config.head_dim,
        first_taps=config.cca_time0,
        second_taps=config.cca_time1,
    )


def _channels(kit: Kit, config: Any) -> nn.Parameter:
    return sharded(kit, [config.hidden_size], whole=[True])


def _unit(x: torch.Tensor) -> torch.Tensor:
    """Vectors of the last dimension, as long as the root of their size."""
    least = torch.finfo(x.dtype).eps
    length = x.norm(p=2, dim=-1, keepdim=True).clamp_min(least)
    result: torch.Tensor = x * (x.shape[-1] ** 0.5 / length)
    return result
