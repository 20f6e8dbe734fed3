# SPDX-License-Identifier: Apache-2.0
"""Mamba-2: a short convolution, then the state space duality layer.

`H` heads of `P` channels, `G` groups of `K` state dimensions,
``D = H * P + 2 * G * K`` channels of the convolution, `W` its width, `S` slots, `T`
packed tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hybrid_kernels import ssd
from hybrid_kernels.causal_conv1d import Activation

from hybrid_plugin.mixers import convolution
from hybrid_plugin.mixers.prefills import Prefills
from hybrid_plugin.mixers.verifications import Record, Verifications


@dataclass(frozen=True, slots=True)
class Weights:
    """Of one layer, as far as the mixer needs them."""

    convolution: torch.Tensor
    """``[D, W]``."""
    bias: torch.Tensor | None
    """``[D]``."""
    activation: Activation
    A: torch.Tensor
    """``[H]``, float32, negative."""
    skip: torch.Tensor | None
    """``[H]``: what part of its input a head adds to its output."""
    dt_bias: torch.Tensor | None
    """``[H]``."""


def prefill(
    weights: Weights,
    prefills: Prefills,
    mixed: torch.Tensor,
    dt: torch.Tensor,
    conv_states: torch.Tensor,
    states: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run packed sequences; leave their states in their slots.

    Args:
        weights: of the layer.
        prefills: the sequences.
        mixed: ``[T, D]``: inputs, then B and C of all groups, before the convolution.
        dt: ``[T, H]``, time steps before softplus.
        conv_states: ``[S, D, W - 1]``, with any strides.
        states: ``[S, H, P, K]``, with any strides.
        out: ``[T, H, P]``, written if given.

    Returns:
        `out`, or a new tensor of `mixed`'s type.

    Raises:
        ValueError: if shapes do not fit.
    """
    convolved = convolution.prefill(weights, prefills, mixed, conv_states)
    x, b, c = _heads(convolved, states)
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
        round_boundaries=prefills.round_states,
        boundary_slots=prefills.boundary_slots,
        out=out,
    )


def decode(
    weights: Weights,
    slots: torch.Tensor,
    mixed: torch.Tensor,
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
        `out`, or a new tensor of `mixed`'s type.

    Raises:
        ValueError: if shapes do not fit.
    """
    convolved = convolution.decode(weights, slots, mixed, conv_states)
    x, b, c = _heads(convolved, states)
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


def verify(
    weights: Weights,
    verifications: Verifications,
    mixed: torch.Tensor,
    dt: torch.Tensor,
    conv_states: torch.Tensor,
    states: torch.Tensor,
    out: torch.Tensor | None = None,
    record: Record | None = None,
) -> torch.Tensor:
    """Run sequences that verify drafts; leave a state in each of their columns.

    Shapes are as for `prefill`; what is allocated, as for `decode`.

    Args:
        verifications: the sequences.
        record: written instead of columns, if given.

    Returns:
        `out`, or a new tensor of `mixed`'s type.

    Raises:
        ValueError: if shapes do not fit.
    """
    convolved = convolution.verify(weights, verifications, mixed, conv_states, record)
    x, b, c = _heads(convolved, states)
    return ssd.verify(
        x,
        dt,
        weights.A,
        b,
        c,
        states,
        verifications.slots,
        verifications.columns,
        parents=verifications.parents,
        cu_seqlens=verifications.cu_seqlens,
        record=None if record is None else record.states,
        skip=weights.skip,
        dt_bias=weights.dt_bias,
        out=out,
    )


def _heads(
    convolved: torch.Tensor, states: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs ``[T, H, P]``, B and C ``[T, G, K]``, as views."""
    heads, width, depth = states.shape[1:]
    inputs = heads * width
    groups = (convolved.shape[-1] - inputs) // (2 * depth)
    x, b, c = torch.split(convolved, [inputs, groups * depth, groups * depth], dim=-1)
    return (
        x.view(-1, heads, width),
        b.view(-1, groups, depth),
        c.view(-1, groups, depth),
    )
