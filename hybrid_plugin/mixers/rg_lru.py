# SPDX-License-Identifier: Apache-2.0
"""The recurrence of RecurrentGemma: a short convolution, then the real-gated linear
recurrent unit.

Its gates are made of what the convolution gives, by weights of the layer.  `D`
channels, `W` taps of the convolution, `S` slots, `T` packed tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from hybrid_kernels import rg_lru
from hybrid_kernels.causal_conv1d import Activation

from hybrid_plugin.mixers import convolution
from hybrid_plugin.mixers.prefills import Prefills

Gates = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""``[T, D]`` to the gates of input and recurrence, ``[T, D]``, before the logistic
function."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Of one layer, as far as the mixer needs them."""

    convolution: torch.Tensor
    """``[D, W]``."""
    bias: torch.Tensor | None
    """``[D]``."""
    activation: Activation
    A: torch.Tensor
    """``[D]``, float32, negative."""
    gates: Gates


def prefill(
    weights: Weights,
    prefills: Prefills,
    x: torch.Tensor,
    conv_states: torch.Tensor,
    states: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run packed sequences; leave their states in their slots.

    Args:
        weights: of the layer.
        prefills: the sequences.
        x: ``[T, D]``, before the convolution.
        conv_states: ``[S, D, W - 1]``, with any strides.
        states: ``[S, D]``, with any strides.
        out: ``[T, D]``, written if given.

    Returns:
        `out`, or a new tensor of `x`'s type.

    Raises:
        ValueError: if shapes do not fit.
    """
    convolved = convolution.prefill(weights, prefills, x, conv_states)
    return rg_lru.prefill(
        convolved,
        *weights.gates(convolved),
        weights.A,
        prefills.cu_seqlens,
        states,
        prefills.slots,
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
    conv_states: torch.Tensor,
    states: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run one token per sequence and advance the states; shapes as for `prefill`.

    Allocates what the convolution and `gates` give, and the output unless `out` is
    given; a CUDA graph may capture it.

    Args:
        slots: ``[T]``, int32 or int64; negative for padding.

    Returns:
        `out`, or a new tensor of `x`'s type.

    Raises:
        ValueError: if shapes do not fit.
    """
    convolved = convolution.decode(weights, slots, x, conv_states)
    gates = weights.gates(convolved)
    return rg_lru.update(convolved, *gates, weights.A, states, slots, out=out)
