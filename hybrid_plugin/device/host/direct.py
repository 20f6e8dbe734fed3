# SPDX-License-Identifier: Apache-2.0
"""Rows of the device that lie in few large pieces: copies of them need no ring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hybrid_plugin.device.host.ranges import Ranges
from hybrid_plugin.device.host.rows import HostRows

LEAST_DIRECT = 128 << 10
"""Bytes of a copy, on average, from which on a copy engine is about as fast as with one
large one, if it needs a microsecond or two for each: not measured."""


@dataclass(frozen=True, slots=True)
class _Part:
    """A tensor of a pool."""

    address: int
    stride: int
    """Bytes between rows."""
    size: int
    """Bytes of a row."""


@dataclass(frozen=True, slots=True)
class DirectRows:
    """Where the rows of a pool are."""

    parts: tuple[_Part, ...]

    def ranges(self, rows: HostRows, start: Sequence[int], to: Sequence[int]) -> Ranges:
        """From rows of the host to rows of the device.

        Args:
            rows: of the host.
            start: which, in the order in which runs of them are found.
            to: ids of the device, one for each.
        """
        found = Ranges()
        for run in rows.runs(start):
            of = rows.address(run)
            for place in to[run.first : run.first + run.count]:
                begin = of
                for part in self.parts:
                    found.add(part.address + place * part.stride, begin, part.size)
                    begin += part.size
                of += rows.row_bytes
        return found


def direct_rows(parts: Sequence[torch.Tensor], *, least: int) -> DirectRows | None:
    """The rows of a pool, if they can be copied without a ring.

    Args:
        parts: `[ids, bytes]` int8 each, of the pool.
        least: bytes that a part of a row must have, on average.
    """
    if any(part.shape[1] > 1 and part.stride(1) != 1 for part in parts):
        return None
    if sum(part.shape[1] for part in parts) < least * len(parts):
        return None
    return DirectRows(
        tuple(_Part(part.data_ptr(), part.stride(0), part.shape[1]) for part in parts)
    )
