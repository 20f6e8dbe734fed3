# SPDX-License-Identifier: Apache-2.0
"""Ids of one pool, granule by granule: mapped or not; free, live or cached.

An id is *free* (nobody's), *live* (a live sequence's, shared or not) or *cached*
(the tree's alone).  Only ids of mapped granules are handed out, the lowest
first: that keeps the upper granules empty, and an empty granule's memory can go
to another pool.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence

RESERVED_ID = 0


class IdSpace:
    """Which ids there are, and what each granule holds.

    Id 0 is reserved: never handed out, and its granule always mapped.
    """

    def __init__(self, capacity: int, per_granule: int | None = None) -> None:
        """Manage ids 1 to `capacity - 1`.

        Args:
            capacity: ids, the reserved one included.
            per_granule: ids in a granule, a divisor of `capacity`; only the
                first granule is mapped then.  By default there is one granule.

        Raises:
            ValueError: for sizes that do not fit.
        """
        per_granule = capacity if per_granule is None else per_granule
        if per_granule < 1 or capacity % per_granule:
            raise ValueError(
                f"{capacity} ids are no whole number of granules of {per_granule}"
            )
        self.capacity = capacity
        self.per_granule = per_granule
        self.granules = capacity // per_granule
        self.mapped = 0
        """Granules with memory."""
        self.free = 0
        """Ids that can be handed out."""
        self.live = 0
        self.cached = 0
        self.pinned_granules = 1
        """Granules with live ids, and that of the reserved one."""
        self._free: list[list[int]] = [[] for _ in range(self.granules)]
        self._live = [0] * self.granules
        self._cached = [0] * self.granules
        self._is_mapped = bytearray(self.granules)
        self._idle: set[int] = set()
        self._open: list[int] = []
        """Heap of granules that may have free ids; see `_lowest_open`."""
        self._is_open = bytearray(self.granules)
        self._live[RESERVED_ID // per_granule] = 1  # never empty
        self.map(RESERVED_ID // per_granule)

    # ---------------------------------------------------------------- granules

    def is_mapped(self, granule: int) -> bool:
        """Whether a granule has memory."""
        return bool(self._is_mapped[granule])

    def mapped_granules(self) -> list[int]:
        """Every granule with memory, ascending."""
        return [g for g, mapped in enumerate(self._is_mapped) if mapped]

    def map(self, granule: int) -> None:
        """Note that a granule got memory: its ids are free.

        Raises:
            ValueError: if it had memory already.
        """
        if self._is_mapped[granule]:
            raise ValueError(f"granule {granule} is mapped already")
        per = self.per_granule
        ids = range(granule * per, (granule + 1) * per)
        self._free[granule] = [i for i in ids if i != RESERVED_ID]
        self._is_mapped[granule] = 1
        self.mapped += 1
        self.free += len(self._free[granule])
        self._opened(granule)
        if len(self._free[granule]) == per:
            self._idle.add(granule)

    def unmap(self, granule: int) -> None:
        """Note that an idle granule lost its memory.

        Raises:
            ValueError: if it is not idle.
        """
        if granule not in self._idle:
            raise ValueError(f"granule {granule} is in use or has no memory")
        self._idle.remove(granule)
        self.free -= self.per_granule
        self._free[granule] = []
        self._is_mapped[granule] = 0
        self.mapped -= 1

    def lowest_hole(self) -> int | None:
        """The first granule without memory."""
        granule = self._is_mapped.find(0)
        return None if granule < 0 else granule

    def highest_idle(self) -> int | None:
        """The last mapped granule that nobody has an id of."""
        return max(self._idle, default=None)

    @property
    def idle(self) -> int:
        """Mapped granules that nobody has an id of."""
        return len(self._idle)

    def emptiest(self) -> int | None:
        """The granule with the fewest cached ids, some of them, and no live one."""
        candidates = (
            g
            for g, cached in enumerate(self._cached)
            if cached and self._is_mapped[g] and not self._live[g]
        )
        return min(candidates, key=lambda g: (self._cached[g], -g), default=None)

    def newly_pinned(self, ids: Iterable[int]) -> int:
        """How many granules without live ids these ids lie in."""
        touched = {i // self.per_granule for i in ids}
        return sum(not self._live[granule] for granule in touched)

    def free_in(self, granule: int) -> int:
        """Free ids of one granule."""
        return len(self._free[granule])

    # --------------------------------------------------------------------- ids

    def free_ids(self) -> list[int]:
        """Every free id, ascending."""
        return sorted(i for ids in self._free for i in ids)

    def take(self, count: int) -> list[int]:
        """Hand out the `count` lowest free ids, live.

        Raises:
            ValueError: if fewer are free.
        """
        if count > self.free:
            raise ValueError(f"{count} ids asked for, {self.free} free")
        taken: list[int] = []
        while len(taken) < count:
            granule = self._lowest_open()
            ids = self._free[granule]
            several = min(count - len(taken), len(ids))
            taken += [heapq.heappop(ids) for _ in range(several)]
            self._idle.discard(granule)
            self._add_live(granule, several)
        self.free -= count
        return taken

    def take_outside(self, granule: int, count: int) -> list[int]:
        """Hand out the lowest free ids of other granules, cached.

        Raises:
            ValueError: if there are not so many.
        """
        if count > self.free - len(self._free[granule]):
            raise ValueError(f"there are no {count} free ids outside {granule}")
        aside = self._free[granule]
        self._free[granule] = []
        self.free -= len(aside)
        taken = self.take(count)
        self.rest(taken)
        self._free[granule] = aside
        self.free += len(aside)
        self._opened(granule)
        return taken

    def rest(self, ids: Sequence[int]) -> None:
        """Live ids become the tree's alone."""
        for granule, count in self._by_granule(ids).items():
            self._add_live(granule, -count)
            self._add_cached(granule, count)

    def revive(self, ids: Sequence[int]) -> None:
        """Cached ids become a live sequence's."""
        for granule, count in self._by_granule(ids).items():
            self._add_cached(granule, -count)
            self._add_live(granule, count)

    def free_live(self, ids: Sequence[int]) -> None:
        """Live ids become free."""
        for granule, count in self._by_granule(ids).items():
            self._add_live(granule, -count)
        self._put_back(ids)

    def free_cached(self, ids: Sequence[int]) -> None:
        """Cached ids become free."""
        for granule, count in self._by_granule(ids).items():
            self._add_cached(granule, -count)
        self._put_back(ids)

    # ---------------------------------------------------------------- internal

    def _by_granule(self, ids: Sequence[int]) -> dict[int, int]:
        """How many of the ids lie in each granule."""
        if self.granules == 1:
            return {0: len(ids)}
        return Counter([i // self.per_granule for i in ids])

    def _add_cached(self, granule: int, count: int) -> None:
        self._cached[granule] += count
        self.cached += count

    def _add_live(self, granule: int, count: int) -> None:
        before = self._live[granule]
        self._live[granule] = before + count
        self.live += count
        self.pinned_granules += (before + count > 0) - (before > 0)

    def _put_back(self, ids: Sequence[int]) -> None:
        lists, per, push = self._free, self.per_granule, heapq.heappush
        for i in ids:
            granule = i // per
            free = lists[granule]
            push(free, i)
            if len(free) == 1:
                self._opened(granule)
            if len(free) == per:
                self._idle.add(granule)
        self.free += len(ids)

    def _opened(self, granule: int) -> None:
        if not self._is_open[granule]:
            self._is_open[granule] = 1
            heapq.heappush(self._open, granule)

    def _lowest_open(self) -> int:
        """The first granule with free ids; there is one."""
        while not self._free[self._open[0]]:
            self._is_open[heapq.heappop(self._open)] = 0
        return self._open[0]
