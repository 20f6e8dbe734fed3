# SPDX-License-Identifier: Apache-2.0
"""A short convolution, then a recurrence that selects: Mamba-1 and PLaMo 2.

What the recurrence selects with, time steps, B and C, is made of what the convolution
gives, by projections of the layer.  `I` channels, `K` state dimensions, `W` taps of the
convolution, `S` slots, `T` packed tokens.  `C` is ``[I]`` where channels have a state
each (`hybrid_kernels.selective_scan`), and ``[H, P]`` where they are `H` heads of `P`
channels (`hybrid_kernels.ssd`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch
from hybrid_kernels.causal_conv1d import Activation

from hybrid_plugin.mixers import convolution
from hybrid_plugin.mixers.prefills import Prefills

Select = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
"""``[T, I]`` to time steps before softplus, and B and C, as `Weights.kernels` take
them."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Of one layer, as far as the mixer needs them."""

    kernels: ModuleType
    """Of the recurrence: `hybrid_kernels.selective_scan` or `hybrid_kernels.ssd`."""
    convolution: torch.Tensor
    """``[I, W]``."""
    bias: torch.Tensor | None
    """``[I]``."""
    activation: Activation
    A: torch.Tensor
    """``[I, K]`` or ``[H]``, float32, negative."""
    skip: torch.Tensor | None
    """``[I]`` or ``[H]``: what part of its input is added to the output."""
    dt_bias: torch.Tensor | None
    """``[I]`` or ``[H]``."""
    select: Select


def prefill(
    weights: Weights,
    prefills: Prefills,
    x: torch.Tensor,
    gate: torch.Tensor | None,
    conv_states: torch.Tensor,
    states: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run packed sequences; leave their states in their slots.

    Args:
        weights: of the layer.
        prefills: the sequences.
        x: ``[T, I]``, before the convolution.
        gate: ``[T, *C]``, whose SiLU multiplies the output; None for no gate, where
            `C` is ``[I]``.
        conv_states: ``[S, I, W - 1]``, with any strides.
        states: ``[S, *C, K]``, with any strides.
        out: ``[T, *C]``, written if given.

    Returns:
        `out`, or a new tensor of `x`'s type.

    Raises:
        ValueError: if shapes do not fit.
    """
    convolved = convolution.prefill(weights, prefills, x, conv_states)
    dt, b, c = weights.select(convolved)
    result: torch.Tensor = weights.kernels.prefill(
        convolved if gate is None else convolved.view(gate.shape),
        dt,
        weights.A,
        b,
        c,
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
    return result


def decode(
    weights: Weights,
    slots: torch.Tensor,
    x: torch.Tensor,
    gate: torch.Tensor | None,
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
    result: torch.Tensor = weights.kernels.update(
        convolved if gate is None else convolved.view(gate.shape),
        dt,
        weights.A,
        b,
        c,
        states,
        slots,
        skip=weights.skip,
        gate=gate,
        dt_bias=weights.dt_bias,
        out=out,
    )
    return result
