# SPDX-License-Identifier: Apache-2.0
"""Gated delta net: a short convolution, then the gated delta rule.

`H` key heads of `K` channels, `HV` value heads of `V`, `D = 2 * H * K + HV * V`
channels of the convolution, `W` its width, `S` slots, `T` packed tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hybrid_kernels import causal_conv1d, gated_delta_rule
from hybrid_kernels.causal_conv1d import Activation

from hybrid_plugin.mixers.prefills import Prefills


@dataclass(frozen=True, slots=True)
class Weights:
    """Of one layer, as far as the mixer needs them."""

    convolution: torch.Tensor
    """``[D, W]``."""
    bias: torch.Tensor | None
    """``[D]``."""
    activation: Activation
    A: torch.Tensor
    """``[HV]``, float32: ``-exp(A_log)``."""
    dt_bias: torch.Tensor
    """``[HV]``."""
    key_heads: int


def prefill(
    weights: Weights,
    prefills: Prefills,
    mixed_qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    conv_states: torch.Tensor,
    states: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run packed sequences; leave their states in their slots.

    Args:
        weights: of the layer.
        prefills: the sequences.
        mixed_qkv: ``[T, D]``: queries, keys, values, before the convolution.
        a: ``[T, HV]``, what the decay is made of.
        b: ``[T, HV]``, the write strength before the logistic function.
        conv_states: ``[S, D, W - 1]``, with any strides.
        states: ``[S, HV, V, K]``, with any strides.
        out: ``[T, HV, V]``, written if given.

    Returns:
        `out`, or a new tensor of `mixed_qkv`'s type.

    Raises:
        ValueError: if shapes do not fit.
    """
    convolved = causal_conv1d.prefill(
        mixed_qkv,
        weights.convolution,
        weights.bias,
        prefills.cu_seqlens,
        conv_states,
        prefills.slots,
        has_initial=prefills.has_initial,
        activation=weights.activation,
        boundary_slots=prefills.boundary_slots,
        offsets=prefills.offsets,
    )
    return gated_delta_rule.prefill(
        *_heads(weights, convolved, states),
        a,
        b,
        prefills.cu_seqlens,
        states,
        prefills.slots,
        A=weights.A,
        dt_bias=weights.dt_bias,
        has_initial=prefills.has_initial,
        boundary_slots=prefills.boundary_slots,
        offsets=prefills.offsets,
        round_boundaries=prefills.round_states,
        use_qk_l2norm=True,
        out=out,
    )


def decode(
    weights: Weights,
    slots: torch.Tensor,
    mixed_qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    conv_states: torch.Tensor,
    states: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run one token per sequence and advance the states; shapes as for `prefill`.

    Allocates what the convolution gives, and the output unless `out` is given; a CUDA
    graph may capture it.

    Args:
        slots: ``[T]``, int32 or int64; negative for padding.

    Returns:
        `out`, or a new tensor of `mixed_qkv`'s type.

    Raises:
        ValueError: if shapes do not fit.
    """
    convolved = causal_conv1d.update(
        mixed_qkv,
        weights.convolution,
        weights.bias,
        conv_states,
        slots,
        activation=weights.activation,
    )
    return gated_delta_rule.update(
        *_heads(weights, convolved, states),
        a,
        b,
        states,
        slots,
        A=weights.A,
        dt_bias=weights.dt_bias,
        use_qk_l2norm=True,
        out=out,
    )


def _heads(
    weights: Weights, convolved: torch.Tensor, states: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries and keys ``[T, H, K]`` and values ``[T, HV, V]``, as views."""
    value_heads, width, depth = states.shape[1:]
    keys = weights.key_heads * depth
    q, k, v = torch.split(convolved, [keys, keys, value_heads * width], dim=-1)
    return (
        q.view(-1, weights.key_heads, depth),
        k.view(-1, weights.key_heads, depth),
        v.view(-1, value_heads, width),
    )
