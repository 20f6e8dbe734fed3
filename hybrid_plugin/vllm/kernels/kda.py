# SPDX-License-Identifier: Apache-2.0
"""Kimi delta attention, as in Kimi-Linear."""

from __future__ import annotations

from typing import Any

import torch

from hybrid_plugin.config import ConfigError
from hybrid_plugin.mixers import kda
from hybrid_plugin.mixers.kda import Weights
from hybrid_plugin.mixers.mixing import mix
from hybrid_plugin.mixers.state_pass import StatePass
from hybrid_plugin.vllm.kernels.convolution import bias_of, states_of, weight_of
from hybrid_plugin.vllm.kernels.records import RecordForm, record_of


def weights_of(layer: Any) -> Weights:
    """What the mixer needs of a layer, of this rank's heads.

    Raises:
        ConfigError: for a decay with a lower bound, which is another function.
    """
    if layer.gate_lower_bound is not None:
        raise ConfigError(
            "hybrid-plugin's kernels know no delta attention whose decay has a lower "
            'bound. Set the option "kernels" to "engine".'
        )
    _, (heads, _, depth) = layer.get_state_shape()
    return Weights(
        convolution=weight_of(layer.conv1d),
        bias=bias_of(layer.conv1d),
        activation="silu",
        A=-torch.exp(layer.A_log.detach().float()),
        dt_bias=layer.dt_bias.detach().view(heads, depth),
        key_heads=heads,
    )


def record_form(layer: Any, weights: Weights) -> RecordForm:
    """What a record of a layer's drafts is like."""
    return RecordForm(weights.key_heads, wide_decay=True)


def run(
    layer: Any,
    weights: Weights,
    state_pass: StatePass,
    mixed_qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    gate: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Run a pass, and the layer's norm behind it.

    Args:
        layer: vLLM's.
        weights: its.
        state_pass: the sequences.
        mixed_qkv: ``[T, 3 * H * K]``: queries, keys, values, before the convolution.
        a: ``[1, T, H, K]``, what the decay is made of.
        b: ``[1, T, H]``, the write strength before the logistic function.
        gate: ``[T, H, K]``, of the norm.
        out: ``[1, T, H, K]``, written.
    """
    pools = states_of(layer, weights.convolution), layer.kv_cache[1]
    mix(
        kda,
        weights,
        state_pass,
        (mixed_qkv, a[0], b[0]),
        pools,
        out[0],
        record_of(layer),
    )
    out.copy_(layer.o_norm(out, gate))


def warm_up(layer: Any, weights: Weights, state_pass: StatePass) -> None:
    """Run a pass of nothing but padding, so that its kernels are compiled.

    Args:
        layer: vLLM's, with its states in place: kernels are compiled for their strides.
        weights: its.
        state_pass: the sequences.
    """
    conv_states, states = layer.kv_cache
    tokens, (heads, width, depth) = state_pass.tokens, states.shape[1:]
    like = {"dtype": conv_states.dtype, "device": states.device}
    inputs = (
        torch.zeros((tokens, weights.convolution.shape[0]), **like),
        torch.zeros((tokens, heads, depth), **like),
        torch.zeros((tokens, heads), **like),
    )
    pools = states_of(layer, weights.convolution), states
    out = torch.empty((tokens, heads, width), **like)
    mix(kda, weights, state_pass, inputs, pools, out, record_of(layer))
