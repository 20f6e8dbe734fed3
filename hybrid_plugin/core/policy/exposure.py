# SPDX-License-Identifier: Apache-2.0
"""Exposure: how long the content of one class has been there to be used, by age.

Content that entered at about the same time is counted as one group, so that nothing
has to be done for each piece of it as time goes by.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from operator import attrgetter

INTERVALS = 24
"""Ages up to 2**23 admissions are told apart."""
_FEW = 8
"""Groups that are not worth a search for some to merge."""


def interval_of(age: int) -> int:
    """Index of the interval of ages that contains `age`: 0, 1, 2 to 3, 4 to 7, ..."""
    return min(age.bit_length(), INTERVALS - 1)


def interval_start(index: int) -> int:
    """The lowest age of an interval."""
    return 0 if index == 0 else 1 << (index - 1)


def next_step(age: int) -> int:
    """The next higher age of four significant bits: an eighth higher at most.

    From 0 they are 1, 2, 3 to 16, then 18, 20 to 32, then 36, 40 and so on.
    """
    shift = max(age.bit_length() - 4, 0)
    return ((age >> shift) + 1) << shift


def are_of_one_age(oldest: int, newest: int, now: int) -> bool:
    """Whether content that entered at two times may be treated as of one age.

    Their ages differ by an eighth at most, and will do so ever after.
    """
    return 8 * (now - oldest) <= 9 * (now - newest)


@dataclass(slots=True)
class _Group:
    """Pieces of content that entered at about the same time."""

    start: int
    """When the newest of them did."""
    first: int
    """When the oldest did."""
    count: int
    """Pieces that are there."""
    collected: int
    """Until when the time that they were there is counted."""


_start_of = attrgetter("start")


class Exposure:
    """Groups of content by the admission at which they entered.

    `enter` and `leave` take time logarithmic in the age of the oldest content,
    amortised; `collect` takes time linear in the number of groups, which is that
    logarithm.
    """

    __slots__ = ("_groups", "_most", "held")

    def __init__(self) -> None:
        """Nothing is there."""
        self.held = [0.0] * INTERVALS
        """Admissions that content was there, by interval of its age."""
        self._groups: list[_Group] = []
        """In the order of `start`."""
        self._most = 2 * _FEW

    def __len__(self) -> int:
        """Pieces of content that are there."""
        return sum(group.count for group in self._groups)

    def enter(self, since: int, now: int) -> int:
        """Count a piece of content from now on.

        Args:
            since: admission from which its age counts.
            now: the current admission.

        Returns:
            What identifies its group, for `leave`.
        """
        groups = self._groups
        if not groups or since > groups[-1].start:
            groups.append(_Group(since, since, 1, now))
            if len(groups) > self._most:
                self._merge(now)
            return since
        index = bisect_left(groups, since, key=_start_of)
        group = groups[index]
        if since < group.first and not are_of_one_age(since, group.start, now):
            groups.insert(index, _Group(since, since, 1, now))
            return since
        self._count(group, group.count, now)
        group.first = min(group.first, since)
        group.collected = now
        group.count += 1
        return group.start

    def leave(self, start: int, now: int) -> None:
        """Stop counting a piece of content; `start` is what `enter` returned."""
        group = self._groups[bisect_left(self._groups, start, key=_start_of)]
        self._count(group, 1, now)
        group.count -= 1

    def collect(self, now: int) -> None:
        """Add to `held` the intervals of ages that content has outlived.

        The one in which it is now does not count yet: content that is used late in it
        would look useless before.
        """
        for group in self._groups:
            outlived = group.start + interval_start(interval_of(now - group.start))
            self._count(group, group.count, outlived)
            group.collected = max(group.collected, outlived)

    # ---------------------------------------------------------------- internal

    def _count(self, group: _Group, pieces: int, until: int) -> None:
        """Add the time that some pieces of a group were there, and not counted yet."""
        age, end = group.collected - group.start, until - group.start
        while pieces and age < end:
            interval = interval_of(age)
            last = interval == INTERVALS - 1
            border = end if last else min(end, interval_start(interval + 1))
            self.held[interval] += pieces * (border - age)
            age = border

    def _merge(self, now: int) -> None:
        """Drop empty groups, and make one of neighbours of about the same age."""
        merged: list[_Group] = []
        for group in self._groups:
            if not group.count:
                continue
            before = merged[-1] if merged else None
            if before is None or not are_of_one_age(before.first, group.start, now):
                merged.append(group)
                continue
            for one in (before, group):
                self._count(one, one.count, now)
            before.count += group.count
            before.start, before.collected = group.start, now
        self._groups = merged
        self._most = 2 * len(merged) + _FEW
