# SPDX-License-Identifier: Apache-2.0
"""Who owns which page and which slot: ids and counts, no memory.

Id 0 of each pool is reserved and never handed out: engines pad their tables
with it, so its memory must always be there and must never be anybody's.
"""

from __future__ import annotations

from collections.abc import Sequence

from hybrid_plugin.core.memory.id_space import RESERVED_ID, IdSpace
from hybrid_plugin.core.memory.reference_counts import SEQUENCE, TREE, References
from hybrid_plugin.core.tree.tokens import Pages

__all__ = ["RESERVED_ID", "NoSlots", "PagePool", "SlotPool"]


class PagePool:
    """Ids of KV pages, with references of live sequences and of the tree.

    A page is free when nobody refers to it.  Several sequences may read one
    page, and the tree may hold one more than once (the pages before two
    positions that lie close together in a sliding window).  The lowest free id
    is handed out first, which keeps the upper end of the pool empty as long as
    possible.

    Every call is linear in the pages it names, with a small constant: long
    lists go through numpy, short ones through a loop.
    """

    def __init__(self, capacity: int, per_granule: int | None = None) -> None:
        """Manage ids 1 to `capacity - 1`.

        Args:
            capacity: pages, the reserved one included.
            per_granule: pages whose memory comes and goes together; by default
                all memory is there for ever.  See `IdSpace`.

        Raises:
            ValueError: if there is no page besides the reserved one.
        """
        if capacity < 2:
            raise ValueError(f"a page pool needs at least 2 pages, got {capacity}")
        self.ids = IdSpace(capacity, per_granule)
        self.capacity = capacity
        self._references = References(capacity)

    @property
    def usable(self) -> int:
        """Pages that can be handed out at all, with the memory there is now."""
        return self.ids.mapped * self.ids.per_granule - 1

    @property
    def free(self) -> int:
        """Pages that nobody refers to."""
        return self.ids.free

    @property
    def reclaimable(self) -> int:
        """Pages that only the tree refers to: free once the tree lets go."""
        return self.ids.cached

    @property
    def in_use(self) -> int:
        """Pages that at least one live sequence refers to."""
        return self.ids.live

    def free_ids(self) -> list[int]:
        """Every page that nobody refers to, ascending."""
        return self.ids.free_ids()

    def allocate(self, count: int) -> Pages:
        """Hand out `count` pages, each with one sequence reference.

        Raises:
            ValueError: if fewer are free; callers check `free` first.
        """
        if count > self.ids.free:
            raise ValueError(f"{count} pages asked for, {self.ids.free} free")
        pages = self.ids.allocate(count)
        self._references.begin(pages)
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """Add a sequence reference to pages that are not free."""
        self.ids.to_live(self._references.gain(pages, SEQUENCE))

    def release(self, pages: Sequence[int]) -> None:
        """Drop a sequence reference from each page."""
        freed, rested = self._references.lose(pages, SEQUENCE)
        self.ids.free_live(freed)
        self.ids.to_cached(rested)

    def adopt(self, pages: Sequence[int]) -> None:
        """Add a tree reference to pages that are not free."""
        self._references.gain(pages, TREE)

    def drop(self, pages: Sequence[int]) -> None:
        """Drop a tree reference from each page."""
        freed, _ = self._references.lose(pages, TREE)
        self.ids.free_cached(freed)

    def move(self, granule: int) -> dict[int, int]:
        """Give every cached page of a granule without live ones another id.

        Returns:
            New id by old id; the old ones are free.

        Raises:
            ValueError: if there are not so many free pages in other granules.
        """
        first = granule * self.ids.per_granule
        pages = range(first, first + self.ids.per_granule)
        old = [page for page in pages if self.references(page)[1]]
        new = self.ids.allocate_outside(granule, len(old))
        for source, target in zip(old, new, strict=True):
            self._references.move(source, target)
        self.ids.free_cached(old)
        return dict(zip(old, new, strict=True))

    def references(self, page: int) -> tuple[int, int]:
        """Return (references of sequences, references of the tree)."""
        return self._references.of(page)


class SlotPool:
    """Ids of state slots: free, running, draft or snapshot.

    A live sequence owns one running slot, and draft slots while it verifies drafts.
    """

    needed = True
    """Whether a sequence needs a slot at all."""

    def __init__(self, capacity: int, per_granule: int | None = None) -> None:
        """Manage ids 1 to `capacity - 1`.

        Args:
            capacity: slots, the reserved one included.
            per_granule: slots whose memory comes and goes together; by default
                all memory is there for ever.  See `IdSpace`.

        Raises:
            ValueError: if there is no slot besides the reserved one.
        """
        if capacity < 2:
            raise ValueError(f"a slot pool needs at least 2 slots, got {capacity}")
        self.ids = IdSpace(capacity, per_granule)
        self.capacity = capacity
        self._running: set[int] = set()
        self._drafts: set[int] = set()
        self._snapshots: set[int] = set()

    @property
    def usable(self) -> int:
        """Slots that can be handed out at all, with the memory there is now."""
        return self.ids.mapped * self.ids.per_granule - 1

    @property
    def free(self) -> int:
        """Slots that nobody owns."""
        return self.ids.free

    @property
    def running(self) -> int:
        """Slots of live sequences, one for each."""
        return len(self._running)

    @property
    def drafts(self) -> int:
        """Slots lent to live sequences for their drafts."""
        return len(self._drafts)

    def draft_ids(self) -> list[int]:
        """Every slot lent for drafts, ascending."""
        return sorted(self._drafts)

    @property
    def snapshots(self) -> int:
        """Slots that the tree owns."""
        return len(self._snapshots)

    def free_ids(self) -> list[int]:
        """Every slot that nobody owns, ascending."""
        return self.ids.free_ids()

    def allocate_running(self) -> int:
        """Hand the lowest free slot to a sequence."""
        slot = self._pop()
        self._running.add(slot)
        return slot

    def allocate_snapshot(self) -> int:
        """Hand the lowest free slot to the tree."""
        slot = self._pop()
        self.ids.to_cached([slot])
        self._snapshots.add(slot)
        return slot

    def allocate_draft(self) -> int:
        """Lend the lowest free slot to a sequence for a draft."""
        slot = self._pop()
        self._drafts.add(slot)
        return slot

    def promote(self, slot: int) -> None:
        """Turn a draft slot into a snapshot."""
        self._drafts.remove(slot)
        self.ids.to_cached([slot])
        self._snapshots.add(slot)

    def free_drafts(self, slots: Sequence[int]) -> None:
        """Give back draft slots."""
        for slot in slots:
            self._drafts.remove(slot)
        self.ids.free_live(slots)

    def donate(self, slot: int) -> None:
        """Turn a sequence's slot into a snapshot."""
        self._running.remove(slot)
        self.ids.to_cached([slot])
        self._snapshots.add(slot)

    def take_over(self, slot: int) -> None:
        """Turn a snapshot into a sequence's slot."""
        self._snapshots.remove(slot)
        self.ids.to_live([slot])
        self._running.add(slot)

    def free_running(self, slot: int) -> None:
        """Give back a sequence's slot."""
        self._running.remove(slot)
        self.ids.free_live([slot])

    def free_snapshot(self, slot: int) -> None:
        """Give back a snapshot's slot."""
        self._snapshots.remove(slot)
        self.ids.free_cached([slot])

    def move(self, granule: int) -> dict[int, int]:
        """Give every snapshot in a granule without live slots another id.

        Returns:
            New id by old id; the old ones are free.

        Raises:
            ValueError: if there are not so many free slots in other granules.
        """
        first = granule * self.ids.per_granule
        slots = range(first, first + self.ids.per_granule)
        old = [slot for slot in slots if slot in self._snapshots]
        new = self.ids.allocate_outside(granule, len(old))
        self._snapshots.difference_update(old)
        self._snapshots.update(new)
        self.ids.free_cached(old)
        return dict(zip(old, new, strict=True))

    def _pop(self) -> int:
        if not self.ids.free:
            raise ValueError("no state slot is free; callers check `free` first")
        return self.ids.allocate(1)[0]


class NoSlots(SlotPool):
    """Stands for the slots of a model without state layers: none, and none needed.

    Every sequence and every snapshot gets the reserved slot, which is nobody's.
    """

    needed = False

    def __init__(self) -> None:
        super().__init__(2)
        self.ids.allocate(1)

    @property
    def usable(self) -> int:
        """None."""
        return 0

    def allocate_running(self) -> int:
        """The reserved slot."""
        return RESERVED_ID

    def allocate_snapshot(self) -> int:
        """The reserved slot."""
        return RESERVED_ID

    def donate(self, slot: int) -> None:
        """Nothing changes hands."""

    def take_over(self, slot: int) -> None:
        """Nothing changes hands."""

    def free_running(self, slot: int) -> None:
        """Nothing is freed."""

    def free_snapshot(self, slot: int) -> None:
        """Nothing is freed."""
