# SPDX-License-Identifier: Apache-2.0
"""The half of the cache that deals with memory: what there is, and who makes way."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from hybrid_plugin.core.commands import Pool
from hybrid_plugin.core.memory.attention_windows import live_pages
from hybrid_plugin.core.memory.elastic import ElasticBroker
from hybrid_plugin.core.memory.pools import PagePool, SlotPool
from hybrid_plugin.core.memory.window_tables import WindowGroup
from hybrid_plugin.core.policy.slot_tradeoff import SlotTradeoff
from hybrid_plugin.core.sequence import LiveSequence
from hybrid_plugin.core.stats import CacheStats
from hybrid_plugin.core.tree.node import Node, Snapshot
from hybrid_plugin.core.tree.radix import Evicted, MambaRadixCache, Match
from hybrid_plugin.core.tree.tokens import Pages

_RUNNING_PER_SNAPSHOT = 3
"""Sequences that run for each snapshot for which another one waits."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """What an admission got hold of."""

    slot: int
    fresh: Pages
    windows: tuple[Pages, ...]
    """Fresh pages per window group."""
    taken_over: bool
    """Whether the slot, and the first fresh pages where the hit ends inside a
    page, were the matched snapshot's own."""


class MemoryBroker:
    """Pools, and the tree that gives up what it caches in them.

    A base of `HybridCache`, which brings the attributes.
    """

    pages: PagePool
    slots: SlotPool
    page_size: int
    stats: CacheStats
    windows: tuple[WindowGroup, ...]
    elastic: ElasticBroker | None
    tree: MambaRadixCache
    _sequences: dict[str, LiveSequence]
    _branching: dict[str, int]
    _slot_tradeoff: SlotTradeoff

    @property
    def promised_pages(self) -> int:
        """Pages that live sequences will take for the rest of their prompts."""
        return sum([sequence.promised for sequence in self._sequences.values()])

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def _share(self, match: Match) -> None:
        """Add the sequence's references to the whole pages of its hit."""
        self.pages.share(match.pages)
        for group, pages in zip(self.windows, self._hit_windows(match), strict=True):
            group.pages.share(pages)

    def _unshare(self, match: Match) -> None:
        self.pages.release(match.pages)
        for group, pages in zip(self.windows, self._hit_windows(match), strict=True):
            group.pages.release(pages)

    def _hit_windows(self, match: Match) -> list[Pages]:
        """Per window group, the whole pages before the hit that it needs."""
        if match.node is None or match.node.snapshot is None:
            return [array("i") for _ in self.windows]
        whole = match.length // self.page_size
        return [
            pages[: whole - self._live(group, match.length).start]
            for group, pages in zip(
                self.windows, match.node.snapshot.windows, strict=True
            )
        ]

    def _live(self, group: WindowGroup, position: int) -> range:
        return live_pages(group.window, position, self.page_size)

    def _has_room(self, match: Match, pages: int, window_pages: int) -> bool:
        """Whether a sequence whose hit is shared already can get the rest.

        Everything cached can make room but what it budgets, and even the
        snapshot it was matched with: see `_obtain`.
        """
        if self.elastic is not None:
            return self._could_convert(self.elastic, match, pages)
        return self._could_free(pages, window_pages) and (
            not self.slots.needed
            or self.slots.free > 0
            or any(self.tree.snapshot_counts())
        )

    def _must_wait(self, match: Match, pages: int, branch: int) -> bool:
        """Whether a sequence leaves its slot to snapshots that are worth more.

        Those are hot ones, without which all that come after compute what they save
        anew, and one that a sequence is to take where it branches off.

        Args:
            match: the sequence's hit.
            pages: that it may need besides.
            branch: tokens that the snapshot at its own branch point saves; 0 if
                there is none.
        """
        running = self.slots.running
        most = running // _RUNNING_PER_SNAPSHOT
        room = self.slots.free + self.slots.snapshots
        if not self.slots.needed or not most or room > most + 1:
            return False
        hot = self.tree.hot_snapshots()
        saving = max([branch, *self._branching.values()])
        among = len(hot) + (saving > 0)
        pays = partial(self._slot_tradeoff.pays, among=among, running=running)
        planned = int(saving > 0 and pays(saving))
        kept = [node for node in hot if pays(node.end - node.resume_before())]
        kept = kept[: most - planned]
        if not kept and not planned:
            return False
        if self.elastic is None:
            return room < 1 + planned + len(kept)
        slots = [node.snapshot.slot for node in kept if node.snapshot is not None]
        return not self.elastic.fits(
            {Pool.KV: pages, Pool.STATE: 1 + planned}, self._pinned(match, slots)
        )

    def _pinned(self, match: Match, slots: Iterable[int] = ()) -> dict[Pool, list[int]]:
        """Cached ids that the admission of a match needs, and slots besides."""
        snapshot = match.node.snapshot if match.node is not None else None
        own = () if snapshot is None else (snapshot.slot,)
        tail = _tail_of(match)
        return {
            Pool.KV: [page for page in tail if not self.pages.references(page)[0]],
            Pool.STATE: list({*own, *slots}),
        }

    def _could_free(self, pages: int, window_pages: int) -> bool:
        """Whether so many pages can be had, if all that is cached makes room."""
        if self.elastic is not None:
            return self.elastic.fits({Pool.KV: pages})
        return pages <= self.pages.free + self.pages.reclaimable and all(
            window_pages <= group.pages.free + group.pages.reclaimable
            for group in self.windows
        )

    def _could_convert(self, elastic: ElasticBroker, match: Match, pages: int) -> bool:
        """The same where memory moves between the pools."""
        if match.node is None or match.node.snapshot is None:
            return elastic.fits({Pool.KV: pages, Pool.STATE: 1})
        pinned = self._pinned(match)
        own = {Pool.KV: pages - len(_tail_of(match))}  # the last resort, see `_obtain`
        return elastic.fits({Pool.KV: pages, Pool.STATE: 1}, pinned) or elastic.fits(
            own, pinned
        )

    def _obtain(self, match: Match, count: int, most: int) -> Allocation:
        """A slot, and `count` pages of every group, at the price of cached ones.

        The last resort is the matched snapshot itself: its slot and tail pages
        become the sequence's own, without a copy (see `HybridCache._settle`).
        """
        if self._make_room_ahead(match, count, most):
            return Allocation(
                slot=self.slots.allocate_running(),
                fresh=self.pages.allocate(count),
                windows=tuple([g.pages.allocate(count) for g in self.windows]),
                taken_over=False,
            )
        assert match.node is not None, "there is room without a hit, or none at all"
        snapshot = match.node.snapshot
        assert snapshot is not None, "a locked snapshot is never evicted"
        self._make_room(match, count - len(_tail_of(match)), slots=0)
        self.slots.take_over(snapshot.slot)
        return Allocation(
            slot=snapshot.slot,
            fresh=_take_over(self.pages, match.tail_page, count),
            windows=tuple(
                [
                    _take_over(
                        group.pages, None if match.tail_page is None else own[-1], count
                    )
                    for group, own in zip(self.windows, snapshot.windows, strict=True)
                ]
            ),
            taken_over=True,
        )

    def _make_room_ahead(self, match: Match, count: int, most: int) -> bool:
        """Free a slot and `count` pages, and `most` where memory moves, if possible.

        Then a long prompt waits for the device once, not in each step of its prefill.
        """
        if (
            self.elastic is not None
            and most > count
            and self._make_room(match, most + self.promised_pages, slots=1)
        ):
            return True
        return self._make_room(match, count, slots=1)

    def _make_room(self, match: Match, pages: int, *, slots: int) -> bool:
        """Free pages of every group, and slots; False if it cannot be done."""
        if self.elastic is None:
            return self._free_pages(pages) and (
                self.slots.free >= slots
                or not self.slots.needed
                or self.evict_snapshot()
            )
        snapshot = match.node.snapshot if match.node is not None else None
        pinned = {Pool.STATE: [] if snapshot is None else [snapshot.slot]}
        self.pages.share(_tail_of(match))  # it is copied later, from where it is
        try:
            return self.elastic.provide({Pool.KV: pages, Pool.STATE: slots}, pinned)
        finally:
            self.pages.release(_tail_of(match))

    def _free_pages(self, count: int) -> bool:
        """Free pages of every group; False if it cannot be done."""
        if self.elastic is not None:
            return self.elastic.provide({Pool.KV: count})
        return self._evict_until_free(count) and self._evict_windows(count)

    def _free_snapshot_slot(self, node: Node) -> bool:
        """Free a slot, at the price of what is worth less than a snapshot of `node`."""
        if not self.slots.needed or self.slots.free:
            return True
        if self.elastic is None:
            return self.evict_snapshot()
        self.tree.lock(node)  # its pages must not make room for its snapshot
        found = self.elastic.offer(Pool.STATE)
        self.tree.unlock(node)
        return found

    def _evict_until_free(self, count: int) -> bool:
        """Evict KV until `count` pages are free; False if they never will be."""
        while self.pages.free < count:
            if not self.evict_pages(count - self.pages.free):
                return False
        return True

    def _evict_windows(self, count: int) -> bool:
        """The same for every window group, whose pages go with snapshots."""
        for group in self.windows:
            while group.pages.free < count:
                if not self.evict_snapshot():
                    return False
        return True

    def evict_pages(self, count: int) -> bool:
        """Free up to `count` pages, those worth least; False if there are none."""
        evicted = self.tree.evict_kv(count)
        if evicted is None:
            return False
        self._take_back(evicted)
        return True

    def evict_snapshot(self) -> bool:
        """Free the slot of the snapshot that is worth least, if there is one."""
        evicted = self.tree.evict_snapshot()
        if evicted is None:
            return False
        self._take_back(evicted)
        return True

    def _take_back(self, evicted: Evicted) -> None:
        self.pages.drop(evicted.pages)
        self.stats.pages_evicted += len(evicted.pages)
        if evicted.snapshot is not None:
            self.slots.free_snapshot(evicted.snapshot.slot)
            self._drop_windows(evicted.snapshot)
            self.stats.snapshots_evicted += 1

    def _drop_windows(self, snapshot: Snapshot | None) -> None:
        if snapshot is not None:
            for group, pages in zip(self.windows, snapshot.windows, strict=True):
                group.pages.drop(pages)


def _tail_of(match: Match) -> tuple[int, ...]:
    """The page in which the hit ends, if it ends inside one."""
    return () if match.tail_page is None else (match.tail_page,)


def _take_over(pool: PagePool, tail: int | None, count: int) -> Pages:
    """`count` pages, the first of them the matched tail page if there is one."""
    if tail is None:
        return pool.allocate(count)
    pool.share((tail,))
    return array("i", (tail,)) + pool.allocate(count - 1)
