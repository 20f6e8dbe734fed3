# SPDX-License-Identifier: Apache-2.0
"""Ranges of memory: where the rows of a tensor lie, here and on another machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from hybrid_plugin.tiers.bundle_file import Rows

Range: TypeAlias = tuple[int, int]
"""Address and number of bytes."""
MOST_RANGES = 1 << 20
"""Of one tensor: far more than a sequence has pages."""


def ranges_of(rows: Rows) -> list[Range]:
    """Where contiguous pieces lie, as few ranges as can be."""
    found: list[Range] = []
    for row in rows:
        address, size = row.ctypes.data, row.nbytes
        if found and sum(found[-1]) == address:
            found[-1] = found[-1][0], found[-1][1] + size
        elif size:
            found.append((address, size))
    return found


def paired(
    theirs: Sequence[Range], own: Sequence[Range]
) -> Iterator[tuple[Range, Range]]:
    """Both cut in pieces of equal sizes, of which one fills the other.

    Args:
        theirs: as many bytes as `own` has, in the same order.
        own: where these go.
    """
    rest = iter(own)
    address = size = 0
    for start, count in theirs:
        while count:
            if not size:
                address, size = next(rest)
            part = min(size, count)
            yield (start, part), (address, part)
            start, count = start + part, count - part
            address, size = address + part, size - part


def read_ranges(value: Any, size: int) -> list[Range]:
    """Ranges that somebody has sent.

    Args:
        value: parsed from JSON.
        size: bytes that they must have together.

    Raises:
        ValueError: if they are not of this kind, or of another size.
    """
    if not isinstance(value, list) or len(value) > MOST_RANGES:
        raise ValueError("no ranges")
    found = []
    for one in value:
        if not isinstance(one, list) or [type(n) for n in one] != [int, int]:
            raise ValueError(f"{one!r:.40} is no range")
        address, count = one
        if address < 1 or count < 1 or address + count > 1 << 64:
            raise ValueError(f"{one!r:.60} is no range of memory")
        found.append((address, count))
    if sum(count for _, count in found) != size:
        raise ValueError(f"its ranges have not the {size} bytes of the tensor")
    return found
