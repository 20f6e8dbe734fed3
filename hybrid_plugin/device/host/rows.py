# SPDX-License-Identifier: Apache-2.0
"""Where the rows of a host pool lie: which block is behind which granule."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hybrid_plugin.core.commands import PoolId
from hybrid_plugin.device.host.blocks import HostBlocks


@dataclass(frozen=True, slots=True)
class Run:
    """Rows that lie behind each other."""

    first: int
    """Place of its first row among those asked for."""
    count: int
    block: int
    start: int
    """Bytes of the block before its first row."""


class HostRows:
    """Rows of one host pool."""

    def __init__(
        self, pool: PoolId, blocks: HostBlocks, row_bytes: int, per_granule: int
    ) -> None:
        """Put a block behind granule 0.

        Args:
            pool: the host pool.
            blocks: that all host pools share.
            row_bytes: bytes of a row, with what pads it.
            per_granule: rows in a block.

        Raises:
            ValueError: if these do not fit into a block.
            MemoryError: if no block is free.
        """
        if not 0 < per_granule * row_bytes <= blocks.block_bytes:
            raise ValueError(
                f"{per_granule} rows of {row_bytes} bytes are no block of "
                f"{blocks.block_bytes}"
            )
        self.pool = pool
        self.row_bytes = row_bytes
        self._blocks = blocks
        self._per = per_granule
        self._behind: dict[int, int] = {}
        """Block behind each granule that has one."""
        self.map([0])

    def map(self, granules: Iterable[int]) -> None:
        """Put blocks behind granules; what they hold is undefined.

        Raises:
            ValueError: if a granule has a block.
            MemoryError: if no block is free, which is an error of whoever ordered it.
        """
        for granule in granules:
            if granule in self._behind:
                raise ValueError(f"granule {granule} of {self.pool} has memory already")
            self._behind[granule] = self._blocks.take()

    def unmap(self, granules: Iterable[int]) -> None:
        """Take the blocks from granules.

        Raises:
            ValueError: if a granule has none.
        """
        for granule in granules:
            if granule not in self._behind:
                raise ValueError(f"granule {granule} of {self.pool} has no memory")
            self._blocks.give(self._behind.pop(granule))

    def check(self, rows: Iterable[int]) -> None:
        """Check that there is memory behind rows.

        Raises:
            ValueError: if there is none behind one.
        """
        missing = {row // self._per for row in rows} - self._behind.keys()
        if missing:
            raise ValueError(
                f"granules {sorted(missing)} of {self.pool} have no memory"
            )

    def blocks_of(self, rows: Iterable[int]) -> set[int]:
        """Blocks in which rows lie that have memory."""
        return {self._behind[row // self._per] for row in rows}

    def runs(self, rows: Sequence[int]) -> Iterator[Run]:
        """Rows in as few runs as their order allows."""
        first = 0
        for i in range(1, len(rows) + 1):
            if i < len(rows) and rows[i] == rows[i - 1] + 1 and rows[i] % self._per:
                continue
            granule, row = divmod(rows[first], self._per)
            yield Run(first, i - first, self._behind[granule], row * self.row_bytes)
            first = i

    def views(self, rows: Sequence[int]) -> list[npt.NDArray[np.uint8]]:
        """The memory of rows, as far as they lie behind each other `[rows, bytes]`.

        Raises:
            ValueError: if there is none behind one.
        """
        self.check(rows)
        size, view = self.row_bytes, self._blocks.view
        return [
            view(run.block, run.start, run.count * size).reshape(run.count, size)
            for run in self.runs(rows)
        ]

    def address(self, run: Run) -> int:
        """Where a run's first row begins."""
        return self._blocks.address(run.block, run.start)
