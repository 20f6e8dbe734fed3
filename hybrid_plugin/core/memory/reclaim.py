# SPDX-License-Identifier: Apache-2.0
"""What a broker may do with the cached ids of each kind of pool."""

from __future__ import annotations

from hybrid_plugin.core.commands import Copy, Pool
from hybrid_plugin.core.memory.cache_memory import CacheMemory


def register_pools(memory: CacheMemory) -> None:
    """Put the broker of a cache in charge of all its pools."""
    broker = memory.broker
    broker.send_to(memory.enqueue)
    broker.register(Pool.KV, memory.pages.ids, PageReclaim(memory))
    for index, group in enumerate(memory.windows):
        reclaim = WindowReclaim(memory, index)
        broker.register(Pool.window(index), group.pages.ids, reclaim)
    if memory.slots.needed:
        broker.register(Pool.STATE, memory.slots.ids, SnapshotReclaim(memory))
    if memory.scratch is not None:
        broker.register(Pool.SCRATCH, memory.scratch.ids, ScratchReclaim(memory))


class PageReclaim:
    """Cached KV pages: the leaves of the tree."""

    def __init__(self, memory: CacheMemory) -> None:
        self._memory = memory

    def worth(self) -> float | None:
        """Of the leaf that goes next."""
        return self._memory.tree.kv_worth()

    def lifetime(self) -> float:
        """As the cache has it."""
        return self._memory.lifetime

    def evict(self, count: int) -> bool:
        """Evict up to that many pages of that leaf."""
        return self._memory.evict_pages(count)

    def promised(self) -> int:
        """Pages for the rest of the prompts that are computed now."""
        return self._memory.promised_pages(Pool.KV)

    def migrate_granule(self, granule: int) -> None:
        """Move a granule's cached pages to free ones elsewhere."""
        moved = self._memory.pages.move(granule)
        for source, destination in moved.items():
            self._memory.enqueue(Copy(Pool.KV, source, destination))
        for pairs in self._memory.pairs:
            pairs.move_pages(moved)
        self._memory.tree.renumber(pages=moved)


class SnapshotReclaim:
    """Snapshots, in the order in which the policy lets go of them."""

    def __init__(self, memory: CacheMemory) -> None:
        self._memory = memory

    def worth(self) -> float | None:
        """Of the snapshot that goes next."""
        return self._memory.tree.snapshot_worth()

    def lifetime(self) -> float:
        """As the cache has it."""
        return self._memory.lifetime

    def evict(self, count: int) -> bool:
        """Evict that snapshot."""
        return self._memory.evict_snapshot()

    def promised(self) -> int:
        """None: a sequence has its slot from the start."""
        return 0

    def migrate_granule(self, granule: int) -> None:
        """Move a granule's snapshots to free slots elsewhere."""
        moved = self._memory.slots.move(granule)
        for source, destination in moved.items():
            self._memory.enqueue(Copy(Pool.STATE, source, destination))
        self._memory.tree.renumber(slots=moved)


class WindowReclaim(SnapshotReclaim):
    """Pages of a window group: they are cached as parts of snapshots."""

    def __init__(self, memory: CacheMemory, index: int) -> None:
        """Speak for the window group at `index`."""
        super().__init__(memory)
        self._index = index

    def promised(self) -> int:
        """Pages that live sequences have reserved."""
        return self._memory.promised_pages(Pool.window(self._index))

    def migrate_granule(self, granule: int) -> None:
        """Move a granule's cached pages to free ones elsewhere."""
        moved = self._memory.windows[self._index].pages.move(granule)
        for source, destination in moved.items():
            self._memory.enqueue(Copy(Pool.window(self._index), source, destination))
        self._memory.pairs[self._index].move_windows(moved)
        self._memory.tree.renumber(windows={self._index: moved})


class ScratchReclaim:
    """Rows of the scratch: nothing in them is cached, so only idle ones can go."""

    def __init__(self, memory: CacheMemory) -> None:
        self._memory = memory

    def worth(self) -> float | None:
        """Nothing can be evicted."""
        return None

    def lifetime(self) -> float:
        """As the cache has it: what a move to this pool must repay."""
        return self._memory.lifetime

    def evict(self, count: int) -> bool:
        """Nothing can be evicted."""
        return False

    def promised(self) -> int:
        """None: a row is held from the admission of a sequence on."""
        return 0

    def migrate_granule(self, granule: int) -> None:
        """Nothing is cached there."""
        raise ValueError(f"granule {granule} of the scratch has nothing to move")
