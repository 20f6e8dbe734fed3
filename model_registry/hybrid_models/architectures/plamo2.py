# SPDX-License-Identifier: Apache-2.0
"""PLaMo 2: Mamba-2 with Mamba-1's selection, attention over a window or all tokens, and
a norm before and behind each block."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from hybrid_models.architecture import Architecture, numbers
from hybrid_models.blocks.attention import Attention, AttentionShape
from hybrid_models.blocks.mlp import GatedMLP
from hybrid_models.kit import Kit, Placement, StateTensor
from hybrid_models.mixers.selective_ssd import SelectiveShape, SelectiveSSD
from hybrid_models.sharding import sharded
from hybrid_models.weights import Names

AFTER_MIXER, AFTER_MLP = 5**-1.0, 5**-1.5
"""What weights of the norms behind a block are counted from."""
HEAD_EPS = 1e-6
"""Of norms of queries and keys, which no configuration gives."""
LEAST_DT_RANK = 64
DEFAULTS: dict[str, Any] = {
    "attention_window_size": 2048,
    "full_attention_idx": None,
    "hidden_size_per_head": 128,
    "mamba_d_conv": 4,
    "mamba_d_state": 64,
    "mamba_enabled": True,
    "mamba_num_heads": 64,
    "mamba_step": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
"""Of the configuration."""


class Config(PretrainedConfig):  # type: ignore[no-untyped-call]
    """Of the published checkpoints."""

    model_type = "plamo2"
    rope_parameters = None

    def __init__(self, **given: Any) -> None:
        """Take what is given, and fill in the rest.

        Engines would take `sliding_window` for the window of every layer.
        """
        filled = DEFAULTS | given | {"sliding_window": None}
        filled["head_dim"] = filled["hidden_size_per_head"]
        filled["layers_block_type"] = _kinds(filled)
        super().__init__(**filled)


class Plamo2(Architecture):
    """`Plamo2ForCausalLM`."""

    NAMES = Names(
        {
            **SelectiveSSD.RENAMES,
            "model.layers.layers.": "model.layers.",
            ".q_weight": ".q_norm.weight",
            ".k_weight": ".k_norm.weight",
        }
    )
    CONFIG = Config

    def build_layer(self, config: Any, kit: Kit, number: int, name: str) -> nn.Module:
        """One layer."""
        return Layer(config, kit, number, name)

    def build_norm(self, config: Any, kit: Kit) -> nn.Module:
        """With weights counted from one."""
        return kit.norm(config.hidden_size, config.rms_norm_eps, centred=True)

    @classmethod
    def attention_layers(cls, config: Any) -> list[int]:
        """Every few layers."""
        return numbers(config.layers_block_type, "attention")

    @classmethod
    def state_layers(cls, config: Any) -> list[int]:
        """All others."""
        return numbers(config.layers_block_type, "mamba")

    @classmethod
    def state_tensors(
        cls, config: Any, placement: Placement
    ) -> tuple[StateTensor, ...]:
        """Those of the recurrence."""
        return selective_shape(config).state_tensors(placement)


class Layer(nn.Module):
    """A recurrence or attention, then a feed-forward layer, each between norms."""

    def __init__(self, config: Any, kit: Kit, number: int, name: str) -> None:
        """Build layer `number`."""
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.pre_mixer_norm = kit.norm(hidden, eps, centred=True)
        self.post_mixer_norm = OffsetNorm(kit, hidden, eps, AFTER_MIXER)
        self.pre_mlp_norm = kit.norm(hidden, eps, centred=True)
        self.post_mlp_norm = OffsetNorm(kit, hidden, eps, AFTER_MLP)
        self.has_attention = config.layers_block_type[number] == "attention"
        place = f"{name}.mixer"
        self.mixer: nn.Module
        if self.has_attention:
            self.mixer = NormedAttention(config, kit, number, place)
        else:
            self.mixer = SelectiveSSD(selective_shape(config), kit, number, place)
        self.mlp = GatedMLP(kit, hidden, config.intermediate_size, name=f"{name}.mlp")

    def forward(self, positions: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Tokens ``[T, hidden]`` to the same."""
        x = self.pre_mixer_norm(hidden)
        mixed = self.mixer(positions, x) if self.has_attention else self.mixer(x)
        hidden = hidden + self.post_mixer_norm(mixed)
        x = self.mlp(self.pre_mlp_norm(hidden))
        result: torch.Tensor = hidden + self.post_mlp_norm(x)
        return result


class OffsetNorm(nn.Module):
    """``norm(x) * (offset + weight)``."""

    def __init__(self, kit: Kit, size: int, eps: float, offset: float) -> None:
        """Build it for `size` channels."""
        super().__init__()
        self.weight = sharded(kit, [size], whole=[True], of=partial(torch.add, offset))
        self._eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens ``[T, size]`` to the same."""
        return self.weight * normed(x, self._eps)


class NormedAttention(Attention):
    """Attention with norms of queries and keys, whose weights are those of a head."""

    def __init__(self, config: Any, kit: Kit, number: int, name: str) -> None:
        """Build that of layer `number`."""
        shape = attention_shape(config, number)
        super().__init__(shape, kit, number, name)
        self.q_norm = HeadsNorm(kit, shape.heads, shape.head)
        self.k_norm = HeadsNorm(kit, shape.kv_heads, shape.head)

    def prepare(
        self, q: torch.Tensor, k: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Normed."""
        return self.q_norm(q), self.k_norm(k)


class HeadsNorm(nn.Module):
    """``norm(x) * weight``, head by head; each has a weight of its own."""

    def __init__(self, kit: Kit, heads: int, head: int) -> None:
        """Build it for `heads` of all ranks; several have the same where those are
        more."""
        super().__init__()
        self.weight = sharded(kit, [heads], (head,), whole=[True])
        own = max(heads // kit.ranks, 1)
        first = kit.rank * heads // kit.ranks
        self._own = slice(first, first + own)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens ``[T, heads * head]`` of this rank to the same."""
        weight = self.weight[self._own]
        return (weight * normed(x.view(-1, *weight.shape), HEAD_EPS)).view_as(x)


def normed(x: torch.Tensor, eps: float) -> torch.Tensor:
    """The last dimension over its root mean square, computed in float32."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (wide * scale).to(x.dtype)


def selective_shape(config: Any) -> SelectiveShape:
    """Of a state layer."""
    return SelectiveShape(
        hidden=config.hidden_size,
        heads=config.mamba_num_heads,
        head=config.hidden_size_per_head,
        state=config.mamba_d_state,
        taps=config.mamba_d_conv,
        dt_rank=max(LEAST_DT_RANK, config.hidden_size // 16),
        eps=config.rms_norm_eps,
    )


def attention_shape(config: Any, number: int) -> AttentionShape:
    """Of attention layer `number`.

    A token sees the tokens of a window before it, and itself.
    """
    is_full = number in (config.full_attention_idx or ())
    rope = config.rope_parameters or {"rope_theta": config.rope_theta}
    return AttentionShape(
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head=config.hidden_size_per_head,
        longest=config.max_position_embeddings,
        rope={"rope_type": "default"} | rope,
        window=None if is_full else config.attention_window_size + 1,
    )


def _kinds(given: dict[str, Any]) -> list[str]:
    """Of layers.

    Raises:
        ValueError: for a model without state layers.
    """
    if not given["mamba_enabled"]:
        raise ValueError("PLaMo 2 without Mamba layers is not served")
    count, step = given.get("num_hidden_layers", 0), given["mamba_step"]
    place = min(step // 2, count - 1) if count <= step // 2 else step // 2
    return ["attention" if n % step == place else "mamba" for n in range(count)]
