# SPDX-License-Identifier: Apache-2.0
"""A set whose members have priorities, and whose least member is at hand."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class PriorityOrder(Generic[T]):
    """Members by priority, least first; of equals the one that was put first.

    A binary heap with lazy deletion: a member that is put again or taken out
    leaves its old entry behind, which is dropped when it surfaces, or when
    such entries become the majority.  `put` and `first` take O(log n),
    `discard` O(1), all amortised.
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
        """Least first; sorts, so not for hot paths."""
        return iter([member for _, _, member in sorted(self._entries.values())])

    def members(self) -> Iterable[T]:
        """All of them, in the order in which they came."""
        return self._entries.keys()

    def put(self, member: T, priority: float) -> None:
        """Add `member`, or move it."""
        self._count += 1
        entry = (priority, self._count, member)
        self._entries[member] = entry
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._entries) + 64:
            self._heap = list(self._entries.values())
            heapq.heapify(self._heap)

    def discard(self, member: T) -> None:
        """Take `member` out if it is present."""
        self._entries.pop(member, None)

    def priority(self, member: T) -> float:
        """What `member`, which must be present, was put with."""
        return self._entries[member][0]

    def first(self) -> T | None:
        """The least member, or None if there is none."""
        heap, entries = self._heap, self._entries
        while heap:
            entry = heap[0]
            if entries.get(entry[2]) is entry:
                return entry[2]
            heapq.heappop(heap)
        return None
