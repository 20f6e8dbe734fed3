# SPDX-License-Identifier: Apache-2.0
"""The gated delta net of Qwen3-Next and Qwen3.5."""

from __future__ import annotations

from typing import Any

import torch

from hybrid_plugin.mixers import gated_delta_net
from hybrid_plugin.mixers.gated_delta_net import Weights
from hybrid_plugin.mixers.mixing import mix
from hybrid_plugin.mixers.state_pass import StatePass
from hybrid_plugin.vllm.kernels import gated_norm
from hybrid_plugin.vllm.kernels.convolution import (
    activation_of,
    bias_of,
    states_of,
    weight_of,
)
from hybrid_plugin.vllm.kernels.records import RecordForm, record_of

_RUNS_NORM = "enable_fused_gdn_spec_decode"
"""Attribute of vLLM's: whether the norm behind the layer is run with it."""


def weights_of(layer: Any) -> Weights:
    """What the mixer needs of a layer, of this rank's heads."""
    convolution = weight_of(layer.conv1d)
    _, (value_heads, width, depth) = layer.get_state_shape()
    channels = convolution.shape[0] - value_heads * width
    return Weights(
        convolution=convolution,
        bias=bias_of(layer.conv1d),
        activation=activation_of(layer),
        A=-torch.exp(layer.A_log.detach().float()),
        dt_bias=layer.dt_bias.detach(),
        key_heads=channels // (2 * depth),
    )


def record_form(layer: Any, weights: Weights) -> RecordForm:
    """What a record of a layer's drafts is like."""
    return RecordForm(weights.key_heads, wide_decay=False)


def run(
    layer: Any,
    weights: Weights,
    state_pass: StatePass,
    mixed_qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Run a pass.

    Args:
        layer: vLLM's.
        weights: its.
        state_pass: the sequences.
        mixed_qkv: ``[T, D]``: queries, keys, values, before the convolution.
        a: ``[T, HV]``, what the decay is made of.
        b: ``[T, HV]``, the write strength before the logistic function.
        out: ``[T, HV, V]``, written but for padding at the end.
    """
    pools = states_of(layer, weights.convolution), layer.kv_cache[1]
    mix(
        gated_delta_net,
        weights,
        state_pass,
        (mixed_qkv, a, b),
        pools,
        out,
        record_of(layer),
    )


def warm_up(layer: Any, weights: Weights, state_pass: StatePass) -> None:
    """Run a pass of nothing but padding, so that its kernels are compiled.

    Args:
        layer: vLLM's, with its states in place: kernels are compiled for their strides.
        weights: its.
        state_pass: the sequences.
    """
    states = layer.kv_cache[1]
    heads, width = states.shape[1:3]
    tokens, dtype = state_pass.tokens, weights.convolution.dtype
    device = states.device
    channels = weights.convolution.shape[0]
    gates = torch.zeros((tokens, heads), dtype=dtype, device=device)
    out = torch.empty((tokens, heads, width), dtype=dtype, device=device)
    run(
        layer,
        weights,
        state_pass,
        torch.zeros((tokens, channels), dtype=dtype, device=device),
        gates,
        gates,
        out,
    )
    if getattr(layer, _RUNS_NORM, False):
        gated_norm.warm_up(layer.norm, out, channels)
