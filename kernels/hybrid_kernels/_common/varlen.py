# SPDX-License-Identifier: Apache-2.0
"""Walking packed sequences and their state slots in plain PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch

CHUNK = 64
"""Tokens between two positions at which prefill can hand out interior states."""


@dataclass(frozen=True, slots=True)
class Span:
    """One sequence of a packed batch."""

    index: int
    start: int
    end: int


def spans(cu_seqlens: torch.Tensor) -> Iterator[Span]:
    """The sequences of a packed batch, empty ones included."""
    bounds = cu_seqlens.tolist()
    for index, (start, end) in enumerate(pairwise(bounds)):
        yield Span(index, start, end)


def read_state(
    pool: torch.Tensor,
    slots: torch.Tensor,
    has_initial: torch.Tensor | None,
    index: int,
) -> torch.Tensor:
    """A float32 copy of the state a sequence starts from; zeros if it has none."""
    slot = int(slots[index])
    fresh = has_initial is not None and not bool(has_initial[index])
    if slot < 0 or fresh:
        return pool.new_zeros(pool.shape[1:], dtype=torch.float32)
    return pool[slot].float()


def write_state(pool: torch.Tensor, slot: int, state: torch.Tensor) -> None:
    """Write a state, rounded to the pool's type; a negative slot takes none."""
    if slot >= 0:
        pool[slot] = state.to(pool.dtype)


def boundaries(
    boundary_slots: torch.Tensor | None, span: Span, every: int = CHUNK
) -> list[tuple[int, int]]:
    """Interior positions of a sequence with a slot: ``(tokens, slot)``, ascending."""
    if boundary_slots is None:
        return []
    row = boundary_slots[span.index].tolist()
    length = span.end - span.start
    ends = ((number + 1) * every for number in range(len(row)))
    return [
        (end, slot)
        for end, slot in zip(ends, row, strict=True)
        if slot >= 0 and end <= length
    ]


def parent_of(parents: torch.Tensor | None, row: int, draft: int) -> int:
    """The draft that a draft follows; -1 for the main state."""
    return draft - 1 if parents is None else int(parents[row, draft])
