# SPDX-License-Identifier: Apache-2.0
"""Keys and values of latent vectors."""

from __future__ import annotations

import torch
from torch import nn

from hybrid_models.blocks.projection import project
from hybrid_models.kit import LatentShape


def expanded(
    expand: nn.Module, shape: LatentShape, latent: torch.Tensor, turned: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys ``[T, heads, head]`` and values ``[T, heads, value]``, of this rank.

    Args:
        expand: as for `Kit.latent_attention`.
        shape: of the attention.
        latent: ``[T, latent]``.
        turned: ``[T, turned]``.
    """
    both = project(expand, latent).view(len(latent), -1, shape.plain + shape.value)
    plain, v = torch.split(both, [shape.plain, shape.value], dim=-1)
    k = torch.cat([plain, turned[:, None].expand(-1, plain.shape[1], -1)], dim=-1)
    return k, v
