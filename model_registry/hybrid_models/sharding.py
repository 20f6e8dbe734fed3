# SPDX-License-Identifier: Apache-2.0
"""Parameters that are cut among ranks, and are no linear layer's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from hybrid_models.kit import Kit, part
from hybrid_models.weights import REQUIRED


def plain(loaded: torch.Tensor) -> torch.Tensor:
    """What the checkpoint has, as it is."""
    return loaded


def sharded(
    kit: Kit,
    sizes: Sequence[int],
    tail: tuple[int, ...] = (),
    *,
    dtype: torch.dtype | None = None,
    whole: Sequence[bool] = (),
    of: Callable[[torch.Tensor], torch.Tensor] = plain,
) -> nn.Parameter:
    """A parameter ``[sum of parts, *tail]``: a concatenation, cut part by part.

    Args:
        kit: of the model.
        sizes: of the parts in the checkpoint, along dimension 0.  It may have one
            tensor for all of them, or one for each.
        tail: the other dimensions; the checkpoint may have others, of as many elements.
        dtype: of the parameter; by default the model's.
        whole: for each part, whether every rank has all of it; no part by default.
        of: makes rows of the parameter, or as many elements, of rows ``[n, -1]`` of the
            checkpoint, in the parameter's type.

    Raises:
        ValueError: if ranks cannot share a part.
    """
    kept = whole or [False] * len(sizes)
    own = [size if k else part(kit, size) for size, k in zip(sizes, kept, strict=True)]
    kind = dtype or kit.dtype
    parameter = nn.Parameter(
        torch.empty((sum(own), *tail), dtype=kind), requires_grad=False
    )

    def load(
        parameter: torch.Tensor, loaded: torch.Tensor, shard: int | None = None
    ) -> None:
        given = range(len(sizes)) if shard is None else (shard,)
        tensor = loaded.to(kind).reshape(sum(sizes[n] for n in given), -1)
        pieces = torch.split(tensor, [sizes[n] for n in given])
        targets = torch.split(parameter.data, own)
        for number, piece in zip(given, pieces, strict=True):
            if not kept[number]:
                piece = piece.narrow(0, kit.rank * own[number], own[number])
            targets[number].copy_(of(piece).reshape(targets[number].shape))

    parameter.weight_loader = load  # type: ignore[attr-defined]
    setattr(parameter, REQUIRED, True)
    return parameter


def minus_exp(loaded: torch.Tensor) -> torch.Tensor:
    """``A`` of the logarithm of its absolute value, as checkpoints have it."""
    return -loaded.exp()
