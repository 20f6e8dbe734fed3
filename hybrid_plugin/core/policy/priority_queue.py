# SPDX-License-Identifier: Apache-2.0
"""A priority queue whose members can be moved and removed."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class PriorityOrder(Generic[T]):
    """Members by priority, lowest first; ties in the order of `put`.

    A binary heap with lazy deletion: an entry that was moved or removed stays in the
    heap until it reaches the top, or until such entries are the majority.  `put` and
    `first` take O(log n), `discard` O(1), all amortised.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, T]] = []
        self._entries: dict[T, tuple[float, int, T]] = {}
        self._count = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, member: T) -> bool:
        return member in self._entries

    def __iter__(self) -> Iterator[T]:
        """Lowest priority first; sorts, so it is not for hot paths."""
        return iter([member for _, _, member in sorted(self._entries.values())])

    def put(self, member: T, priority: float) -> None:
        """Add `member`, or change its priority."""
        self._count += 1
        entry = (priority, self._count, member)
        self._entries[member] = entry
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._entries) + 64:
            self._heap = list(self._entries.values())
            heapq.heapify(self._heap)

    def discard(self, member: T) -> None:
        """Remove `member` if it is present."""
        self._entries.pop(member, None)

    def priority(self, member: T) -> float:
        """The priority of `member`, which must be present."""
        return self._entries[member][0]

    def first(self) -> T | None:
        """The member with the lowest priority; None if empty."""
        heap, entries = self._heap, self._entries
        while heap:
            entry = heap[0]
            if entries.get(entry[2]) is entry:
                return entry[2]
            heapq.heappop(heap)
        return None
