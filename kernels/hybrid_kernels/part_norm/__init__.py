# SPDX-License-Identifier: Apache-2.0
"""RMS norms of the parts of a row, in one launch.

Mamba-1's time steps, B and C lie side by side in what one projection makes; Jamba and
PLaMo 2 normalise each of the three (Lieber et al. 2024, arXiv:2403.19887).

A row's bits do not depend on the rows around it, or on how many there are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybrid_kernels._common.checks import (
    check_last_contiguous,
    check_shape,
    on_gpu,
    require,
)
from hybrid_kernels.part_norm import reference

if TYPE_CHECKING:
    import torch

__all__ = ["Three", "rms_norms"]

Three = tuple["torch.Tensor", "torch.Tensor", "torch.Tensor"]


def rms_norms(x: torch.Tensor, weights: Three, eps: float) -> Three:
    """``norm(part) * weight`` of three parts of each row, each by itself.

    What a norm gives is rounded to `x`'s type before the weight multiplies it.

    Args:
        x: ``[T, V0 + V1 + V2]``, the parts in order, with any stride of tokens.
        weights: ``[V0]``, ``[V1]`` and ``[V2]``, contiguous.
        eps: added to the mean square of a part's channels.

    Returns:
        The parts ``[T, V0]``, ``[T, V1]`` and ``[T, V2]``, contiguous, of `x`'s type.

    Raises:
        ValueError: if shapes, types or strides do not fit.
    """
    require(x.ndim == 2, f"x has {x.ndim} dimensions, expected 2")
    check_shape("x", x, (len(x), sum(len(one) for one in weights)))
    for name, tensor in (
        ("x", x),
        *((f"weight {i}", w) for i, w in enumerate(weights)),
    ):
        check_last_contiguous(name, tensor)
        require(tensor.is_floating_point(), f"{name} is {tensor.dtype}")
    if not on_gpu(x):
        return reference.rms_norms(x, weights, eps)
    from hybrid_kernels.part_norm import triton

    return triton.rms_norms(x, weights, eps)
