# SPDX-License-Identifier: Apache-2.0
"""Zamba2: Mamba-2 layers, before some of which one of a few transformer blocks runs.

The blocks are shared: each is used in several layers, with a cache and low-rank
adapters of its own in each.  They see the tokens' embeddings as well.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from hybrid_models.architecture import Architecture, numbers
from hybrid_models.blocks.projection import project
from hybrid_models.kit import Kit, Placement, StateTensor, part
from hybrid_models.mixers.mamba2 import Mamba2, Mamba2Shape
from hybrid_models.weights import QKV, Names

MAMBA_EPS = 1e-5
"""Of the gated norm, which the configuration does not give."""


class Zamba2(Architecture):
    """`Zamba2ForCausalLM`."""

    NAMES = Names({**Mamba2.RENAMES, "model.final_layernorm.": "model.norm."}, QKV)

    def __init__(self, config: Any, kit: Kit, *, name: str = "model") -> None:
        """Build the model, without weights."""
        self._blocks: dict[int, nn.Module] = {}
        super().__init__(config, kit, name=name)
        del self._blocks  # their layers have them

    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As of every architecture; layers are given the embeddings, too."""
        first = hidden = self.embed(ids, embeds)
        for layer in self.layers:
            hidden = layer(positions, hidden, first)
        result: torch.Tensor = self.norm(hidden)
        return result

    def build_layer(self, config: Any, kit: Kit, number: int, name: str) -> nn.Module:
        """One layer."""
        if number not in config.hybrid_layer_ids:
            mixer = Mamba2(mamba2_shape(config), kit, number, f"{name}.mamba")
            return StateLayer(config, kit, mixer)
        use = config.hybrid_layer_ids.index(number)
        which = use % config.num_mem_blocks
        if which not in self._blocks:
            self._blocks[which] = SharedBlock(
                config, kit, which, f"{name}.shared_transformer"
            )
        inner = f"{name}.mamba_decoder.mamba"
        mixer = Mamba2(mamba2_shape(config), kit, number, inner)
        return SharedLayer(config, kit, number, self._blocks[which], mixer, name, use)

    @classmethod
    def attention_layers(cls, config: Any) -> list[int]:
        """Those with a transformer block."""
        return numbers(config.layers_block_type, "hybrid")

    @classmethod
    def state_layers(cls, config: Any) -> list[int]:
        """All of them."""
        return list(range(config.num_hidden_layers))

    @classmethod
    def state_tensors(
        cls, config: Any, placement: Placement
    ) -> tuple[StateTensor, ...]:
        """Those of Mamba-2."""
        return mamba2_shape(config).state_tensors(placement)


class StateLayer(nn.Module):
    """A mixer behind a norm."""

    def __init__(self, config: Any, kit: Kit, mixer: nn.Module) -> None:
        """Build it around a mixer: tokens ``[T, hidden]`` to the same."""
        super().__init__()
        self.input_layernorm = kit.norm(config.hidden_size, config.rms_norm_eps)
        self.mamba = mixer

    def forward(
        self, positions: torch.Tensor, hidden: torch.Tensor, added: torch.Tensor
    ) -> torch.Tensor:
        """Tokens ``[T, hidden]`` to the same."""
        return self.beside(hidden, hidden)

    def beside(self, hidden: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """What the layer makes of `x`, added to `hidden`."""
        result: torch.Tensor = hidden + self.mamba(self.input_layernorm(x))
        return result


class SharedLayer(nn.Module):
    """A use of a shared block, and a mixer behind it."""

    def __init__(
        self,
        config: Any,
        kit: Kit,
        number: int,
        block: nn.Module,
        mixer: nn.Module,
        name: str,
        use: int = 0,
    ) -> None:
        """Build layer `number`.

        Args:
            config: of the model.
            kit: of the engine.
            number: of the layer.
            block: called as a `SharedBlock`.
            mixer: tokens ``[T, hidden]`` to the same.
            name: of the layer.
            use: how many layers before it use a block.
        """
        super().__init__()
        self.shared_transformer = block
        self._use = use
        head = config.attention_head_dim
        self.attn = kit.attention(
            number,
            config.num_attention_heads,
            config.num_key_value_heads,
            head,
            scale=(head / 2) ** -0.5,
            name=f"{name}.attn",
        )
        self.linear = kit.replicated(
            config.hidden_size, config.hidden_size, name=f"{name}.linear"
        )
        self.mamba_decoder = StateLayer(config, kit, mixer)

    def forward(
        self, positions: torch.Tensor, hidden: torch.Tensor, first: torch.Tensor
    ) -> torch.Tensor:
        """Tokens ``[T, hidden]`` to the same; `first` are their embeddings."""
        both = torch.cat([hidden, first], dim=-1)
        made = self.shared_transformer(positions, both, self.attn, self._use)
        x = hidden + project(self.linear, made)
        return self.mamba_decoder.beside(hidden, x)


class SharedBlock(nn.Module):
    """Attention and a feed-forward layer, each behind a norm; several layers use it."""

    def __init__(self, config: Any, kit: Kit, which: int, name: str) -> None:
        """Build block number `which`, called by the first layer that uses it."""
        super().__init__()
        eps = config.rms_norm_eps
        self.input_layernorm = kit.norm(config.attention_hidden_size, eps)
        self.self_attn = SharedAttention(config, kit, which, f"{name}.self_attn")
        self.pre_ff_layernorm = kit.norm(config.hidden_size, eps)
        self.feed_forward = SharedMLP(config, kit, which, f"{name}.feed_forward")

    def forward(
        self, positions: torch.Tensor, both: torch.Tensor, attn: nn.Module, use: int
    ) -> torch.Tensor:
        """Tokens with their embeddings, ``[T, 2 * hidden]``, to ``[T, hidden]``.

        Args:
            positions: ``[T]``.
            both: the tokens.
            attn: attention over the cache of the layer that uses the block.
            use: which use of a block it is.
        """
        x = self.self_attn(positions, self.input_layernorm(both), attn, use)
        result: torch.Tensor = self.feed_forward(self.pre_ff_layernorm(x), use)
        return result


class SharedAttention(nn.Module):
    """Projections of a shared block's attention."""

    def __init__(self, config: Any, kit: Kit, which: int, name: str) -> None:
        """Build that of block number `which`."""
        super().__init__()
        hidden, head = config.attention_hidden_size, config.attention_head_dim
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        inner = heads * head
        self.qkv_proj = kit.qkv(hidden, head, heads, kv_heads, name=f"{name}.qkv_proj")
        self.o_proj = kit.row(inner, config.hidden_size, name=f"{name}.o_proj")
        self._sizes = [part(kit, inner), *(2 * [part(kit, kv_heads * head)])]
        self._rope = None
        if config.use_mem_rope:
            longest = config.max_position_embeddings
            self._rope = kit.rope(head, config.rope_parameters, longest)
        self._adapters: list[nn.ModuleList] = []
        if config.use_shared_attention_adapter:
            for kind in "qkv":
                place = f"linear_{kind}_adapter_list"
                made = adapters(config, kit, which, hidden, [inner], f"{name}.{place}")
                setattr(self, place, made)
                self._adapters.append(made)

    def forward(
        self, positions: torch.Tensor, x: torch.Tensor, attn: nn.Module, use: int
    ) -> torch.Tensor:
        """Tokens ``[T, 2 * hidden]`` to ``[T, hidden]``."""
        q, k, v = torch.split(project(self.qkv_proj, x), self._sizes, dim=-1)
        if self._adapters:
            of_q, of_k, of_v = (modules[use](x) for modules in self._adapters)
            q, k, v = q + of_q, k + of_k, v + of_v
        if self._rope is not None:
            q, k = self._rope(positions, q.contiguous(), k.contiguous())
        return project(self.o_proj, attn(q, k, v))


class SharedMLP(nn.Module):
    """The gated feed-forward layer of a shared block."""

    def __init__(self, config: Any, kit: Kit, which: int, name: str) -> None:
        """Build that of block number `which`."""
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        bias = config.add_bias_linear
        self.gate_up_proj = kit.column(
            hidden, [inner, inner], name=f"{name}.gate_up_proj", bias=bias
        )
        self.down_proj = kit.row(inner, hidden, name=f"{name}.down_proj", bias=bias)
        place = "gate_up_proj_adapter_list"
        self.gate_up_proj_adapter_list = adapters(
            config, kit, which, hidden, [inner, inner], f"{name}.{place}"
        )

    def forward(self, x: torch.Tensor, use: int) -> torch.Tensor:
        """Tokens ``[T, hidden]`` to the same."""
        adapted = self.gate_up_proj_adapter_list[use](x)
        gate, up = (project(self.gate_up_proj, x) + adapted).chunk(2, dim=-1)
        return project(self.down_proj, functional.gelu(gate) * up)


class Adapter(nn.Sequential):
    """A low-rank projection ``[T, inner]`` to this rank's part of each output."""

    def __init__(
        self, kit: Kit, inner: int, rank: int, outs: list[int], name: str
    ) -> None:
        """Build it."""
        super().__init__(
            kit.replicated(inner, rank, name=f"{name}.0"),
            kit.column(rank, outs, name=f"{name}.1"),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One after the other."""
        return project(self[1], project(self[0], x))


def adapters(
    config: Any, kit: Kit, which: int, inner: int, outs: list[int], name: str
) -> nn.ModuleList:
    """Those of block number `which`, by use; other blocks' uses have none here."""
    rank, blocks = config.adapter_rank, config.num_mem_blocks
    return nn.ModuleList(
        Adapter(kit, inner, rank, outs, f"{name}.{use}")
        if use % blocks == which
        else nn.Identity()
        for use in range(len(config.hybrid_layer_ids))
    )


def mamba2_shape(config: Any) -> Mamba2Shape:
    """Of a state layer."""
    return Mamba2Shape(
        hidden=config.hidden_size,
        heads=config.n_mamba_heads,
        head=config.mamba_headdim,
        groups=config.mamba_ngroups,
        state=config.mamba_d_state,
        taps=config.mamba_d_conv,
        eps=MAMBA_EPS,
        bias=config.add_bias_linear,
        norm_groups=config.mamba_ngroups,
        least_step=config.time_step_min,
    )
