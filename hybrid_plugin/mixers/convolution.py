# SPDX-License-Identifier: Apache-2.0
"""The short convolution in front of a recurrence."""

from __future__ import annotations

from typing import Protocol

import torch
from hybrid_kernels import causal_conv1d
from hybrid_kernels.causal_conv1d import Activation

from hybrid_plugin.mixers.prefills import Prefills
from hybrid_plugin.mixers.verifications import Record, Verifications


class Convolution(Protocol):
    """Weights of a layer that begins with one; `D` channels, `W` taps."""

    @property
    def convolution(self) -> torch.Tensor:
        """``[D, W]``."""

    @property
    def bias(self) -> torch.Tensor | None:
        """``[D]``."""

    @property
    def activation(self) -> Activation:
        """What follows it."""


def prefill(
    weights: Convolution, prefills: Prefills, x: torch.Tensor, states: torch.Tensor
) -> torch.Tensor:
    """Convolve packed sequences, ``[T, D]``; leave their states in their slots.

    Args:
        weights: of the layer.
        prefills: the sequences.
        x: ``[T, D]``.
        states: ``[S, D, W - 1]``, with any strides.

    Raises:
        ValueError: if shapes do not fit.
    """
    return causal_conv1d.prefill(
        x,
        weights.convolution,
        weights.bias,
        prefills.cu_seqlens,
        states,
        prefills.slots,
        has_initial=prefills.has_initial,
        activation=weights.activation,
        boundary_slots=prefills.boundary_slots,
        offsets=prefills.offsets,
    )


def decode(
    weights: Convolution, slots: torch.Tensor, x: torch.Tensor, states: torch.Tensor
) -> torch.Tensor:
    """Convolve one token per sequence, ``[T, D]``, and advance the states.

    Args:
        weights: of the layer.
        slots: ``[T]``, int32 or int64; negative for padding.
        x: ``[T, D]``.
        states: ``[S, D, W - 1]``, with any strides.

    Raises:
        ValueError: if shapes do not fit.
    """
    return causal_conv1d.update(
        x,
        weights.convolution,
        weights.bias,
        states,
        slots,
        activation=weights.activation,
    )


def verify(
    weights: Convolution,
    verifications: Verifications,
    x: torch.Tensor,
    states: torch.Tensor,
    record: Record | None = None,
) -> torch.Tensor:
    """Convolve sequences that verify drafts, ``[T, D]``.

    Each column gets its own state.

    Args:
        weights: of the layer.
        verifications: the sequences.
        x: ``[T, D]``.
        states: ``[S, D, W - 1]``, with any strides.
        record: written instead of columns, if given.

    Raises:
        ValueError: if shapes do not fit.
    """
    return causal_conv1d.verify(
        x,
        weights.convolution,
        weights.bias,
        states,
        verifications.slots,
        verifications.columns,
        parents=verifications.parents,
        cu_seqlens=verifications.cu_seqlens,
        record=None if record is None else record.inputs,
        activation=weights.activation,
    )
