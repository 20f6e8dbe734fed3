# SPDX-License-Identifier: Apache-2.0
"""Projections some of whose parts every rank has whole.

Engines' merged projections cut every part among ranks.  A part that each rank is to
have whole is made `ranks` times as long, and its tensor of the checkpoint repeated as
often: then each rank is cut one copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn

from hybrid_models.weights import TILES


def tile(
    ranks: int,
    outs: Sequence[int],
    whole: Sequence[bool],
    build: Callable[[list[int]], nn.Module],
) -> nn.Module:
    """Build a merged projection, and leave on it how its checkpoint is tiled.

    Args:
        ranks: of tensor parallelism.
        outs: sizes of its parts in the checkpoint.
        whole: for each part, whether every rank has all of it; no part by default.
        build: makes it for other sizes.
    """
    times = [ranks if k else 1 for k in whole] or [1] * len(outs)
    module = build([size * n for size, n in zip(outs, times, strict=True)])
    if max(times) > 1:
        setattr(module, TILES, partial(_tiled, tuple(outs), tuple(times)))
    return module


def _tiled(
    outs: Sequence[int],
    times: Sequence[int],
    dimension: int,
    loaded: torch.Tensor,
    shard: int | None = None,
) -> torch.Tensor:
    """A tensor of the checkpoint, with parts repeated along a dimension.

    Raises:
        ValueError: for one that is packed along that dimension.
    """
    if loaded.dim() == 0 or loaded.numel() == 1:  # a scale of the whole tensor
        return loaded
    if shard is not None:
        outs, times = outs[shard : shard + 1], times[shard : shard + 1]
    if loaded.shape[dimension] != sum(outs):
        raise ValueError(
            f"a tensor with {loaded.shape[dimension]} rows for {sum(outs)} outputs is "
            "packed, and tensor parallelism would have to cut it: use one rank"
        )
    parts = torch.split(loaded, list(outs), dim=dimension)
    return torch.cat(
        [
            torch.cat([piece] * n, dim=dimension)
            for piece, n in zip(parts, times, strict=True)
        ],
        dim=dimension,
    )
