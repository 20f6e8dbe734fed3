# SPDX-License-Identifier: Apache-2.0
"""AgedOrder: an order by worth, where worth changes as time goes by.

The worth of a member is its value times a rate.  The value is its own, the rate depends
on its kind and age.  Members of one kind and about one age therefore keep their order,
however old they get: they share a heap, and to find the least of all members only the
heaps' first ones are compared.

The rate of a heap is looked up when its age has grown by about an eighth, and kept
until then, whatever is learned meanwhile.  What was worth keeping so far is not given
up for one observation more: a cache that changes its mind faster than its content is
used again saves nothing.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, Protocol, TypeVar

from hybrid_plugin.core.policy.exposure import (
    are_of_one_age,
    next_step,
)

T = TypeVar("T", bound=Hashable)
_FEW = 8
"""Heaps that are not worth a search for some to merge."""


class Rank(NamedTuple):
    """What the worth of a member depends on."""

    kind: Hashable
    since: int
    """Admission from which its age counts."""
    value: float
    """Its worth at a rate of 1."""


class Rates(Protocol):
    """By what values are multiplied; who learns it hears who comes and goes."""

    def rate(self, kind: Hashable, age: int) -> float:
        """For members of a kind and an age in admissions; above 0."""

    def enter(self, kind: Hashable, since: int, now: int) -> int:
        """Called when a member is there; returns what identifies it for `leave`."""

    def leave(self, kind: Hashable, group: int, now: int) -> None:
        """Called when it is not there any more."""


class _Entry(NamedTuple, Generic[T]):
    value: float
    number: int
    """Ties go in the order of `put`."""
    member: T
    kind: Hashable
    since: int
    group: int | None
    """What `Rates.enter` returned; None for a member that nobody observes."""


@dataclass(slots=True)
class _Heap(Generic[T]):
    """Members of one kind and about one age, the lowest value first."""

    first: int
    """Since when the oldest of them was there."""
    last: int
    """Since when the newest was."""
    rate: float = 0.0
    until: int = 0
    """Admission until which `rate` is kept."""
    entries: list[_Entry[T]] = field(default_factory=list)


@dataclass(slots=True)
class _Series(Generic[T]):
    """All members of one kind, the oldest heap first."""

    heaps: list[_Heap[T]] = field(default_factory=list)
    most: int = 2 * _FEW
    """Heaps, before some are merged."""
    least: _Entry[T] | None = None
    """The member that is worth least, as long as what follows holds."""
    worth: float = math.inf
    until: int = 0
    """Admission at which the rate of a heap is looked up again."""

    def heap_for(self, since: int, now: int) -> _Heap[T]:
        """The heap of members that came at `since`; a new one if there is none."""
        heaps = self.heaps
        if not heaps or since > heaps[-1].last:
            heaps.append(_Heap(since, since))
            return heaps[-1]
        index = bisect_left(heaps, since, key=lambda heap: heap.last)
        heap = heaps[index]
        if since < heap.first:
            if not are_of_one_age(since, heap.last, now):
                heap = _Heap(since, since)
                heaps.insert(index, heap)
            heap.first = since
        return heap


class AgedOrder(Generic[T]):
    """Members by worth.

    `put` and `discard` take constant time but for a heap's logarithm, amortised.
    `first` takes time linear in the number of kinds, and for kinds that changed, in
    that of their heaps, which is the logarithm of the greatest age.
    """

    def __init__(self, rates: Rates) -> None:
        """Create an empty order.

        Args:
            rates: of all kinds.
        """
        self._rates = rates
        self._series: dict[Hashable, _Series[T]] = {}
        self._entries: dict[T, _Entry[T]] = {}
        self._number = 0
        self._size = 0
        """Entries in all heaps, those included that do not count any more."""

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, member: T) -> bool:
        return member in self._entries

    def put(self, member: T, rank: Rank, now: int, *, observed: bool = True) -> None:
        """Add a member, or change its rank.

        Args:
            member: that is ranked.
            rank: its new one.
            now: the current admission.
            observed: whether its presence counts for the rates of its kind.
        """
        kind, since, value = rank
        old = self._entries.get(member)
        if old is not None:
            self._series[old.kind].until = 0
        group = self._regroup(old, kind, since, now, observed)
        self._number += 1
        self._size += 1
        entry = _Entry(value, self._number, member, kind, since, group)
        self._entries[member] = entry
        series = self._series.get(kind)
        if series is None:
            series = self._series[kind] = _Series()
        heapq.heappush(series.heap_for(since, now).entries, entry)
        series.until = 0
        if len(series.heaps) > series.most:
            self._merge(series, now)
        if self._size > 2 * len(self._entries) + 64:
            self._clean()

    def discard(self, member: T, now: int) -> None:
        """Remove a member if it is present."""
        entry = self._entries.pop(member, None)
        if entry is None:
            return
        self._series[entry.kind].until = 0
        if entry.group is not None:
            self._rates.leave(entry.kind, entry.group, now)

    def rank(self, member: T) -> Rank:
        """The rank of a member, which must be present."""
        entry = self._entries[member]
        return Rank(entry.kind, entry.since, entry.value)

    def first(self, now: int) -> tuple[T, float] | None:
        """The member that is worth least, and its worth; None if empty."""
        least: _Entry[T] | None = None
        worth = math.inf
        for kind, series in self._series.items():
            if now >= series.until:
                self._find_least(kind, series, now)
            if series.worth < worth:
                least, worth = series.least, series.worth
        return None if least is None else (least.member, worth)

    def ranked(self, now: int) -> Iterator[T]:
        """All members, the one that is worth least first; sorts them."""
        worth = {
            member: entry.value * self._rates.rate(entry.kind, now - entry.since)
            for member, entry in self._entries.items()
        }
        order = sorted(self._entries.values(), key=lambda e: (worth[e.member], e[1]))
        return iter([entry.member for entry in order])

    # ---------------------------------------------------------------- internal

    def _regroup(
        self,
        old: _Entry[T] | None,
        kind: Hashable,
        since: int,
        now: int,
        observed: bool,
    ) -> int | None:
        """The group in which a member is counted, after it left another one."""
        if old is not None and old.group is not None:
            if observed and old.since == since and old.kind == kind:
                return old.group
            self._rates.leave(old.kind, old.group, now)
        return self._rates.enter(kind, since, now) if observed else None

    def _counts(self, entry: _Entry[T]) -> bool:
        return self._entries.get(entry.member) is entry

    def _find_least(self, kind: Hashable, series: _Series[T], now: int) -> None:
        counts = self._counts
        series.least, series.worth, until = None, math.inf, now + (1 << 30)
        emptied = False
        for heap in series.heaps:
            entries = heap.entries
            while entries and not counts(entries[0]):
                heapq.heappop(entries)
                self._size -= 1
            if not entries:
                emptied = True
                continue
            age = now - heap.last
            if now >= heap.until:
                heap.until = heap.last + next_step(age)
                heap.rate = self._rates.rate(kind, age)
            until = min(until, heap.until)
            worth = entries[0].value * heap.rate
            if worth < series.worth:
                series.least, series.worth = entries[0], worth
        series.until = max(until, now + 1)
        if emptied:
            series.heaps = [heap for heap in series.heaps if heap.entries]

    def _merge(self, series: _Series[T], now: int) -> None:
        """Make one heap of neighbours of about the same age."""
        heaps: list[_Heap[T]] = []
        for heap in series.heaps:
            if heaps and are_of_one_age(heaps[-1].first, heap.last, now):
                heaps[-1].last = heap.last
                heaps[-1].entries = _merged(heaps[-1].entries, heap.entries)
            else:
                heaps.append(heap)
        series.heaps = heaps
        series.most = 2 * len(heaps) + _FEW

    def _clean(self) -> None:
        """Remove entries that do not count any more."""
        for kind, series in list(self._series.items()):
            for heap in series.heaps:
                heap.entries = [e for e in heap.entries if self._counts(e)]
                heapq.heapify(heap.entries)
            series.heaps = [heap for heap in series.heaps if heap.entries]
            if not series.heaps:
                del self._series[kind]
        self._size = len(self._entries)


def _merged(one: list[_Entry[T]], other: list[_Entry[T]]) -> list[_Entry[T]]:
    """A heap of the entries of two; takes time linear in the smaller one."""
    small, large = sorted((one, other), key=len)
    for entry in small:
        heapq.heappush(large, entry)
    return large
