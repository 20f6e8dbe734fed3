# SPDX-License-Identifier: Apache-2.0
"""Ids of one pool, granule by granule: mapped or not; free, live or cached.

An id is *free* (nobody's), *live* (a live sequence's, shared or not) or *cached*
(the tree's alone).  Only ids of mapped granules are handed out, the lowest
first: that keeps the upper granules empty, and an empty granule's memory can go
to another pool.

Every call is linear in the ids it names, with a small constant: long lists go
through numpy, short ones through a loop.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

RESERVED_ID = 0

_FEW = 48
"""Up to so many ids a loop is faster than numpy."""


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
        self._is_free = bytearray(capacity)
        self._free_view = np.frombuffer(self._is_free, np.uint8)
        self._lowest = 1
        """No id below is free."""
        self._is_mapped = bytearray(self.granules)
        self._live = [0] * self.granules
        self._cached = [0] * self.granules
        self._idle: set[int] = set()
        self._live[0] = 1  # the reserved one
        self.map(0)

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
        self._is_mapped[granule] = 1
        self.mapped += 1
        self._set_free(granule, 1)
        if granule == 0:
            self._is_free[RESERVED_ID] = 0
            self.free -= 1
        else:
            self._idle.add(granule)
        self._lowest = min(self._lowest, max(granule * self.per_granule, 1))

    def unmap(self, granule: int) -> None:
        """Note that an idle granule lost its memory.

        Raises:
            ValueError: if it is not idle.
        """
        if granule not in self._idle:
            raise ValueError(f"granule {granule} is in use or has no memory")
        self._idle.remove(granule)
        self._is_mapped[granule] = 0
        self.mapped -= 1
        self._set_free(granule, 0)

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
            granule
            for granule, cached in enumerate(self._cached)
            if cached and not self._live[granule]
        )
        return min(candidates, key=lambda g: (self._cached[g], -g), default=None)

    def newly_pinned(self, ids: Iterable[int]) -> int:
        """How many granules without live ids these ids lie in."""
        touched = {i // self.per_granule for i in ids}
        return sum(not self._live[granule] for granule in touched)

    def pinned_by(self, ids: Sequence[int]) -> int:
        """How many granules have no live ids but these, which are all live."""
        counts = self._by_granule(ids)
        return sum(self._live[granule] == count for granule, count in counts)

    def free_in(self, granule: int) -> int:
        """Free ids of one granule."""
        first = granule * self.per_granule
        return self._is_free.count(1, first, first + self.per_granule)

    # --------------------------------------------------------------------- ids

    def free_ids(self) -> list[int]:
        """Every free id, ascending."""
        found: list[int] = np.flatnonzero(self._free_view).tolist()
        return found

    def allocate(self, count: int) -> array[int]:
        """Hand out the `count` lowest free ids, live, as an array of type `i`.

        Raises:
            ValueError: if fewer are free.
        """
        if count > self.free:
            raise ValueError(f"{count} ids asked for, {self.free} free")
        ids = self._allocate_few(count) if count <= _FEW else self._allocate_many(count)
        self.free -= count
        for granule, several in self._by_granule(ids):
            self._idle.discard(granule)
            self._add_live(granule, several)
        return ids

    def allocate_outside(self, granule: int, count: int) -> array[int]:
        """Hand out the lowest free ids of other granules, cached.

        Raises:
            ValueError: if there are not so many.
        """
        first = granule * self.per_granule
        inside = slice(first, first + self.per_granule)
        aside, hidden = self._is_free[inside], self.free_in(granule)
        if count > self.free - hidden:
            raise ValueError(f"there are no {count} free ids outside {granule}")
        lowest = self._lowest
        self._is_free[inside] = bytes(self.per_granule)
        self.free -= hidden
        ids = self.allocate(count)
        self.to_cached(ids)
        self._is_free[inside] = aside
        self.free += hidden
        self._lowest = lowest
        return ids

    def to_cached(self, ids: Sequence[int]) -> None:
        """Live ids become the tree's alone."""
        for granule, count in self._by_granule(ids):
            self._add_live(granule, -count)
            self._add_cached(granule, count)

    def to_live(self, ids: Sequence[int]) -> None:
        """Cached ids become a live sequence's."""
        for granule, count in self._by_granule(ids):
            self._add_cached(granule, -count)
            self._add_live(granule, count)

    def free_live(self, ids: Sequence[int]) -> None:
        """Live ids become free."""
        for granule, count in self._by_granule(ids):
            self._add_live(granule, -count)
            self._note_idle(granule)
        self._put_back(ids)

    def free_cached(self, ids: Sequence[int]) -> None:
        """Cached ids become free."""
        for granule, count in self._by_granule(ids):
            self._add_cached(granule, -count)
            self._note_idle(granule)
        self._put_back(ids)

    # ---------------------------------------------------------------- internal

    def _set_free(self, granule: int, free: int) -> None:
        first, per = granule * self.per_granule, self.per_granule
        self._is_free[first : first + per] = bytes([free]) * per
        self.free += per if free else -per

    def _allocate_few(self, count: int) -> array[int]:
        ids = array("i", bytes(4 * count))
        i = self._lowest - 1
        for position in range(count):
            i = self._is_free.find(1, i + 1)
            self._is_free[i] = 0
            ids[position] = i
        self._lowest = i + 1
        return ids

    def _allocate_many(self, count: int) -> array[int]:
        window, found = count, np.empty(0, np.intp)
        while len(found) < count:
            window *= 2
            part = self._free_view[self._lowest : self._lowest + window]
            found = np.flatnonzero(part)
        taken = (found[:count] + self._lowest).astype(np.int32)
        self._free_view[taken] = 0
        self._lowest = int(taken[-1]) + 1
        ids = array("i")
        ids.frombytes(taken.tobytes())
        return ids

    def _put_back(self, ids: Sequence[int]) -> None:
        if not len(ids):
            return
        self.free += len(ids)
        self._lowest = min(self._lowest, int(min(ids)))
        if len(ids) > _FEW:
            self._free_view[_numbers(ids)] = 1
            return
        for i in ids:
            self._is_free[i] = 1

    def _by_granule(self, ids: Sequence[int]) -> Iterable[tuple[int, int]]:
        """How many of the ids lie in each granule that has any."""
        if self.granules == 1 or not len(ids):
            return ((0, len(ids)),)
        if len(ids) <= _FEW:
            return Counter([i // self.per_granule for i in ids]).items()
        counts = np.bincount(_numbers(ids) // self.per_granule)
        touched = np.flatnonzero(counts)
        return zip(touched.tolist(), counts[touched].tolist(), strict=True)

    def _note_idle(self, granule: int) -> None:
        if not self._live[granule] and not self._cached[granule]:
            self._idle.add(granule)

    def _add_cached(self, granule: int, count: int) -> None:
        self._cached[granule] += count
        self.cached += count

    def _add_live(self, granule: int, count: int) -> None:
        before = self._live[granule]
        self._live[granule] = before + count
        self.live += count
        self.pinned_granules += (before + count > 0) - (before > 0)


def _numbers(ids: Any) -> Any:
    if isinstance(ids, array):
        return np.frombuffer(ids, np.int32)
    return np.asarray(ids)
