# SPDX-License-Identifier: Apache-2.0
"""Blocks of host memory, and which copies still use them."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch

from hybrid_plugin.device.host.queues import Mark, Queue


class HostBlocks:
    """A buffer cut into blocks of equal size.

    Copies run later than they are issued.  One queue writes blocks, another one reads
    them.  So each block has a mark behind the last copy to it, which one from it waits
    for, and the other way round.  Marks stay with a block that goes to another pool.
    """

    def __init__(self, memory: torch.Tensor, block_bytes: int) -> None:
        """All blocks are free.

        Args:
            memory: `[size]` int8, a whole number of blocks.
            block_bytes: bytes of each.
        """
        count = len(memory.view(-1, block_bytes))
        self._memory = memory
        self._bytes = memory.view(torch.uint8).numpy()
        self.block_bytes = block_bytes
        self._free = list(range(count - 1, -1, -1))
        self._written: list[Mark | None] = [None] * count
        self._read: list[Mark | None] = [None] * count

    def take(self) -> int:
        """A free block, with whatever it held before.

        Raises:
            MemoryError: if there is none.
        """
        if not self._free:
            raise MemoryError(
                f"all {len(self._written)} blocks of host memory are in use"
            )
        return self._free.pop()

    def give(self, block: int) -> None:
        """Take a block back."""
        self._free.append(block)

    def drop(self) -> None:
        """Let go of the memory: there is no part of any block from now on."""
        self._memory = torch.empty(0, dtype=torch.int8)
        self._bytes = self._memory.view(torch.uint8).numpy()

    def address(self, block: int, start: int) -> int:
        """Where a block's byte `start` is.

        Raises:
            RuntimeError: if the memory was let go of.
        """
        if not self._memory.numel():
            raise RuntimeError("the host memory was given back")
        return self._memory.data_ptr() + block * self.block_bytes + start

    def view(self, block: int, start: int, size: int) -> npt.NDArray[np.uint8]:
        """The same `[size]` bytes, for what is not PyTorch's."""
        first = block * self.block_bytes + start
        return self._bytes[first : first + size]

    def before_writing(self, blocks: Iterable[int], queue: Queue) -> None:
        """Have a queue wait for the copies from blocks."""
        _wait(self._read, blocks, queue)

    def before_reading(self, blocks: Iterable[int], queue: Queue) -> None:
        """Have a queue wait for the copies to blocks."""
        _wait(self._written, blocks, queue)

    def were_written(self, blocks: Iterable[int], mark: Mark) -> None:
        """Note where the last copy to blocks ends."""
        _note(self._written, blocks, mark)

    def were_read(self, blocks: Iterable[int], mark: Mark) -> None:
        """Note where the last copy from blocks ends."""
        _note(self._read, blocks, mark)


def _wait(marks: list[Mark | None], blocks: Iterable[int], queue: Queue) -> None:
    found = {id(mark): mark for mark in (marks[block] for block in blocks)}
    for mark in found.values():
        if mark is not None:
            queue.wait(mark)


def _note(marks: list[Mark | None], blocks: Iterable[int], mark: Mark) -> None:
    for block in blocks:
        marks[block] = mark
