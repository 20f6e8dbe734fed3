# SPDX-License-Identifier: Apache-2.0
"""The norm behind a state layer, and the gate of its output, in either order.

Outputs and gates mostly lie in rows of wider tensors: a projection makes queries, keys,
values and gates at once.  They are read where they are, in one launch that allocates
nothing but a missing `out`, so that it can be captured in a CUDA graph.

A row's bits do not depend on the rows around it, or on how many there are.  They may
depend on whether strides are multiples of 16: a kernel is compiled for either.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybrid_kernels._common.checks import (
    check_last_contiguous,
    check_shape,
    on_gpu,
    require,
)
from hybrid_kernels.gated_norm import reference
from hybrid_kernels.gated_norm.reference import ACTIVATIONS

if TYPE_CHECKING:
    import torch

__all__ = ["ACTIVATIONS", "norm_of_gated", "rms_norm"]


def rms_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    activation: str = "silu",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Normalise each head, then gate it: ``norm(x) * weight * activation(gate)``.

    The norm divides by the root of the mean square of a head's `V` channels, to which
    `eps` is added (Zhang and Sennrich, 2019).

    Args:
        x: ``[T, H, V]``; this and all that follows has a floating type of its own, any
            strides of tokens and heads, and stride 1 of channels.
        gate: ``[T, H, V]``.
        weight: ``[V]``.
        eps: added to the mean square.
        activation: of the gate: "silu", which is also called "swish", or "sigmoid".
        out: ``[T, H, V]``, written if given; may be `x` or `gate`, but share no memory
            with them otherwise.

    Returns:
        `out`, or a new tensor of `x`'s type.

    Raises:
        ValueError: if shapes, types or strides do not fit, or the activation is
            another.
    """
    out = _checked(x, gate, weight, out, 1)
    require(
        activation in ACTIVATIONS,
        f"activation is {activation!r}, expected one of {', '.join(ACTIVATIONS)}",
    )
    if on_gpu(x):
        from hybrid_kernels.gated_norm import triton

        triton.rms_norm(x, gate, weight, eps, activation, out)
    else:
        reference.rms_norm(x, gate, weight, eps, activation, out)
    return out


def norm_of_gated(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Gate, then normalise each group of channels: ``norm(x * silu(gate)) * weight``.

    That is the norm of Mamba-2 (Dao and Gu 2024, arXiv:2405.21060).  What it gives is
    rounded to `x`'s type before the weight multiplies it.

    Args:
        x: ``[T, G, V]``; this and all that follows has a floating type of its own, any
            strides of tokens and groups, and stride 1 of channels.
        gate: ``[T, G, V]``.
        weight: ``[G, V]``.
        eps: added to the mean square of the `V` channels of a group.
        out: ``[T, G, V]``, written if given; may be `x` or `gate`, but share no memory
            with them otherwise.

    Returns:
        `out`, or a new tensor of `x`'s type.

    Raises:
        ValueError: if shapes, types or strides do not fit.
    """
    out = _checked(x, gate, weight, out, 2)
    if on_gpu(x):
        from hybrid_kernels.gated_norm import triton

        triton.norm_of_gated(x, gate, weight, eps, out)
    else:
        reference.norm_of_gated(x, gate, weight, eps, out)
    return out


def _checked(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor | None,
    weight_dimensions: int,
) -> torch.Tensor:
    """`out`, or a new one; raises ValueError for what does not fit."""
    require(x.ndim == 3, f"x has {x.ndim} dimensions, expected 3")
    if out is None:
        out = x.new_empty(x.shape)
    check_shape("gate", gate, tuple(x.shape))
    check_shape("out", out, tuple(x.shape))
    check_shape("weight", weight, tuple(x.shape[-weight_dimensions:]))
    for name, tensor in (("x", x), ("gate", gate), ("out", out), ("weight", weight)):
        check_last_contiguous(name, tensor)
        require(tensor.is_floating_point(), f"{name} is {tensor.dtype}")
    return out
