# SPDX-License-Identifier: Apache-2.0
"""How fast the last reads from one place were."""

from __future__ import annotations

from collections import deque

_READS = 16
"""Of which the rate is taken: enough that one that was disturbed does not decide."""


class LastReads:
    """Bytes and seconds of the last reads, which count together."""

    def __init__(self, *reads: tuple[float, float]) -> None:
        """Begin with some, or none.

        Args:
            reads: bytes and seconds of each.
        """
        self._reads = deque(reads, maxlen=_READS)

    @property
    def bytes_per_second(self) -> float:
        """Of all of them together; there must be one."""
        size, seconds = map(sum, zip(*self._reads, strict=True))
        return size / seconds

    def seconds(self, size: int) -> float:
        """What so many bytes should take; 0 where nothing was read."""
        return size / self.bytes_per_second if self._reads else 0.0

    def add(self, size: int, seconds: float) -> None:
        """Note a read.

        Args:
            size: in bytes.
            seconds: that it took; above 0.
        """
        self._reads.append((size, seconds))

    def clear(self) -> None:
        """Forget all of them."""
        self._reads.clear()
