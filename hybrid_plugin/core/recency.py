# SPDX-License-Identifier: Apache-2.0
"""An ordered set, oldest first, that can also insert next to a member."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class RecencyList(Generic[T]):
    """Members from least to most recently used; every operation is O(1).

    `collections.OrderedDict` cannot place a new member beside an old one,
    which splitting a radix node needs: the new parent must be exactly one
    step more recent than its child.
    """

    def __init__(self) -> None:
        self._next: dict[T | None, T | None] = {None: None}
        self._previous: dict[T | None, T | None] = {None: None}

    def __len__(self) -> int:
        return len(self._next) - 1

    def __contains__(self, member: T) -> bool:
        return member in self._next

    def __iter__(self) -> Iterator[T]:
        """Oldest first.  The member last yielded may be removed meanwhile."""
        member = self._next[None]
        while member is not None:
            following = self._next[member]
            yield member
            member = following

    def append(self, member: T) -> None:
        """Add `member` as the most recent one; it must be absent."""
        self._link(self._previous[None], member, None)

    def prepend(self, member: T) -> None:
        """Add `member` as the least recent one; it must be absent."""
        self._link(None, member, self._next[None])

    def insert_after(self, member: T, older: T) -> None:
        """Add `member` as the next more recent one after `older`."""
        self._link(older, member, self._next[older])

    def remove(self, member: T) -> None:
        """Take `member` out; it must be present."""
        previous = self._previous.pop(member)
        following = self._next.pop(member)
        self._next[previous] = following
        self._previous[following] = previous

    def discard(self, member: T) -> None:
        """Take `member` out if it is present."""
        if member in self._next:
            self.remove(member)

    def touch(self, member: T) -> None:
        """Make `member`, which must be present, the most recent one."""
        self.remove(member)
        self.append(member)

    def _link(self, previous: T | None, member: T, following: T | None) -> None:
        if member in self._next:
            raise ValueError(f"{member!r} is in the list already")
        self._next[previous] = member
        self._previous[member] = previous
        self._next[member] = following
        self._previous[following] = member
