# SPDX-License-Identifier: Apache-2.0
"""Mamba-2's recurrence behind Mamba-1's selection (PLaMo 2).

Time steps, B and C are made of what the short convolution gives, by projections of the
layer.  `H` heads of `P` channels, `K` state dimensions, `W` taps of the convolution,
`S` slots, `T` packed tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from hybrid_kernels import ssd
from hybrid_kernels.causal_conv1d import Activation

from hybrid_plugin.mixers import convolution
from hybrid_plugin.mixers.prefills import Prefills

Select = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
"""``[T, H * P]`` to time steps before softplus, ``[T, H]``, and B and C, ``[T, K]``."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Of one layer, as far as the mixer needs them."""

    convolution: torch.Tensor
    """``[H * P, W]``."""
    bias: torch.Tensor | None
    """``[H * P]``."""
    activation: Activation
    A: torch.Tensor
    """``[H]``, float32, negative."""
    skip: torch.Tensor | None
    """``[H]``: what part of its input a head adds to its output."""
    dt_bias: torch.Tensor | None
    """``[H]``."""
    select: Select


def prefill(
    weights: Weights,
    prefills: Prefills,
    x: torch.Tensor,
    gate: torch.Tensor,
    conv_states: torch.Tensor,
    states: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run packed sequences; leave their states in their slots.

    Args:
        weights: of the layer.
        prefills: the sequences.
        x: ``[T, H * P]``, before the convolution.
        gate: ``[T, H, P]``, whose SiLU multiplies the output.
        conv_states: ``[S, H * P, W - 1]``, with any strides.
        states: ``[S, H, P, K]``, with any strides.
        out: ``[T, H, P]``, written if given.

    Returns:
        `out`, or a new tensor of `x`'s type.

    Raises:
        ValueError: if shapes do not fit.
    """
    convolved = convolution.prefill(weights, prefills, x, conv_states)
    dt, b, c = weights.select(convolved)
    return ssd.prefill(
        convolved.view(gate.shape),
        dt,
        weights.A,
        b.unsqueeze(1),
        c.unsqueeze(1),
        prefills.cu_seqlens,
        states,
        prefills.slots,
        skip=weights.skip,
        gate=gate,
        dt_bias=weights.dt_bias,
        has_initial=prefills.has_initial,
        offsets=prefills.offsets,
        round_boundaries=prefills.round_states,
        boundary_slots=prefills.boundary_slots,
        out=out,
    )


def decode(
    weights: Weights,
    slots: torch.Tensor,
    x: torch.Tensor,
    gate: torch.Tensor,
    conv_states: torch.Tensor,
    states: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run one token per sequence and advance the states; shapes as for `prefill`.

    Allocates what the convolution and `select` give, and the output unless `out` is
    given; a CUDA graph may capture it.

    Args:
        slots: ``[T]``, int32 or int64; negative for padding.

    Returns:
        `out`, or a new tensor of `x`'s type.

    Raises:
        ValueError: if shapes do not fit.
    """
    convolved = convolution.decode(weights, slots, x, conv_states)
    dt, b, c = weights.select(convolved)
    return ssd.update(
        convolved.view(gate.shape),
        dt,
        weights.A,
        b.unsqueeze(1),
        c.unsqueeze(1),
        states,
        slots,
        skip=weights.skip,
        gate=gate,
        dt_bias=weights.dt_bias,
        out=out,
    )
