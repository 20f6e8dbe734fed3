# SPDX-License-Identifier: Apache-2.0
"""xLSTM as in xLSTM 7B (Beck et al. 2025, arXiv:2503.13427): a matrix memory and a
gated feed-forward layer in each layer, and no attention.

`T` tokens, `H` heads of one rank, of `K` key and `V` value channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import xLSTMConfig

from hybrid_models.blocks.mlp import GatedMLP
from hybrid_models.blocks.projection import project
from hybrid_models.blocks.residual import PreNormArchitecture, add_and_norm
from hybrid_models.kit import Kit, Placement, StateTensor, part
from hybrid_models.sharding import sharded
from hybrid_models.weights import Names
from hybrid_plugin.mixers import mlstm
from hybrid_plugin.mixers.mixing import mix
from hybrid_plugin.mixers.state_pass import StatePass


class Config(xLSTMConfig):  # type: ignore[no-untyped-call]
    """Of published checkpoints, which name the kernels that their authors ran.

    transformers refuses names of kernels that it has not, and nobody here reads them.
    """

    def __init__(self, **given: Any) -> None:
        """Take what is given but those."""
        kept = {name: value for name, value in given.items() if name not in _KERNELS}
        super().__init__(**kept)


# By this name transformers finds the models and tokenizers of a configuration.
Config.__name__ = xLSTMConfig.__name__
_KERNELS = ("chunkwise_kernel", "sequence_kernel", "step_kernel")


class XLSTM(PreNormArchitecture):
    """`xLSTMForCausalLM`.

    Checkpoints have projections one by one, or, with a `weight_mode` of "fused", those
    of one input as one tensor.
    """

    NAMES = Names(
        {
            "backbone.embeddings.": "model.embed_tokens.",
            "backbone.blocks.": "model.layers.",
            "backbone.out_norm.": "model.norm.",
            ".qkv_opreact.": ".in_proj.",
            ".proj_up_gate_z.": ".gate_up_proj.",
            ".proj_down.": ".down_proj.",
        },
        {
            "mlstm_layer.q": ("mlstm_layer.in_proj", 0),
            "mlstm_layer.k": ("mlstm_layer.in_proj", 1),
            "mlstm_layer.v": ("mlstm_layer.in_proj", 2),
            "ogate_preact": ("in_proj", 3),
            "igate_preact": ("ifgate_preact", 0),
            "fgate_preact": ("ifgate_preact", 1),
            "proj_up_gate": ("gate_up_proj", 0),
            "proj_up": ("gate_up_proj", 1),
        },
    )
    STATES = 1
    CONFIG = Config
    LONGEST = 32_768

    def build_layer(self, config: Any, kit: Kit, number: int, name: str) -> nn.Module:
        """One layer.

        Raises:
            ValueError: for a model whose norms have biases.
        """
        if config.use_bias:
            raise ValueError("xLSTM is not served with biases (use_bias)")
        return Layer(config, kit, number, name)

    def build_norm(self, config: Any, kit: Kit) -> nn.Module:
        """What follows the layers."""
        return kit.norm(config.hidden_size, config.norm_eps)

    @classmethod
    def attention_layers(cls, config: Any) -> list[int]:
        """None."""
        return []

    @classmethod
    def state_layers(cls, config: Any) -> list[int]:
        """All of them."""
        return list(range(config.num_hidden_layers))

    @classmethod
    def state_tensors(
        cls, config: Any, placement: Placement
    ) -> tuple[StateTensor, ...]:
        """The memories of the heads, their normalisers and stabilisers."""
        return memory_shape(config).state_tensors(placement)

    @classmethod
    def logit_cap(cls, config: Any) -> float | None:
        """Of the configuration."""
        cap: float | None = config.output_logit_soft_cap
        return cap


class Layer(nn.Module):
    """A matrix memory, then a gated feed-forward layer, each behind a norm."""

    def __init__(self, config: Any, kit: Kit, number: int, name: str) -> None:
        """Build layer `number`."""
        super().__init__()
        hidden, eps = config.hidden_size, config.norm_eps
        self.norm_mlstm = kit.norm(hidden, eps)
        self.mlstm_layer = MatrixMemory(
            memory_shape(config), kit, number, f"{name}.mlstm_layer"
        )
        self.norm_ffn = kit.norm(hidden, eps)
        self.ffn = GatedMLP(kit, hidden, inner_size(config), name=f"{name}.ffn")

    def forward(
        self,
        positions: torch.Tensor,
        hidden: torch.Tensor,
        added: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `PreNormArchitecture` has it."""
        x, hidden = add_and_norm(self.norm_mlstm, hidden, added)
        x, hidden = add_and_norm(self.norm_ffn, hidden, self.mlstm_layer(x))
        return hidden, self.ffn(x)


@dataclass(frozen=True, slots=True)
class MemoryShape:
    """Of one layer, over all ranks."""

    hidden: int
    heads: int
    keys: int
    """Channels of the queries of all heads, and of their keys."""
    values: int
    gate_cap: float | None
    """Bound of the gates before their functions."""
    eps: float
    """Of the memory's output."""
    norm_eps: float

    def state_tensors(self, placement: Placement) -> tuple[StateTensor, ...]:
        """One tensor for all that a layer keeps, in float32 as its sums are long."""
        shape = mlstm.state_shape(
            part(placement, self.heads),
            self.keys // self.heads,
            self.values // self.heads,
        )
        return (StateTensor(shape, torch.float32),)


class MatrixMemory(nn.Module):
    """Tokens ``[T, hidden]`` to the same."""

    def __init__(self, shape: MemoryShape, kit: Kit, layer: int, name: str) -> None:
        """Build layer number `layer`.

        Raises:
            ValueError: if ranks cannot share its heads.
        """
        super().__init__()
        keys, values = part(kit, shape.keys), part(kit, shape.values)
        self._shape, self._heads = shape, part(kit, shape.heads)
        self._sizes = [keys, keys, values, values]
        outs = [shape.keys, shape.keys, shape.values, shape.values]
        self.in_proj = kit.column(shape.hidden, outs, name=f"{name}.in_proj")
        self.ifgate_preact = kit.column(
            shape.hidden, [shape.heads] * 2, name=f"{name}.ifgate_preact", bias=True
        )
        self.multihead_norm = HeadNorm(kit, shape)
        self.out_proj = kit.row(shape.values, shape.hidden, name=f"{name}.out_proj")
        self.states = kit.states(
            layer,
            shape.state_tensors(kit),
            self._mix,
            width=values,
            name=f"{name}.states",
            captured=True,
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Tokens ``[T, hidden]`` to the same."""
        projected = torch.split(project(self.in_proj, hidden), self._sizes, dim=-1)
        q, k, v = (
            x.view(-1, self._heads, size // self._heads)
            for x, size in zip(projected[:3], self._sizes[:3], strict=True)
        )
        gates = capped(project(self.ifgate_preact, hidden).float(), self._shape)
        memory = self.states(q, k, v, *gates.chunk(2, dim=-1))
        normed = self.multihead_norm(memory)
        return project(self.out_proj, torch.sigmoid(projected[3]) * normed)

    def _mix(
        self,
        state_pass: StatePass,
        inputs: Sequence[torch.Tensor],
        pools: Sequence[torch.Tensor],
        out: torch.Tensor,
    ) -> None:
        """`kit.Mix` of queries, keys and values, ``[T, H, ...]``, and gates ``[T, H]``,
        before their functions."""
        heads = out.view(len(out), self._heads, -1)
        mix(mlstm, mlstm.Weights(self._shape.eps), state_pass, inputs, pools, heads)


class HeadNorm(nn.Module):
    """Norm of each head by its mean and variance."""

    def __init__(self, kit: Kit, shape: MemoryShape) -> None:
        """Build it."""
        super().__init__()
        self.weight = sharded(kit, [shape.values])
        self._heads, self._head = part(kit, shape.heads), shape.values // shape.heads
        self._eps = shape.norm_eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[T, H * V]`` to the same."""
        heads = x.float().view(-1, self._heads, self._head)
        normed = functional.layer_norm(heads, [self._head], eps=self._eps)
        return normed.flatten(1).to(x.dtype) * self.weight


def capped(gates: torch.Tensor, shape: MemoryShape) -> torch.Tensor:
    """Gates between the layer's bounds, smoothly."""
    if shape.gate_cap is None:
        return gates
    return torch.tanh(gates / shape.gate_cap) * shape.gate_cap


def inner_size(config: Any) -> int:
    """Channels of a feed-forward layer: a whole number of times some number."""
    multiple = config.ffn_round_up_to_multiple_of
    least = config.hidden_size * config.ffn_proj_factor
    return int((least + multiple - 1) // multiple) * int(multiple)


def memory_shape(config: Any) -> MemoryShape:
    """Of each layer."""
    return MemoryShape(
        hidden=config.hidden_size,
        heads=config.num_heads,
        keys=int(config.hidden_size * config.qk_dim_factor),
        values=int(config.hidden_size * config.v_dim_factor),
        gate_cap=config.gate_soft_cap,
        eps=config.eps,
        norm_eps=config.norm_eps,
    )
