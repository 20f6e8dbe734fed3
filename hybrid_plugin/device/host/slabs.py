# SPDX-License-Identifier: Apache-2.0
"""How the rows of a pool lie in the pieces of a ring.

On the host and in the ring, a row is all parts of a page or slot, one behind the other.
A piece holds several rows that are smaller than it.  Larger ones are cut into slabs,
each of which is moved alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from hybrid_kernels.state_copy import PartsPair

from hybrid_plugin.device.host.ring import StagingRing

_ALIGNMENT = 256
"""Slabs begin at multiples of so many bytes, so that kernels move large words."""


@dataclass(frozen=True, slots=True)
class Slab:
    """Some columns of all rows of a pool."""

    start: int
    """Bytes of a row before it."""
    size: int
    rows: int
    """That a piece holds, as far apart as on the host where it is more than one."""
    places: torch.Tensor
    """`[rows]`: 0, 1, ..., on the device."""
    gathers: tuple[PartsPair, ...]
    """By piece: from the pool to the ring."""
    scatters: tuple[PartsPair, ...]
    """By piece: from the ring to the pool."""


def slabs(
    parts: Sequence[torch.Tensor],
    row_bytes: int,
    stores: StagingRing,
    loads: StagingRing,
) -> list[Slab]:
    """Cut the rows of a pool.

    Args:
        parts: `[ids, bytes]` int8 each, of the pool.
        row_bytes: bytes of a row on the host, at least those of all parts.
        stores: ring on the way to the host.
        loads: ring on the way back, with pieces of the same size.

    Raises:
        ValueError: if the parts are more than a row.
    """
    packed = sum(part.shape[1] for part in parts)
    if packed > row_bytes:
        raise ValueError(
            f"pages or slots of {packed} bytes do not fit into rows of {row_bytes}"
        )
    return [
        _slab(parts, row_bytes, start, size, stores, loads)
        for start, size in _cuts(packed, row_bytes, stores.piece_bytes)
    ]


def _slab(
    parts: Sequence[torch.Tensor],
    row_bytes: int,
    start: int,
    size: int,
    stores: StagingRing,
    loads: StagingRing,
) -> Slab:
    # Rows are as far apart as on the host, so that one copy moves a run of them.
    fits = row_bytes <= stores.piece_bytes
    stride = row_bytes if fits else size
    rows = stores.piece_bytes // stride if fits else 1
    columns = list(_columns(parts, start, size))

    def staged(piece: torch.Tensor) -> list[torch.Tensor]:
        return _side_by_side(columns, piece[: rows * stride].view(rows, stride))

    return Slab(
        start,
        size,
        rows,
        torch.arange(rows, device=stores.memory.device),
        tuple(PartsPair(staged(piece), columns) for piece in stores.memory),
        tuple(PartsPair(columns, staged(piece)) for piece in loads.memory),
    )


def _cuts(packed: int, row_bytes: int, piece_bytes: int) -> Iterator[tuple[int, int]]:
    """Start and size of each slab; none for rows of nothing."""
    count = 1 if row_bytes <= piece_bytes else -(-packed // piece_bytes)
    size = -(-packed // (count * _ALIGNMENT)) * _ALIGNMENT if count else 0
    for start in range(0, packed, size or 1):
        yield start, min(size, packed - start)


def _columns(
    parts: Sequence[torch.Tensor], start: int, size: int
) -> Iterator[torch.Tensor]:
    """What bytes `start` to `start + size` of a row are in each part."""
    for part in parts:
        width = part.shape[1]
        first, last = max(start, 0), min(start + size, width)
        if first < last:
            yield part[:, first:last]
        start -= width


def _side_by_side(
    columns: Sequence[torch.Tensor], rows: torch.Tensor
) -> list[torch.Tensor]:
    """The same columns in rows of their own, `[rows, bytes]`."""
    widths = [column.shape[1] for column in columns]
    ends = list(accumulate(widths))
    return [rows[:, end - width : end] for end, width in zip(ends, widths, strict=True)]
