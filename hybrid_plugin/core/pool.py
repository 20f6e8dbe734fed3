# SPDX-License-Identifier: Apache-2.0
"""Who owns which page and which slot: ids and counts, no memory.

Id 0 of each pool is reserved and never handed out: engines pad their tables
with it, so its memory must always be there and must never be anybody's.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

RESERVED_ID = 0


class PagePool:
    """Ids of KV pages, with references of live sequences and of the tree.

    A page is free when nobody refers to it.  Several sequences may read one
    page, and the tree may hold it in several nodes (a page in which two
    sequences diverge).  The lowest free id is handed out first, which keeps
    the upper end of the pool empty as long as possible.
    """

    def __init__(self, capacity: int) -> None:
        """Manage ids 1 to `capacity - 1`.

        Raises:
            ValueError: if there is no page besides the reserved one.
        """
        if capacity < 2:
            raise ValueError(f"a page pool needs at least 2 pages, got {capacity}")
        self.capacity = capacity
        self._free = list(range(1, capacity))  # sorted, so already a heap
        self._sequence_refs = [0] * capacity
        self._tree_refs = [0] * capacity
        self._cached_only = 0

    @property
    def usable(self) -> int:
        """Pages that can be handed out at all."""
        return self.capacity - 1

    @property
    def free(self) -> int:
        """Pages that nobody refers to."""
        return len(self._free)

    @property
    def reclaimable(self) -> int:
        """Pages that only the tree refers to: free once the tree lets go."""
        return self._cached_only

    @property
    def in_use(self) -> int:
        """Pages that at least one live sequence refers to."""
        return self.usable - self.free - self._cached_only

    def allocate(self, count: int) -> list[int]:
        """Hand out `count` pages, each with one sequence reference.

        Raises:
            ValueError: if fewer are free; callers check `free` first.
        """
        if count > len(self._free):
            raise ValueError(f"{count} pages asked for, {len(self._free)} free")
        pages = [heapq.heappop(self._free) for _ in range(count)]
        for page in pages:
            self._sequence_refs[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Add a sequence reference to pages that are not free."""
        for page in pages:
            self._require_owned(page)
            if self._sequence_refs[page] == 0:
                self._cached_only -= 1
            self._sequence_refs[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Drop a sequence reference from each page."""
        for page in pages:
            if self._sequence_refs[page] < 1:
                raise ValueError(f"page {page} has no sequence reference to drop")
            self._sequence_refs[page] -= 1
            if self._sequence_refs[page] == 0:
                if self._tree_refs[page]:
                    self._cached_only += 1
                else:
                    heapq.heappush(self._free, page)

    def adopt(self, pages: Iterable[int]) -> None:
        """Add a tree reference to pages that are not free."""
        for page in pages:
            self._require_owned(page)
            self._tree_refs[page] += 1

    def drop(self, pages: Iterable[int]) -> None:
        """Drop a tree reference from each page."""
        for page in pages:
            if self._tree_refs[page] < 1:
                raise ValueError(f"page {page} has no tree reference to drop")
            self._tree_refs[page] -= 1
            if self._tree_refs[page] == 0 and self._sequence_refs[page] == 0:
                self._cached_only -= 1
                heapq.heappush(self._free, page)

    def references(self, page: int) -> tuple[int, int]:
        """Return (references of sequences, references of the tree)."""
        return self._sequence_refs[page], self._tree_refs[page]

    def _require_owned(self, page: int) -> None:
        if not (self._sequence_refs[page] or self._tree_refs[page]):
            raise ValueError(f"page {page} is free, it cannot gain a reference")


class SlotPool:
    """Ids of state slots: each is free, a live sequence's, or a snapshot."""

    def __init__(self, capacity: int) -> None:
        """Manage ids 1 to `capacity - 1`.

        Raises:
            ValueError: if there is no slot besides the reserved one.
        """
        if capacity < 2:
            raise ValueError(f"a slot pool needs at least 2 slots, got {capacity}")
        self.capacity = capacity
        self._free = list(range(1, capacity))
        self._running: set[int] = set()
        self._snapshots: set[int] = set()

    @property
    def usable(self) -> int:
        """Slots that can be handed out at all."""
        return self.capacity - 1

    @property
    def free(self) -> int:
        """Slots that nobody owns."""
        return len(self._free)

    @property
    def running(self) -> int:
        """Slots of live sequences."""
        return len(self._running)

    @property
    def snapshots(self) -> int:
        """Slots that the tree owns."""
        return len(self._snapshots)

    def allocate_running(self) -> int:
        """Hand the lowest free slot to a sequence."""
        slot = self._pop()
        self._running.add(slot)
        return slot

    def allocate_snapshot(self) -> int:
        """Hand the lowest free slot to the tree."""
        slot = self._pop()
        self._snapshots.add(slot)
        return slot

    def donate(self, slot: int) -> None:
        """Turn a sequence's slot into a snapshot."""
        self._running.remove(slot)
        self._snapshots.add(slot)

    def take_over(self, slot: int) -> None:
        """Turn a snapshot into a sequence's slot."""
        self._snapshots.remove(slot)
        self._running.add(slot)

    def free_running(self, slot: int) -> None:
        """Give back a sequence's slot."""
        self._running.remove(slot)
        heapq.heappush(self._free, slot)

    def free_snapshot(self, slot: int) -> None:
        """Give back a snapshot's slot."""
        self._snapshots.remove(slot)
        heapq.heappush(self._free, slot)

    def _pop(self) -> int:
        if not self._free:
            raise ValueError("no state slot is free; callers check `free` first")
        return heapq.heappop(self._free)
