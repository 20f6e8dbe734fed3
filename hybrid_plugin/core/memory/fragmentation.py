# SPDX-License-Identifier: Apache-2.0
"""FragmentationRelief: a sequence that finds no room alone begins in empty pools.

Where memory moves between pools by the granule, ids in use keep their granules.  Ids
that a sequence got one by one while others ran, or with a hit, may keep more granules
than they fill, and another pool then finds none for it.  Preempted and admitted again,
it would get such ids again, and be preempted again, for ever.

So everything cached goes with it.  The pools are then empty, and hand out the lowest
ids first: a sequence alone, of which nothing is cached either, keeps no more granules
than it fills.  It stays alone until it has as many pages as it found no room for, so it
gets further each time.
"""

from __future__ import annotations

from collections.abc import Mapping

from hybrid_plugin.core.memory.cache_memory import CacheMemory
from hybrid_plugin.core.sequence import LiveSequence


class FragmentationRelief:
    """Empties the pools for a sequence that found no room alone."""

    def __init__(
        self, memory: CacheMemory, sequences: Mapping[str, LiveSequence]
    ) -> None:
        """Watch over a cache.

        Args:
            memory: of the cache.
            sequences: that are live, by name.
        """
        self._memory = memory
        self._sequences = sequences
        self._pages = 0
        """For which the sequence that began last, or begins next, found no room."""

    @property
    def holds_back(self) -> bool:
        """Whether nobody is admitted beside the sequence that is live."""
        if not self._pages or not self._sequences:
            return False
        return max(len(one.pages) for one in self._sequences.values()) < self._pages

    @property
    def begins(self) -> bool:
        """Whether the next sequence is to be alone, and nothing of it cached."""
        return self._pages > 0 and not self._sequences

    def refused_growth(self, sequence: LiveSequence, pages: int) -> None:
        """Note that a live sequence found no room for so many pages in all."""
        if self._memory.broker.moves_memory and len(self._sequences) == 1:
            sequence.refused_pages = pages

    def refused_hit(self) -> None:
        """Note that a sequence found no room with its hit, though none is live."""
        if self._memory.broker.moves_memory and not self._sequences:
            self._evict_all()

    def ended(self, sequence: LiveSequence, *, preempted: bool) -> None:
        """Note the end of a sequence, with which everything in use became free."""
        self._pages = 0
        if preempted and sequence.refused_pages > len(sequence.pages):
            self._pages = sequence.refused_pages
            self._evict_all()

    def _evict_all(self) -> None:
        memory = self._memory
        memory.stats.pools_emptied += 1
        while memory.evict_pages(memory.pages.capacity) or memory.evict_snapshot():
            pass
