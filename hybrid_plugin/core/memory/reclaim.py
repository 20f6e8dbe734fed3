# SPDX-License-Identifier: Apache-2.0
"""What the controller may do with the cached pages and snapshots of a cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybrid_plugin.core.commands import Copy, Pool

if TYPE_CHECKING:
    from hybrid_plugin.core.cache import HybridCache


class PageReclaim:
    """Cached KV pages: the least recently used leaves of the tree."""

    def __init__(self, cache: HybridCache) -> None:
        self._cache = cache

    def age(self) -> int | None:
        """Admissions since the oldest leaf was used."""
        return self._cache.tree.kv_age()

    def evict(self, count: int, *, allow_hot: bool) -> bool:
        """Evict up to so many pages of the oldest leaf."""
        return self._cache.evict_pages(count)

    def promised(self) -> int:
        """Pages for the rest of the prompts that are computed now."""
        return self._cache.promised_pages

    def migrate_granule(self, granule: int) -> None:
        """Move a granule's cached pages to free ones elsewhere."""
        moved = self._cache.pages.move(granule)
        for source, destination in moved.items():
            self._cache.enqueue(Copy(Pool.KV, source, destination))
        self._cache.tree.renumber(pages=moved)


class SnapshotReclaim:
    """Snapshots, in the order in which the policy lets go of them."""

    def __init__(self, cache: HybridCache) -> None:
        self._cache = cache

    def age(self) -> int | None:
        """Admissions since the snapshot to go next was taken or used."""
        return self._cache.tree.snapshot_age()

    def evict(self, count: int, *, allow_hot: bool) -> bool:
        """Evict that snapshot; a hot one only at the last."""
        if not allow_hot and self._cache.tree.next_is_hot():
            return False
        return self._cache.evict_snapshot()

    def promised(self) -> int:
        """None: a sequence has its slot from the start."""
        return 0

    def migrate_granule(self, granule: int) -> None:
        """Move a granule's snapshots to free slots elsewhere."""
        moved = self._cache.slots.move(granule)
        for source, destination in moved.items():
            self._cache.enqueue(Copy(Pool.STATE, source, destination))
        self._cache.tree.renumber(slots=moved)
