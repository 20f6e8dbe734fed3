# SPDX-License-Identifier: Apache-2.0
"""CacheMemory: where pools and tree meet: what a sequence gets, and what is evicted.

The broker decides how ids are found; here is what an eviction frees, which
cached ids an admission still needs, and the last resort of an admission.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from hybrid_plugin.core.commands import Command, Pool, PoolId
from hybrid_plugin.core.memory.attention_windows import live_pages
from hybrid_plugin.core.memory.broker import MemoryBroker
from hybrid_plugin.core.memory.page_pairs import PagePairs
from hybrid_plugin.core.memory.pools import PagePool, SlotPool
from hybrid_plugin.core.memory.scratch import ScratchRows
from hybrid_plugin.core.memory.window_tables import WindowGroup
from hybrid_plugin.core.promises import Promises
from hybrid_plugin.core.stats import CacheStats
from hybrid_plugin.core.tree.node import Node, admissions_between
from hybrid_plugin.core.tree.radix import Evicted, MambaRadixCache, Match
from hybrid_plugin.core.tree.snapshot import Snapshot
from hybrid_plugin.core.tree.tokens import Pages, as_pages

_SLOTS_AVERAGED = 8
"""Slots' worth of evicted bytes over which the cost of evictions is averaged."""


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


class CacheMemory:
    """The pools of one cache, the tree that caches in them, and their broker."""

    def __init__(
        self,
        pages: PagePool,
        slots: SlotPool,
        windows: Sequence[WindowGroup],
        *,
        broker: MemoryBroker,
        tree: MambaRadixCache,
        promises: Promises,
        stats: CacheStats,
        enqueue: Callable[[Command], None],
        promised_pages: Callable[[PoolId], int],
        scratch: ScratchRows | None = None,
    ) -> None:
        """Put the pools together; `reclaim.register_pools` tells the broker of them.

        Args:
            pages: of the layers with full attention.
            slots: of the state layers.
            windows: groups of layers that look back only so far.
            broker: finds free ids.
            tree: what is cached.
            promises: what was said of its use.
            stats: where evictions are counted.
            enqueue: takes the commands that move cached ids.
            promised_pages: pages of a pool that live sequences have reserved.
            scratch: rows in which drafts are verified, where they share the memory.
        """
        self.pages = pages
        self.slots = slots
        self.windows = tuple(windows)
        self.broker = broker
        self.tree = tree
        self.promises = promises
        self.stats = stats
        self.enqueue = enqueue
        self.promised_pages = promised_pages
        self.scratch = scratch
        self._lost = self._freed = 0.0
        self.lifetime = 1.0
        """Admissions since what was evicted of late had been used."""
        self.page_pools: dict[PoolId, PagePool] = {Pool.KV: pages}
        for index, group in enumerate(self.windows):
            self.page_pools[Pool.window(index)] = group.pages
        self.pairs = tuple(PagePairs(pages.capacity, g.pages) for g in self.windows)
        """Of KV pages and those of each window group."""

    def wanted(
        self,
        pages: int,
        window_pages: Sequence[int],
        slots: int,
        sequences: int = 0,
    ) -> dict[PoolId, int]:
        """A request to the broker.

        Args:
            pages: of full attention.
            window_pages: of each window group.
            slots: for states, which a model without states does not need.
            sequences: that are live then, and must fit into the scratch.
        """
        wanted = dict(zip(self.page_pools, (pages, *window_pages), strict=True))
        if self.slots.needed:
            wanted[Pool.STATE] = slots
        if self.scratch is not None:
            wanted[Pool.SCRATCH] = self.scratch.missing(sequences)
        return wanted

    def with_pages(self, wanted: Mapping[PoolId, int], more: int) -> dict[PoolId, int]:
        """A request for so many more pages of each kind."""
        pages = self.page_pools
        return {pool: n + more * (pool in pages) for pool, n in wanted.items()}

    # ------------------------------------------------------------------ sharing

    def share(self, match: Match) -> None:
        """Add a sequence's references to the whole pages of its hit."""
        self.pages.share(match.pages)
        for group, pages in zip(self.windows, self.hit_windows(match), strict=True):
            group.pages.share(pages)

    def unshare(self, match: Match) -> None:
        """Undo `share`."""
        self.pages.release(match.pages)
        for group, pages in zip(self.windows, self.hit_windows(match), strict=True):
            group.pages.release(pages)

    def hit_windows(self, match: Match) -> list[Pages]:
        """Per window group, the whole pages before the hit that it needs."""
        if match.node is None or match.node.snapshot is None:
            return [array("i") for _ in self.windows]
        whole = match.length // self.tree.page_size
        return [
            pages[: whole - self.live(group, match.length).start]
            for group, pages in zip(
                self.windows, match.node.snapshot.windows, strict=True
            )
        ]

    def live(self, group: WindowGroup, position: int) -> range:
        """Indices of the pages that a sequence holds in a window group."""
        return live_pages(group.window, position, self.tree.page_size)

    def settle_windows(
        self,
        node: Node,
        pages: Sequence[int] | None,
        windows: Sequence[Sequence[int]],
    ) -> tuple[Pages, ...]:
        """Window pages for a snapshot of `node`, which the tree then refers to.

        They are those given, where the path's KV pages are those given.

        Args:
            node: whose path has KV for the same tokens.
            pages: KV pages of all these tokens, each paired with those window pages;
                None for window pages that are paired with none.
            windows: by group, the pages of what its window covers at the node's end.
        """
        found = []
        for index, (group, own) in enumerate(zip(self.windows, windows, strict=True)):
            live, held = self.live(group, node.end), as_pages(own)
            path = node.last_pages(len(live))
            if pages is None or path != pages[live.start : live.stop]:
                held = self.pairs[index].settle(path, held)
            found.append(held)
            group.pages.adopt(held)
        return tuple(found)

    # ---------------------------------------------------------------- admission

    def has_room(
        self,
        match: Match,
        wanted: Mapping[PoolId, int],
        kept: Iterable[int] = (),
        returned: Mapping[PoolId, Sequence[int]] | None = None,
    ) -> bool:
        """Whether a sequence whose hit is shared already can get the rest.

        Everything cached can make room but what it shares, and at the last even
        the snapshot that it was matched with: see `obtain`.

        Args:
            match: the sequence's hit.
            wanted: ids by pool.
            kept: slots of snapshots that must stay.
            returned: live ids that count as if they were free, by pool.
        """
        kept = set(kept)
        pinned = self._pinned(match, kept)
        if self.broker.fits(wanted, pinned, returned):
            return True
        snapshot = _snapshot_of(match)
        if snapshot is None or snapshot.slot in kept:
            return False
        return self.broker.fits(self._without_own(match, wanted), pinned, returned)

    def obtain(
        self,
        match: Match,
        now: Mapping[PoolId, int],
        ahead: Mapping[PoolId, int] | None = None,
        left: int = 0,
    ) -> Allocation:
        """A slot and pages, at the price of cached ones; there must be room.

        The last resort is the matched snapshot itself: its slot and tail pages
        become the sequence's own, without a copy.

        Args:
            match: the sequence's hit, shared and locked.
            now: ids by pool that the sequence gets.
            ahead: more, to be found in the same call where memory moves, if possible.
            left: pages of each kind that must be left, found in the same call.
        """
        count = now[Pool.KV]
        least = self.with_pages(now, left)
        if (
            ahead is not None
            and self.broker.moves_memory
            and self._provide(match, self.with_pages(ahead, left))
        ) or self._provide(match, least):
            fresh = self.pages.allocate(count)
            self._hold_scratch(now)
            return Allocation(
                slot=self.slots.allocate_running(),
                fresh=fresh,
                windows=self.allocate_windows(fresh),
                taken_over=False,
            )
        snapshot = _snapshot_of(match)
        assert snapshot is not None, "there is room without a hit, or none at all"
        provided = self._provide(match, self._without_own(match, least))
        assert provided, "there is room at the price of the matched snapshot"
        self._hold_scratch(now)
        self.slots.take_over(snapshot.slot)
        own = self._take_over_tails(match)
        fresh = self.pages.allocate(count - len(own[Pool.KV]))
        windows = enumerate(self.allocate_windows(fresh))
        return Allocation(
            slot=snapshot.slot,
            fresh=own[Pool.KV] + fresh,
            windows=tuple([own[Pool.window(i)] + pages for i, pages in windows]),
            taken_over=True,
        )

    def _hold_scratch(self, wanted: Mapping[PoolId, int]) -> None:
        if self.scratch is not None:
            self.scratch.hold(wanted[Pool.SCRATCH])

    def allocate_windows(self, pages: Pages) -> tuple[Pages, ...]:
        """Window pages of each group, for KV pages that were just allocated."""
        found = []
        for group, pairs in zip(self.windows, self.pairs, strict=True):
            found.append(group.pages.allocate(len(pages)))
            pairs.begin(pages, found[-1])
        return tuple(found)

    def free_snapshot_slot(self, node: Node, planned: Snapshot) -> bool:
        """Free a slot, at the price of what is worth less than a snapshot of `node`.

        Args:
            node: that is to get a snapshot.
            planned: that snapshot, without its slot.
        """
        if not self.slots.needed or self.slots.free:
            return True
        tree = self.tree
        planned.used_at = tree.clock
        worth = tree.eviction.worth(tree.eviction.snapshot(node, planned), tree.clock)
        tree.lock(node)  # its pages must not make room for its snapshot
        found = self.broker.offer({Pool.STATE: 1}, worth)
        tree.unlock(node)
        return found

    def price(self, wanted: Mapping[PoolId, int], taken: Mapping[PoolId, int]) -> float:
        """What an admission is expected to cost later ones, in tokens by admission.

        That is all the memory that the sequence takes, times what memory is worth to
        what is cached; nothing, if nothing has to be evicted.  Memory that happens to
        be free counts as well: another sequence has just left it, and what is cached
        would get it next.

        Args:
            wanted: ids by pool that must be free.
            taken: those of them that the sequence takes.
        """
        if not self.broker.must_evict(wanted):
            return 0.0
        pages, slots = taken[Pool.KV], taken.get(Pool.STATE, 0)
        held = self.tree.eviction.held_bytes(pages, slots, self.tree.page_size)
        return held * self._worth_per_byte()

    def _worth_per_byte(self) -> float:
        """Tokens by admission that a byte of what is cached is expected to save.

        As many as evictions of late are expected to cost, or as the snapshot saves that
        goes next, whichever is more.  The first alone is too little where evictions got
        by with KV that is worth nothing, the second where few snapshots are.
        """
        return max(self.lost_per_byte, self.tree.snapshot_worth() or 0.0)

    def _provide(self, match: Match, wanted: Mapping[PoolId, int]) -> bool:
        snapshot = _snapshot_of(match)
        pinned: dict[PoolId, list[int]] = {}
        if snapshot is not None and self.slots.needed:
            pinned[Pool.STATE] = [snapshot.slot]
        tails = self._tails(match)
        for pool, page in tails.items():  # copied later, from where they are now
            self.page_pools[pool].share((page,))
        try:
            return self.broker.provide(wanted, pinned)
        finally:
            for pool, page in tails.items():
                self.page_pools[pool].release((page,))

    def _tails(self, match: Match) -> dict[PoolId, int]:
        """By pool, the page in which the hit ends, if it ends inside one."""
        if match.tail_page is None:
            return {}
        tails: dict[PoolId, int] = {Pool.KV: match.tail_page}
        snapshot = _snapshot_of(match)
        if snapshot is not None:
            for index, own in enumerate(snapshot.windows):
                tails[Pool.window(index)] = own[-1]
        return tails

    def _take_over_tails(self, match: Match) -> dict[PoolId, Pages]:
        """Share the hit's tail pages with the sequence; by pool, empty without one."""
        tails = self._tails(match)
        for pool, page in tails.items():
            self.page_pools[pool].share((page,))
        return {
            pool: array("i", (tails[pool],) if pool in tails else ())
            for pool in self.page_pools
        }

    def _pinned(self, match: Match, kept: set[int]) -> dict[PoolId, list[int]]:
        """Cached ids that the admission of a match needs, and kept slots besides."""
        pinned = {
            pool: [page]
            for pool, page in self._tails(match).items()
            if not self.page_pools[pool].references(page)[0]
        }
        snapshot = _snapshot_of(match)
        own = () if snapshot is None or not self.slots.needed else (snapshot.slot,)
        if own or kept:
            pinned[Pool.STATE] = list({*own, *kept})
        return pinned

    def _without_own(
        self, match: Match, wanted: Mapping[PoolId, int]
    ) -> dict[PoolId, int]:
        """What is wanted beside the matched snapshot's own slot and tail pages."""
        rest = {**wanted}
        for pool in self._tails(match):
            rest[pool] -= 1
        if self.slots.needed:
            rest[Pool.STATE] -= 1
        return rest

    # ----------------------------------------------------------------- eviction

    def evict_pages(self, count: int) -> bool:
        """Free up to `count` pages, those worth least; False if there are none."""
        leaf = self.tree.next_leaf()
        if leaf is None:
            return False
        lost, since = self._expected_loss(leaf)
        evicted = self.tree.evict_kv(count)
        assert evicted is not None, "there is a leaf"
        self.promises.evicted(leaf, evicted.snapshot)
        self._note_loss(lost, since, evicted)
        self.take_back(evicted)
        return True

    def evict_snapshot(self) -> bool:
        """Free the slot of the snapshot that is worth least, if there is one."""
        node = self.tree.next_snapshot()
        if node is None:
            return False
        lost, since = self._expected_loss(node)
        evicted = self.tree.evict_snapshot()
        assert evicted is not None, "there is a snapshot"
        self.promises.evicted(node, evicted.snapshot)
        self._note_loss(lost, since, evicted)
        self.take_back(evicted)
        return True

    def _expected_loss(self, node: Node) -> tuple[float, int]:
        """What evicting a node costs by admission, and when it was used last."""
        snapshot, now = node.snapshot, self.tree.clock
        if snapshot is None:
            return 0.0, node.used_at
        lost = self.tree.eviction.expected_tokens(node, snapshot, now)
        return lost, snapshot.used_at

    def _note_loss(self, lost: float, since: int, evicted: Evicted) -> None:
        """Update what is known of evictions, of the last slots' worth of bytes.

        A snapshot's whole value is lost with it, and its KV is freed after that.
        """
        size, policy = self.tree.page_size, self.tree.eviction
        snapshots = evicted.snapshot is not None
        freed = policy.held_bytes(len(evicted.pages), snapshots, size)
        whole = _SLOTS_AVERAGED * policy.held_bytes(0, 1, size)
        share = min(freed / whole, 1.0) if whole else 0.0
        self._lost = self._lost * (1 - share) + lost
        self._freed = self._freed * (1 - share) + freed
        age = admissions_between(since, self.tree.clock)
        self.lifetime += (age - self.lifetime) * share

    @property
    def lost_per_byte(self) -> float:
        """Tokens by admission and byte that evictions of late are expected to cost."""
        return self._lost / self._freed if self._freed else 0.0

    def note_use(self, node: Node, *, resumed: bool) -> None:
        """Note that a sequence resumed from the snapshot of `node`, or builds on it.

        Args:
            node: with a snapshot.
            resumed: as for `Promises.used`.

        Raises:
            ValueError: for a node without a snapshot.
        """
        self.tree.use_snapshot(node)
        self.promises.used(node, resumed=resumed)

    def take_back(self, evicted: Evicted) -> None:
        """Free the ids that left the tree, and count them."""
        self.pages.drop(evicted.pages)
        self.stats.pages_evicted += len(evicted.pages)
        if evicted.snapshot is not None:
            self.slots.free_snapshot(evicted.snapshot.slot)
            self.drop_windows(evicted.snapshot)
            self.stats.snapshots_evicted += 1

    def drop_windows(self, snapshot: Snapshot | None) -> None:
        """Drop the tree's references to the window pages of a snapshot."""
        if snapshot is not None:
            for group, pages in zip(self.windows, snapshot.windows, strict=True):
                group.pages.drop(pages)


def _snapshot_of(match: Match) -> Snapshot | None:
    return None if match.node is None else match.node.snapshot
