# SPDX-License-Identifier: Apache-2.0
"""The staging ring: device memory through which rows go to the host and back.

The pages of a prefix are thousands of small ranges of the device's memory, and copy
engines are fast with few large ones.  So rows are gathered in the ring first, and one
copy moves as many as a piece of it holds.  What was gathered may be rewritten at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from hybrid_plugin.device.host.queues import Mark, Queue

_MIB = 1 << 20
_ALIGNMENT = 256
"""Pieces are multiples of so many bytes."""


@dataclass(frozen=True, slots=True)
class RingSizes:
    """The two rings of a rank."""

    piece_bytes: int
    """Bytes of a piece."""
    store_pieces: int
    """Pieces on the way to the host: where all are full, the model waits."""
    load_pieces: int

    @property
    def bytes(self) -> int:
        """Memory of the device that they take."""
        return (self.store_pieces + self.load_pieces) * self.piece_bytes


_GPU_RINGS = RingSizes(32 * _MIB, store_pieces=4, load_pieces=2)
_CPU_RINGS = RingSizes(_MIB, store_pieces=2, load_pieces=2)


def rings_for(device: torch.device) -> RingSizes:
    """The rings of a rank on a device."""
    return _CPU_RINGS if device.type == "cpu" else _GPU_RINGS


class StagingRing:
    """Pieces of device memory, used in turn."""

    def __init__(self, pieces: int, piece_bytes: int, device: torch.device) -> None:
        """Take the memory, from PyTorch: peers can read it fast, unlike mapped blocks.

        Args:
            pieces: at least 1.
            piece_bytes: bytes of each.
            device: where the pools are.

        Raises:
            ValueError: for sizes that do not fit.
        """
        if pieces < 1 or piece_bytes < 1 or piece_bytes % _ALIGNMENT:
            raise ValueError(
                f"{pieces} pieces of {piece_bytes} bytes are no ring: pieces are "
                f"multiples of {_ALIGNMENT}"
            )
        self.memory = torch.empty(pieces, piece_bytes, dtype=torch.int8, device=device)
        self._in_use: list[Mark | None] = [None] * pieces
        self._next = 0

    @property
    def piece_bytes(self) -> int:
        """Bytes of a piece."""
        return self.memory.shape[1]

    def address(self, piece: int) -> int:
        """Where a piece begins."""
        return self.memory.data_ptr() + piece * self.piece_bytes

    def take(
        self, queue: Queue, wait: Callable[[Queue, Mark], None] | None = None
    ) -> int:
        """The next piece, which a queue may write once its last use is over.

        Args:
            queue: that writes.
            wait: has it wait for a mark; by default `Queue.wait` does.
        """
        piece = self._next
        self._next = (piece + 1) % len(self._in_use)
        mark = self._in_use[piece]
        if mark is not None and wait is not None:
            wait(queue, mark)
        elif mark is not None:
            queue.wait(mark)
        return piece

    def release(self, piece: int, mark: Mark) -> None:
        """Note where the last use of a piece ends."""
        self._in_use[piece] = mark
