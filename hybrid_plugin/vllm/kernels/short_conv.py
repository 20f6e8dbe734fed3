# SPDX-License-Identifier: Apache-2.0
"""The short convolution of LFM2, a layer of its own."""

from __future__ import annotations

from typing import Any

import torch

from hybrid_plugin.mixers import short_conv
from hybrid_plugin.mixers.mixing import mix
from hybrid_plugin.mixers.short_conv import Weights
from hybrid_plugin.mixers.state_pass import StatePass
from hybrid_plugin.vllm.kernels.convolution import bias_of, states_of, weight_of


def weights_of(layer: Any) -> Weights:
    """What the mixer needs of a layer, of this rank's channels."""
    return Weights(convolution=weight_of(layer.conv), bias=bias_of(layer.conv))


def run(
    layer: Any,
    weights: Weights,
    state_pass: StatePass,
    hidden_states: torch.Tensor,
    output: torch.Tensor,
) -> None:
    """Run a pass, the projections included: vLLM has no seam between them.

    Args:
        layer: vLLM's.
        weights: its.
        state_pass: the sequences.
        hidden_states: ``[T, hidden size]``.
        output: the same, written but for padding at the end.
    """
    end = state_pass.tokens
    before, behind, x = layer.in_proj(hidden_states)[0].chunk(3, dim=-1)
    convolved = _convolve(layer, weights, state_pass, (before * x)[:end])
    output[:end] = layer.out_proj(behind[:end] * convolved)[0]


def _convolve(
    layer: Any, weights: Weights, state_pass: StatePass, x: torch.Tensor
) -> torch.Tensor:
    states, out = states_of(layer, weights.convolution), torch.empty_like(x)
    mix(short_conv, weights, state_pass, (x,), (states,), out)
    return out


def warm_up(layer: Any, weights: Weights, state_pass: StatePass) -> None:
    """Run a pass of nothing but padding, so that its kernels are compiled.

    Args:
        layer: vLLM's, with its states in place: kernels are compiled for their strides.
        weights: its.
        state_pass: the sequences.
    """
    shape = state_pass.tokens, weights.convolution.shape[0]
    x = torch.zeros(
        shape, dtype=weights.convolution.dtype, device=weights.convolution.device
    )
    _convolve(layer, weights, state_pass, x)
