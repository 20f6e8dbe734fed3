# SPDX-License-Identifier: Apache-2.0
"""Mamba-2, as in Nemotron-H, Falcon-H1, Granite 4, Bamba and Zamba 2."""

from __future__ import annotations

from typing import Any

import torch

from hybrid_plugin.mixers import mamba2
from hybrid_plugin.mixers.mamba2 import Weights
from hybrid_plugin.mixers.mixing import mix
from hybrid_plugin.mixers.state_pass import StatePass
from hybrid_plugin.vllm.kernels.convolution import (
    activation_of,
    bias_of,
    states_of,
    weight_of,
)
from hybrid_plugin.vllm.kernels.records import RecordForm, record_of


def weights_of(layer: Any) -> Weights:
    """What the mixer needs of a layer, of this rank's heads."""
    return Weights(
        convolution=weight_of(layer.conv1d),
        bias=bias_of(layer.conv1d),
        activation=activation_of(layer),
        A=layer.A.detach(),  # vLLM takes the exponential when it loads it
        skip=layer.D.detach(),
        dt_bias=layer.dt_bias.detach(),
    )


def record_form(layer: Any, weights: Weights) -> RecordForm:
    """What a record of a layer's drafts is like."""
    _, (heads, width, depth) = layer.get_state_shape()
    groups = (weights.convolution.shape[0] - heads * width) // (2 * depth)
    return RecordForm(groups, wide_decay=False)


def run(
    layer: Any,
    weights: Weights,
    state_pass: StatePass,
    projected: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Run a pass.

    Args:
        layer: vLLM's.
        weights: its.
        state_pass: the sequences.
        projected: ``[T, H * P + D + H]``: gates, which stay vLLM's, what the
            convolution takes, and time steps.
        out: ``[T, H * P]``, written but for padding at the end.
    """
    conv_states, states = states_of(layer, weights.convolution), layer.kv_cache[1]
    heads, width = states.shape[1:3]
    channels = weights.convolution.shape[0]
    _, mixed, dt = torch.split(projected, [heads * width, channels, heads], dim=-1)
    results = out.view(-1, heads, width)
    pools = conv_states, states
    mix(mamba2, weights, state_pass, (mixed, dt), pools, results, record_of(layer))


def warm_up(layer: Any, weights: Weights, state_pass: StatePass) -> None:
    """Run a pass of nothing but padding, so that its kernels are compiled.

    Args:
        layer: vLLM's, with its states in place: kernels are compiled for their strides.
        weights: its.
        state_pass: the sequences.
    """
    states = layer.kv_cache[1]
    heads, width = states.shape[1:3]
    channels, dtype = weights.convolution.shape[0], weights.convolution.dtype
    sizes = heads * width + channels + heads, heads * width
    projected, out = (
        torch.zeros((state_pass.tokens, size), dtype=dtype, device=states.device)
        for size in sizes
    )
    run(layer, weights, state_pass, projected, out)
