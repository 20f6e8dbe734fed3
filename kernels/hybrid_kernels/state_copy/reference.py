# SPDX-License-Identifier: Apache-2.0
"""Plain PyTorch slot operations; the CPU path."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def copy(
    destination: torch.Tensor,
    destination_slots: torch.Tensor | None,
    source: torch.Tensor,
    source_slots: torch.Tensor | None,
    slot_dim: int,
) -> None:
    """Copy rows between pools; a missing slot list stands for 0, 1, 2, ..."""
    to = _rows(destination_slots, destination, slot_dim)
    start = _rows(source_slots, source, slot_dim)
    keep = (to >= 0) & (start >= 0)
    values = source.index_select(slot_dim, start[keep])
    destination.index_copy_(slot_dim, to[keep], values)


def zero(pool: torch.Tensor, slots: torch.Tensor, slot_dim: int) -> None:
    """Clear rows."""
    pool.index_fill_(slot_dim, slots[slots >= 0].long(), 0)


def copy_parts(
    parts: Sequence[torch.Tensor], destinations: torch.Tensor, sources: torch.Tensor
) -> None:
    """Copy row to row in every part."""
    for part in parts:
        copy(part, destinations, part, sources, 0)


def transfer_parts(
    to: Sequence[torch.Tensor],
    of: Sequence[torch.Tensor],
    destinations: torch.Tensor,
    sources: torch.Tensor,
) -> None:
    """Copy rows of every part of one pool over rows of the same part of another."""
    for part, twin in zip(to, of, strict=True):
        copy(part, destinations, twin, sources, 0)


def zero_parts(parts: Sequence[torch.Tensor], slots: torch.Tensor) -> None:
    """Clear rows of every part."""
    for part in parts:
        zero(part, slots, 0)


def promote(
    pool: torch.Tensor, table: torch.Tensor, accepted: torch.Tensor, slot_dim: int
) -> None:
    """Copy each row's accepted slot over its main slot."""
    sources = table.gather(1, accepted.long().clamp(min=0)[:, None])[:, 0]
    sources = torch.where(accepted > 0, sources, -1)
    copy(pool, table[:, 0], pool, sources, slot_dim)


def promote_swap(table: torch.Tensor, accepted: torch.Tensor) -> None:
    """Exchange each row's main and accepted entry."""
    column = accepted.long().clamp(min=0)[:, None]
    chosen = table.gather(1, column)
    table.scatter_(1, column, table[:, :1].clone())
    table[:, :1] = chosen


def _rows(
    slots: torch.Tensor | None, pool: torch.Tensor, slot_dim: int
) -> torch.Tensor:
    if slots is None:
        return torch.arange(pool.shape[slot_dim])
    return slots.long()
