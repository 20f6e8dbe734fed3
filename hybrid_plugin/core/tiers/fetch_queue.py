# SPDX-License-Identifier: Apache-2.0
"""FetchQueue: when a fetch of a tier could run, by what those before it should take."""

from __future__ import annotations

import heapq


class FetchQueue:
    """The readers of one tier; each has a fetch at a time, in the order they come."""

    def __init__(self, at_once: int) -> None:
        """All are free.

        Args:
            at_once: readers.
        """
        self._free_at = [0.0] * at_once
        """When each reader should be free; a heap."""

    def seconds(self, now: float) -> float:
        """Until a fetch runs that is added now."""
        return max(self._free_at[0] - now, 0.0)

    def add(self, now: float, seconds: float) -> None:
        """Note a fetch.

        Args:
            now: the time.
            seconds: that it should run.
        """
        begins = max(self._free_at[0], now)
        heapq.heapreplace(self._free_at, begins + seconds)

    def clear(self, now: float) -> None:
        """Note that no fetch is left, whatever they should have taken."""
        self._free_at = [now] * len(self._free_at)
