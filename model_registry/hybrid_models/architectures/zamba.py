# SPDX-License-Identifier: Apache-2.0
"""Zamba (Glorioso et al. 2024, "Zamba: A Compact 7B SSM Hybrid Model",
arXiv:2405.16712): layers of Mamba-1 with several heads, before some of which one
transformer block runs, the same one each time.

The block has a cache of its own in each of these layers, and sees the tokens'
embeddings as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from hybrid_kernels import selective_scan
from torch import nn
from torch.nn import functional

from hybrid_models.architectures.zamba2 import SharedLayer, StateLayer, Zamba2
from hybrid_models.blocks.convolution import Convolution
from hybrid_models.blocks.mlp import GatedMLP
from hybrid_models.blocks.projection import project
from hybrid_models.kit import Kit, Placement, StateTensor, own_part_of_keys, part
from hybrid_models.mixers.mamba1 import Mamba1Shape
from hybrid_models.sharding import minus_exp, sharded
from hybrid_models.weights import GATE_UP, QKV, Names
from hybrid_plugin.mixers import selective
from hybrid_plugin.mixers.mixing import mix
from hybrid_plugin.mixers.state_pass import StatePass


class Zamba(Zamba2):
    """`ZambaForCausalLM`."""

    NAMES = Names(
        {
            ".A_log": ".A",
            ".shared_transf.": ".shared_transformer.",
            "model.final_layernorm.": "model.norm.",
        },
        {**QKV, **GATE_UP},
    )

    def build_layer(self, config: Any, kit: Kit, number: int, name: str) -> nn.Module:
        """One layer."""
        if number not in self.attention_layers(config):
            mixer = HeadedMamba1(config, kit, number, f"{name}.mamba")
            return StateLayer(config, kit, mixer)
        if not self._blocks:
            self._blocks[0] = SharedBlock(config, kit, f"{name}.shared_transformer")
        mixer = HeadedMamba1(config, kit, number, f"{name}.mamba_decoder.mamba")
        return SharedLayer(config, kit, number, self._blocks[0], mixer, name)

    @classmethod
    def state_tensors(
        cls, config: Any, placement: Placement
    ) -> tuple[StateTensor, ...]:
        """Those of Mamba-1."""
        return mamba1_shape(config).state_tensors(placement)


class SharedBlock(nn.Module):
    """Attention and a gated feed-forward layer, each behind a norm."""

    def __init__(self, config: Any, kit: Kit, name: str) -> None:
        """Build it, called by the first layer that uses it."""
        super().__init__()
        eps = config.rms_norm_eps
        self.input_layernorm = kit.norm(config.attention_hidden_size, eps)
        self.self_attn = SharedAttention(config, kit, f"{name}.self_attn")
        self.pre_ff_layernorm = kit.norm(config.hidden_size, eps)
        self.feed_forward = GatedMLP(
            kit,
            config.hidden_size,
            config.intermediate_size,
            name=f"{name}.feed_forward",
            activation=functional.gelu,
        )

    def forward(
        self, positions: torch.Tensor, both: torch.Tensor, attn: nn.Module, use: int
    ) -> torch.Tensor:
        """Tokens with their embeddings, ``[T, 2 * hidden]``, to ``[T, hidden]``.

        Args:
            positions: ``[T]``; they play no part.
            both: the tokens.
            attn: attention over the cache of the layer that uses the block.
            use: which use of the block it is; all are alike.
        """
        x = self.self_attn(self.input_layernorm(both), attn)
        result: torch.Tensor = self.feed_forward(self.pre_ff_layernorm(x))
        return result


class SharedAttention(nn.Module):
    """Projections of the shared block's attention, without positions."""

    def __init__(self, config: Any, kit: Kit, name: str) -> None:
        """Build them."""
        super().__init__()
        hidden, head = config.attention_hidden_size, config.attention_head_dim
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.qkv_proj = kit.qkv(hidden, head, heads, kv_heads, name=f"{name}.qkv_proj")
        self.o_proj = kit.row(heads * head, config.hidden_size, name=f"{name}.o_proj")
        own_kv = own_part_of_keys(kit, kv_heads) * head
        self._sizes = [part(kit, heads) * head, own_kv, own_kv]

    def forward(self, x: torch.Tensor, attn: nn.Module) -> torch.Tensor:
        """Tokens ``[T, 2 * hidden]`` to ``[T, hidden]``."""
        q, k, v = torch.split(project(self.qkv_proj, x), self._sizes, dim=-1)
        return project(self.o_proj, attn(q, k, v))


class HeadedMamba1(nn.Module):
    """Mamba-1 whose heads each make time steps, B and C of their own channels only.

    Tokens ``[T, hidden]`` to the same.  Its input projection has the gate of a channel
    beside the channel.
    """

    def __init__(self, config: Any, kit: Kit, layer: int, name: str) -> None:
        """Build layer number `layer`.

        Raises:
            ValueError: if ranks cannot share its heads.
        """
        super().__init__()
        shape, heads = mamba1_shape(config), config.n_mamba_heads
        head, state, rank = shape.inner // heads, shape.state, shape.dt_rank
        self.in_proj = kit.column(
            shape.hidden, [2 * shape.inner], name=f"{name}.in_proj", bias=shape.bias
        )
        self.conv1d = Convolution(kit, [shape.inner], shape.taps, bias=shape.conv_bias)
        self.x_proj_weight = sharded(kit, [heads], (rank + 2 * state, head))
        self.dt_proj_weight = sharded(kit, [heads], (head, rank))
        self.dt_proj_bias = sharded(kit, [heads], (head,), dtype=torch.float32)
        self.A = sharded(kit, [heads], (head, state), dtype=torch.float32, of=minus_exp)
        self.D = sharded(kit, [heads], (head,), dtype=torch.float32)
        self.out_proj = kit.row(
            shape.inner, shape.hidden, name=f"{name}.out_proj", bias=shape.bias
        )
        self._selected, self._width = [rank, state, state], part(kit, shape.inner)
        self.states = kit.states(
            layer,
            shape.state_tensors(kit),
            self._mix,
            width=self._width,
            name=f"{name}.states",
            captured=True,
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Tokens ``[T, hidden]`` to the same."""
        pairs = project(self.in_proj, hidden).view(-1, self._width, 2)
        x, gate = (one.contiguous() for one in pairs.unbind(-1))
        return project(self.out_proj, self.states(x, gate))

    def _select(
        self, head: int, x: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Time steps ``[T, P]``, B and C ``[T, K]``, of a head's `P` channels."""
        selected = functional.linear(x, self.x_proj_weight[head])
        dt, b, c = torch.split(selected, self._selected, dim=-1)
        return functional.linear(dt, self.dt_proj_weight[head]), b, c

    def _mix(
        self,
        state_pass: StatePass,
        inputs: Sequence[torch.Tensor],
        pools: Sequence[torch.Tensor],
        out: torch.Tensor,
    ) -> None:
        """`kit.Mix` of inputs and gates, ``[T, I]``; one head after the other."""
        bias = self.conv1d.bias
        heads, size = self.D.shape
        for head in range(heads):
            own = slice(head * size, (head + 1) * size)
            weights = selective.Weights(
                kernels=selective_scan,
                convolution=self.conv1d.weight[own],
                bias=None if bias is None else bias[own],
                activation="silu",
                A=self.A[head],
                skip=self.D[head],
                dt_bias=self.dt_proj_bias[head],
                select=partial(self._select, head),
            )
            parts = [one[:, own] for one in inputs]
            states = [pool[:, own] for pool in pools]
            mix(selective, weights, state_pass, parts, states, out[:, own])


def mamba1_shape(config: Any) -> Mamba1Shape:
    """Of a state layer."""
    return Mamba1Shape(
        hidden=config.hidden_size,
        inner=config.mamba_expand * config.hidden_size,
        state=config.mamba_d_state,
        taps=config.mamba_d_conv,
        dt_rank=config.mamba_dt_rank,
        bias=config.mamba_proj_bias,
        conv_bias=config.mamba_conv_bias,
    )
