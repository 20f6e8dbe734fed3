# SPDX-License-Identifier: Apache-2.0
"""A short convolution that is a layer of its own (LFM2).

The gates in front of it and behind it stay the engine's, with the projections.  `D`
channels, `W` taps, `S` slots, `T` packed tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hybrid_kernels import causal_conv1d

from hybrid_plugin.mixers.prefills import Prefills
from hybrid_plugin.mixers.verifications import Verifications


@dataclass(frozen=True, slots=True)
class Weights:
    """Of one layer, as far as the mixer needs them."""

    convolution: torch.Tensor
    """``[D, W]``."""
    bias: torch.Tensor | None
    """``[D]``."""


def prefill(
    weights: Weights,
    prefills: Prefills,
    x: torch.Tensor,
    conv_states: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run packed sequences; leave their states in their slots.

    Args:
        weights: of the layer.
        prefills: the sequences.
        x: ``[T, D]``.
        conv_states: ``[S, D, W - 1]``, with any strides.
        out: ``[T, D]``, written if given; may not overlap `x`.

    Returns:
        `out`, or a new tensor of `x`'s type.

    Raises:
        ValueError: if shapes do not fit.
    """
    return causal_conv1d.prefill(
        x,
        weights.convolution,
        weights.bias,
        prefills.cu_seqlens,
        conv_states,
        prefills.slots,
        has_initial=prefills.has_initial,
        boundary_slots=prefills.boundary_slots,
        offsets=prefills.offsets,
        out=out,
    )


def decode(
    weights: Weights,
    slots: torch.Tensor,
    x: torch.Tensor,
    conv_states: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run one token per sequence and advance the states; shapes as for `prefill`.

    A CUDA graph may capture it.

    Args:
        slots: ``[T]``, int32 or int64; negative for padding.
        out: may be `x` itself.

    Returns:
        `out`, or a new tensor of `x`'s type.

    Raises:
        ValueError: if shapes do not fit.
    """
    return causal_conv1d.update(
        x, weights.convolution, weights.bias, conv_states, slots, out=out
    )


def verify(
    weights: Weights,
    verifications: Verifications,
    x: torch.Tensor,
    conv_states: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run sequences that verify drafts; leave a state in each of their columns.

    Shapes are as for `prefill`; a CUDA graph may capture it.

    Args:
        verifications: the sequences.

    Returns:
        `out`, or a new tensor of `x`'s type.

    Raises:
        ValueError: if shapes do not fit.
    """
    return causal_conv1d.verify(
        x,
        weights.convolution,
        weights.bias,
        conv_states,
        verifications.slots,
        verifications.columns,
        cu_seqlens=verifications.cu_seqlens,
        out=out,
    )
