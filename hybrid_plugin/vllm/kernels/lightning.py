# SPDX-License-Identifier: Apache-2.0
"""The linear attention of MiniMax-Text-01 and of Ling and Ring 2.5."""

from __future__ import annotations

from typing import Any

import torch

from hybrid_plugin.mixers import lightning
from hybrid_plugin.mixers.lightning import Weights
from hybrid_plugin.mixers.mixing import mix
from hybrid_plugin.mixers.state_pass import StatePass


def weights_of(layer: Any) -> Weights:
    """What the mixer needs of a layer, of this rank's heads."""
    # vLLM has scaled the queries already, where a model wants it.
    return Weights(decay=-layer.tp_slope.detach().float().flatten(), scale=1.0)


def run(
    layer: Any,
    weights: Weights,
    state_pass: StatePass,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Run a pass.

    Args:
        layer: vLLM's.
        weights: its.
        state_pass: the sequences.
        q: ``[T, H, K]``.
        k: ``[T, H, K]``.
        v: ``[T, H, V]``.
        out: ``[T, H, V]``, written but for padding at the end.
    """
    states = layer.kv_cache[0].transpose(-1, -2)  # vLLM's are ``[S, H, K, V]``
    mix(lightning, weights, state_pass, (q, k, v), (states,), out)


def warm_up(layer: Any, weights: Weights, state_pass: StatePass) -> None:
    """Run a pass of nothing but padding, so that its kernels are compiled.

    Args:
        layer: vLLM's, with its states in place: kernels are compiled for their strides.
        weights: its.
        state_pass: the sequences.
    """
    states = layer.kv_cache[0]
    heads, depth, width = states.shape[1:]
    tokens, device = state_pass.tokens, states.device
    # vLLM computes in float32 between the projections.
    qkv = torch.zeros((tokens, heads, 2 * depth + width), device=device)
    q, k, v = torch.split(qkv, [depth, depth, width], dim=-1)
    run(layer, weights, state_pass, q, k, v, torch.empty_like(v))
