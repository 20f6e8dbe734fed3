# SPDX-License-Identifier: Apache-2.0
"""Mamba-2: a short convolution, then the state space duality layer.

`H` heads of `P` channels, `G` groups of `D` state dimensions, `C = H * P + 2 * G * D`
channels of the convolution, `W` its width, `S` slots, `T` packed tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hybrid_kernels import causal_conv1d, ssd
from hybrid_kernels.causal_conv1d import Activation

from hybrid_plugin.mixers.prefills import Prefills


@dataclass(frozen=True, slots=True)
class Weights:
    """Of one layer, as far as the mixer needs them."""

    convolution: torch.Tensor
    """``[C, W]``."""
    bias: torch.Tensor | None
    """``[C]``."""
    activation: Activation
    A: torch.Tensor
    """``[H]``, float32: ``-exp(A_log)``."""
    skip: torch.Tensor | None
    """``[H]``."""
    dt_bias: torch.Tensor | None
    """``[H]``."""
    groups: int


def prefill(
    weights: Weights,
    prefills: Prefills,
    mixed_xbc: torch.Tensor,
    dt: torch.Tensor,
    conv_states: torch.Tensor,
    states: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run packed sequences; leave their states in their slots.

    Args:
        weights: of the layer.
        prefills: the sequences.
        mixed_xbc: ``[T, C]``: inputs, input and output matrices, not
            convolved yet.
        dt: ``[T, H]``, before softplus.
        conv_states: ``[S, C, W - 1]``, with any strides.
        states: ``[S, H, P, D]``, with any strides.
        out: ``[T, H, P]``, written if given.

    Returns:
        `out`, or a new tensor of `mixed_xbc`'s type.

    Raises:
        ValueError: if shapes do not fit.
    """
    convolved = causal_conv1d.prefill(
        mixed_xbc,
        weights.convolution,
        weights.bias,
        prefills.cu_seqlens,
        conv_states,
        prefills.slots,
        has_initial=prefills.has_initial,
        activation=weights.activation,
        offsets=prefills.offsets,
        boundary_slots=prefills.boundary_slots,
    )
    x, b, c = _parts(weights, convolved, states)
    return ssd.prefill(
        x,
        dt,
        weights.A,
        b,
        c,
        prefills.cu_seqlens,
        states,
        prefills.slots,
        skip=weights.skip,
        dt_bias=weights.dt_bias,
        has_initial=prefills.has_initial,
        offsets=prefills.offsets,
        boundary_slots=prefills.boundary_slots,
        out=out,
    )


def decode(
    weights: Weights,
    slots: torch.Tensor,
    mixed_xbc: torch.Tensor,
    dt: torch.Tensor,
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
        `out`, or a new tensor of `mixed_xbc`'s type.

    Raises:
        ValueError: if shapes do not fit.
    """
    convolved = causal_conv1d.update(
        mixed_xbc,
        weights.convolution,
        weights.bias,
        conv_states,
        slots,
        activation=weights.activation,
    )
    x, b, c = _parts(weights, convolved, states)
    return ssd.update(
        x,
        dt,
        weights.A,
        b,
        c,
        states,
        slots,
        skip=weights.skip,
        dt_bias=weights.dt_bias,
        out=out,
    )


def _parts(
    weights: Weights, convolved: torch.Tensor, states: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs ``[T, H, P]``, input and output matrices ``[T, G, D]``, as views."""
    heads, channels, depth = states.shape[1:]
    inputs, matrix = heads * channels, weights.groups * depth
    x, b, c = torch.split(convolved, [inputs, matrix, matrix], dim=-1)
    return (
        x.view(-1, heads, channels),
        b.view(-1, weights.groups, depth),
        c.view(-1, weights.groups, depth),
    )
