# SPDX-License-Identifier: Apache-2.0
"""Lightning attention: linear attention with one constant decay for each head.

`H` key heads of `K` channels, `HV` value heads of `V`, `S` slots, `T` packed tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hybrid_kernels import lightning_attention

from hybrid_plugin.mixers.prefills import Prefills


@dataclass(frozen=True, slots=True)
class Weights:
    """Of one layer, as far as the mixer needs them."""

    decay: torch.Tensor
    """``[HV]``, float32: log decay for each token, at most 0."""
    scale: float
    """Multiplies the output."""


def prefill(
    weights: Weights,
    prefills: Prefills,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    states: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run packed sequences; leave their states in their slots.

    Args:
        weights: of the layer.
        prefills: the sequences.
        q: ``[T, H, K]``.
        k: ``[T, H, K]``.
        v: ``[T, HV, V]``.
        states: ``[S, HV, V, K]``, with any strides.
        out: ``[T, HV, V]``, written if given.

    Returns:
        `out`, or a new tensor of `v`'s type.

    Raises:
        ValueError: if shapes do not fit.
    """
    return lightning_attention.prefill(
        q,
        k,
        v,
        weights.decay,
        prefills.cu_seqlens,
        states,
        prefills.slots,
        has_initial=prefills.has_initial,
        boundary_slots=prefills.boundary_slots,
        offsets=prefills.offsets,
        round_boundaries=prefills.round_states,
        scale=weights.scale,
        out=out,
    )


def decode(
    weights: Weights,
    slots: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    states: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run one token per sequence and advance the states; shapes as for `prefill`.

    With `out` given it allocates nothing; a CUDA graph may capture it.

    Args:
        slots: ``[T]``, int32 or int64; negative for padding.

    Returns:
        `out`, or a new tensor of `v`'s type.

    Raises:
        ValueError: if shapes do not fit.
    """
    return lightning_attention.update(
        q, k, v, weights.decay, states, slots, scale=weights.scale, out=out
    )
