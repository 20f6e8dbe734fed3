# SPDX-License-Identifier: Apache-2.0
"""Norms of what a recurrence selects with: time steps, B and C, side by side."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from hybrid_kernels import part_norm
from torch import nn

from hybrid_models.blocks.projection import Triple


def norm_parts(x: torch.Tensor, norms: Iterable[nn.Module], eps: float) -> Triple:
    """Each of three parts of ``[T, all channels]``, normalised in one kernel.

    Args:
        x: what one projection makes.
        norms: of a kit, those of the parts, in order; not centred.
        eps: of these norms.

    Returns:
        The parts, ``[T, channels]`` each, contiguous.
    """
    first, second, third = (norm.get_parameter("weight") for norm in norms)
    return part_norm.rms_norms(x, (first, second, third), eps)
