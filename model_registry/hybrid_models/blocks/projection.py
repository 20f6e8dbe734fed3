# SPDX-License-Identifier: Apache-2.0
"""Calling an engine's linear layer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Select = Callable[[torch.Tensor], Triple]
"""Tokens ``[T, inner]`` to three ``[T, ...]``."""


def project(linear: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """What a linear layer of a kit makes of ``[T, inner]``.

    SGLang's give a bias to be added later as well, and so do the layers that it puts in
    their place for adapters.
    """
    found = linear(x)
    result: torch.Tensor = found[0] if isinstance(found, tuple) else found
    return result


def in_place(made: Select, tokens: int) -> Select:
    """The same, which gives linear layers each token at its place in the pass.

    Layers with adapters find those of a token by its row, and a mixer hands on the rows
    of its parts of a pass one after the other: single tokens, then prompts.

    Args:
        made: of rows of the pass.
        tokens: of the pass.
    """
    start = 0

    def placed(x: torch.Tensor) -> Triple:
        nonlocal start
        rows = slice(start, start + len(x))
        whole = x.new_zeros(tokens, *x.shape[1:])
        whole[rows] = x
        start = rows.stop
        first, second, third = made(whole)
        return first[rows], second[rows], third[rows]

    return placed
