# SPDX-License-Identifier: Apache-2.0
"""Jet-Nemotron (Gu et al. 2025, arXiv:2508.15884): gated delta nets whose values pass a
convolution with taps of each token's own, and attention in a few layers.

`T` tokens, `H` heads of `K` channels of queries and keys and `V` of values, in all
`D = H * V`, and `W` taps; all of one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from hybrid_kernels import causal_conv1d, gated_delta_rule
from torch import nn
from torch.nn import functional
from transformers import PretrainedConfig

from hybrid_models.architecture import numbers
from hybrid_models.blocks.attention import Attention, AttentionShape
from hybrid_models.blocks.gated_norm import GatedHeadNorm
from hybrid_models.blocks.mlp import GatedMLP
from hybrid_models.blocks.projection import project
from hybrid_models.blocks.residual import PreNormArchitecture, add_and_norm
from hybrid_models.kit import Kit, Placement, StateTensor, part
from hybrid_models.sharding import minus_exp, sharded
from hybrid_models.weights import GATE_UP, QKV, Names
from hybrid_plugin.mixers.mixing import mix
from hybrid_plugin.mixers.prefills import Prefills
from hybrid_plugin.mixers.state_pass import StatePass

STATE, WINDOW, FULL = "jet", "swa", "attn"
"""Kinds of layers, as configurations name them."""
_PARTS = ("q_proj", "k_proj", "v_proj", "a_proj", "b_proj", "g_proj")


class Config(PretrainedConfig):  # type: ignore[no-untyped-call]
    """Of the published checkpoints."""

    model_type = "jet_nemotron"
    rope_parameters = None
    max_position_embeddings: ClassVar[int] = 32768

    def __init__(self, **given: Any) -> None:
        """Take what is given.

        Engines would take `sliding_window` for the window of every layer.
        """
        filled = {"rms_norm_eps": 1e-6, "rope_theta": 1000000.0} | given
        # transformers has no names for these kinds, and looks at them when it begins.
        kinds = filled.pop("layer_types", ())
        super().__init__(**filled | {"sliding_window": None})
        self.layer_types = kinds


class JetNemotron(PreNormArchitecture):
    """`JetNemotronForCausalLM`."""

    # Layers of both kinds have projections of these names in modules of one name.
    NAMES = Names(
        {".A_log": ".A", ".dynamic_conv1d.kernel_generator.": ".taps."},
        {
            **{
                f"self_attn.{old}": ("self_attn.in_proj", number)
                for number, old in enumerate(_PARTS)
            },
            **QKV,
            **GATE_UP,
        },
    )
    CONFIG = Config

    def build_layer(self, config: Any, kit: Kit, number: int, name: str) -> nn.Module:
        """One layer."""
        return Layer(config, kit, number, name)

    @classmethod
    def attention_layers(cls, config: Any) -> list[int]:
        """As the configuration has them."""
        return numbers(config.layer_types, FULL, WINDOW)

    @classmethod
    def state_layers(cls, config: Any) -> list[int]:
        """Likewise."""
        return numbers(config.layer_types, STATE)

    @classmethod
    def state_tensors(
        cls, config: Any, placement: Placement
    ) -> tuple[StateTensor, ...]:
        """The last values, and the state of each head."""
        shape = jet_shape(config)
        heads = part(placement, shape.heads)
        inputs = (heads * shape.value_head, shape.taps - 1)
        return (
            StateTensor(inputs, placement.conv_dtype, is_conv=True),
            StateTensor((heads, shape.value_head, shape.head), placement.state_dtype),
        )


class Layer(nn.Module):
    """A delta net or attention, then a feed-forward layer, each behind a norm."""

    def __init__(self, config: Any, kit: Kit, number: int, name: str) -> None:
        """Build layer `number`."""
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = kit.norm(hidden, eps)
        self.post_attention_layernorm = kit.norm(hidden, eps)
        self.has_attention = config.layer_types[number] != STATE
        place = f"{name}.self_attn"
        self.self_attn: nn.Module
        if self.has_attention:
            shape = attention_shape(config, number)
            self.self_attn = Attention(shape, kit, number, place)
        else:
            self.self_attn = JetBlock(config, kit, number, place)
        self.mlp = GatedMLP(kit, hidden, config.intermediate_size, name=f"{name}.mlp")

    def forward(
        self,
        positions: torch.Tensor,
        hidden: torch.Tensor,
        added: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `PreNormArchitecture` has it."""
        x, hidden = add_and_norm(self.input_layernorm, hidden, added)
        mixed = (
            self.self_attn(positions, x) if self.has_attention else self.self_attn(x)
        )
        x, hidden = add_and_norm(self.post_attention_layernorm, hidden, mixed)
        return hidden, self.mlp(x)


class JetBlock(nn.Module):
    """Tokens ``[T, hidden]`` to the same.

    Checkpoints have it as six projections (`q_proj`, `k_proj`, `v_proj`, `a_proj` of
    decays, `b_proj` of write strengths, `g_proj` of gates), `dynamic_conv1d`, `A_log`,
    `dt_bias`, `o_norm` and `o_proj`.
    """

    def __init__(self, config: Any, kit: Kit, number: int, name: str) -> None:
        """Build that of layer `number`.

        Raises:
            ValueError: if ranks cannot share its heads.
        """
        super().__init__()
        shape, hidden = jet_shape(config), config.hidden_size
        keys, values = shape.heads * shape.head, shape.heads * shape.value_head
        outs = [keys, keys, values, shape.heads, shape.heads, values]
        self._heads = part(kit, shape.heads)
        self._sizes = [part(kit, size) for size in outs]
        self.in_proj = kit.column(hidden, outs, name=f"{name}.in_proj")
        self.taps = Taps(hidden, values, shape, kit, f"{name}.taps")
        self.A = sharded(kit, [shape.heads], dtype=torch.float32, of=minus_exp)
        self.dt_bias = sharded(kit, [shape.heads], dtype=torch.float32)
        self.o_norm = GatedHeadNorm(kit, shape.value_head, shape.eps)
        self.o_proj = kit.row(values, hidden, name=f"{name}.o_proj")
        self.states = kit.states(
            number,
            JetNemotron.state_tensors(config, kit),
            self._mix,
            width=part(kit, values),
            name=f"{name}.states",
            captured=True,
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Tokens ``[T, hidden]`` to the same."""
        parts = torch.split(project(self.in_proj, hidden), self._sizes, dim=-1)
        q, k, v, a, b, gate = parts
        q, k = (functional.silu(x).view(len(x), self._heads, -1) for x in (q, k))
        # The kernels read these as they are; of others they take views.
        a, b, v = a.contiguous(), b.contiguous(), v.contiguous()
        states = self.states(v, self.taps(hidden), q, k, a, b)
        return project(self.o_proj, self.o_norm(states, gate))

    def _mix(
        self,
        state_pass: StatePass,
        inputs: Sequence[torch.Tensor],
        pools: Sequence[torch.Tensor],
        out: torch.Tensor,
    ) -> None:
        """`kit.Mix` of values, taps, queries, keys, decays and write strengths.

        That is ``[T, D]``, ``[T, D, W]``, twice ``[T, H, K]`` and twice ``[T, H]``.
        """
        heads = out.view(len(out), self._heads, -1)
        mix(_Mixer, _Weights(self.A, self.dt_bias), state_pass, inputs, pools, heads)


class Taps(nn.Module):
    """Tokens ``[T, hidden]`` to the taps of each, ``[T, D, W]``, of this rank.

    Checkpoints have it as `w1`, which makes few channels, and `w2`.
    """

    def __init__(
        self, hidden: int, values: int, shape: JetShape, kit: Kit, name: str
    ) -> None:
        """Build it for `values` channels over all ranks."""
        super().__init__()
        inner, self._taps = values // shape.reduction, shape.taps
        self.w1 = kit.replicated(hidden, inner, name=f"{name}.w1")
        self.w2 = kit.column(inner, [values * shape.taps], name=f"{name}.w2", bias=True)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """As the class says."""
        made = project(self.w2, functional.silu(project(self.w1, hidden)))
        return made.view(len(made), -1, self._taps)


@dataclass(frozen=True, slots=True)
class JetShape:
    """Of a state layer, over all ranks."""

    heads: int
    head: int
    value_head: int
    taps: int
    reduction: int
    """Of channels, between the two projections to taps."""
    eps: float
    """Of the gated norm."""


def jet_shape(config: Any) -> JetShape:
    """Of a state layer."""
    given = config.efficient_attention_config[STATE]
    return JetShape(
        heads=given["num_heads"],
        head=given["head_dim"],
        value_head=int(given["head_dim"] * given["expand_v"]),
        taps=given["conv_size"],
        reduction=given["dconv_generator_reduction"],
        eps=float(given["norm_eps"]),
    )


def attention_shape(config: Any, number: int) -> AttentionShape:
    """Of attention layer `number`.

    A token sees the tokens of a window before it, and itself.
    """
    heads = config.num_attention_heads
    rope = config.rope_parameters or {"rope_theta": config.rope_theta}
    window = None
    if config.layer_types[number] == WINDOW:
        window = config.efficient_attention_config[WINDOW]["window_size"] + 1
    return AttentionShape(
        hidden=config.hidden_size,
        heads=heads,
        kv_heads=config.num_key_value_heads,
        head=config.hidden_size // heads,
        longest=config.max_position_embeddings,
        rope={"rope_type": "default"} | rope,
        bias=True,
        window=window,
    )


@dataclass(frozen=True, slots=True)
class _Weights:
    """Of one layer, as far as the mixer needs them."""

    A: torch.Tensor
    """``[H]``, float32, negative."""
    dt_bias: torch.Tensor
    """``[H]``."""

    @property
    def gates(self) -> dict[str, Any]:
        """How the rule makes decays and write strengths."""
        return {"A": self.A, "dt_bias": self.dt_bias, "use_qk_l2norm": True}


class _Mixer:
    """The convolution with each token's taps, then the gated delta rule.

    The state of the convolution is that of any other of as many taps, whose kernels
    advance it; what they make of it is not looked at.
    """

    @staticmethod
    def prefill(
        weights: _Weights,
        prefills: Prefills,
        v: torch.Tensor,
        taps: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        conv_states: torch.Tensor,
        states: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Run packed sequences; leave their states in their slots."""
        convolved = _convolve(_windows(prefills, v, conv_states), taps)
        where: dict[str, Any] = {
            "has_initial": prefills.has_initial,
            "boundary_slots": prefills.boundary_slots,
            "offsets": prefills.offsets,
        }
        causal_conv1d.prefill(
            v,
            torch.zeros_like(taps[0]),
            None,
            prefills.cu_seqlens,
            conv_states,
            prefills.slots,
            **where,
        )
        gated_delta_rule.prefill(
            q,
            k,
            convolved.view(out.shape),
            a,
            b,
            prefills.cu_seqlens,
            states,
            prefills.slots,
            **where,
            **weights.gates,
            round_boundaries=prefills.round_states,
            out=out,
        )

    @staticmethod
    def decode(
        weights: _Weights,
        slots: torch.Tensor,
        v: torch.Tensor,
        taps: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        conv_states: torch.Tensor,
        states: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Run one token per sequence and advance the states."""
        before = conv_states[slots.clamp(min=0)].to(v.dtype)
        convolved = _convolve(torch.cat([before, v[:, :, None]], dim=-1), taps)
        causal_conv1d.update(v, torch.zeros_like(taps[0]), None, conv_states, slots)
        gated_delta_rule.update(
            q,
            k,
            convolved.view(out.shape),
            a,
            b,
            states,
            slots,
            **weights.gates,
            out=out,
        )


def _convolve(windows: torch.Tensor, taps: torch.Tensor) -> torch.Tensor:
    """``[T, D, W]`` twice to ``[T, D]``, in the first one's type."""
    return functional.silu((windows.float() * taps.float()).sum(-1)).to(windows.dtype)


def _windows(
    prefills: Prefills, v: torch.Tensor, conv_states: torch.Tensor
) -> torch.Tensor:
    """The last inputs at each token, ``[T, D, W]``, the oldest first.

    Args:
        prefills: the sequences.
        v: ``[T, D]``.
        conv_states: ``[S, D, W - 1]``, before they are advanced.
    """
    kept = conv_states.shape[-1]
    rows = torch.arange(len(v), device=v.device)
    ends = prefills.cu_seqlens[1:]
    sequence = torch.searchsorted(ends.long(), rows, right=True).clamp(
        max=len(ends) - 1
    )
    place = rows - prefills.cu_seqlens[:-1].long()[sequence]
    before = conv_states[prefills.slots.clamp(min=0)].to(v.dtype)
    before = before.where(prefills.has_initial[:, None, None], 0)
    found = [v]
    for back in range(1, kept + 1):
        earlier = v[(rows - back).clamp(min=0)]
        stored = before[sequence, :, (kept + place - back).clamp(0, kept - 1)]
        found.insert(0, earlier.where((place >= back)[:, None], stored))
    return torch.stack(found, dim=-1)
