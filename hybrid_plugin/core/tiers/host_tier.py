# SPDX-License-Identifier: Apache-2.0
"""HostTier: the cache once more, on rows of host memory.

The tier has a tree, pools and a broker of its own, of the same kind as the device's.
So a prefix is there if there is KV for all of its tokens and a state after exactly
them, all of it shares one budget, and what is worth least makes room.  It is inclusive:
what the device evicts simply goes, because the tier has had its copy since the snapshot
was taken.

The tier decides and counts; the copies are commands.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

from hybrid_plugin.core.commands import (
    Command,
    Copy,
    Map,
    PageRows,
    Pool,
    PoolId,
    Store,
    Unmap,
)
from hybrid_plugin.core.memory.attention_windows import AttentionWindow
from hybrid_plugin.core.memory.cache_memory import CacheMemory
from hybrid_plugin.core.memory.elastic import ElasticBroker
from hybrid_plugin.core.memory.reclaim import register_pools
from hybrid_plugin.core.policy.eviction import LeastRecentlyUsed
from hybrid_plugin.core.promises import Promises
from hybrid_plugin.core.stats import CacheStats, HostStats, PoolLevel
from hybrid_plugin.core.tiers.host_plan import HostPlan
from hybrid_plugin.core.tree.node import Node
from hybrid_plugin.core.tree.radix import MambaRadixCache, Match
from hybrid_plugin.core.tree.snapshot import Snapshot
from hybrid_plugin.core.tree.tokens import Pages, Tokens


@dataclass(frozen=True, slots=True)
class HostSource:
    """Rows of the host that are read, in use until they are let go."""

    node: Node
    """Of the tier's tree: where what is read ends."""
    pages: Pages
    """Rows with KV, in the order of the prefix."""
    slot: int
    windows: tuple[Pages, ...]
    """By window group, rows of the pages that are read."""


@dataclass(frozen=True, slots=True)
class HostRows:
    """Rows of the host that a prefix is brought to."""

    pages: Pages
    slot: int
    windows: tuple[Pages, ...]
    """By window group, those of what its window covers at the prefix's end."""


class HostTier:
    """Bundles of KV and state in host memory: each is there as a whole, or not."""

    def __init__(
        self,
        plan: HostPlan,
        page_size: int,
        eviction: LeastRecentlyUsed,
        windows: tuple[AttentionWindow, ...] = (),
    ) -> None:
        """Start empty.

        Args:
            plan: sizes of the rows.
            page_size: tokens in a page, as on the device.
            eviction: what content is worth; an object of its own, which learns from
                what the host keeps.
            windows: of the cache's window groups, in order.
        """
        pools = plan.build(windows)
        self.plan = plan
        self.stats = HostStats()
        self.tree = MambaRadixCache(page_size, eviction=eviction)
        self.promises = Promises(self.tree, CacheStats())
        self.memory = CacheMemory(
            pages=pools.pages,
            slots=pools.slots,
            windows=pools.windows,
            broker=pools.broker,
            tree=self.tree,
            promises=self.promises,
            stats=CacheStats(),
            enqueue=self._order,
            promised_pages=lambda pool: 0,
        )
        self._broker: ElasticBroker = pools.broker
        self._enqueue: Callable[[Command], None] | None = None
        self._stored: Callable[[Node], None] = lambda node: None
        register_pools(self.memory)

    def send_to(self, enqueue: Callable[[Command], None]) -> None:
        """Have commands go to `enqueue`."""
        self._enqueue = enqueue

    def tell(self, stored: Callable[[Node], None]) -> None:
        """Have `stored` called with the node of every bundle that was stored."""
        self._stored = stored

    # ----------------------------------------------------------------- store

    def store(
        self,
        namespace: Hashable,
        tokens: Tokens,
        pages: Pages,
        snapshot: Snapshot,
        *,
        at_any_price: bool = False,
    ) -> bool:
        """Order the copies that put a bundle into the tier: all of it, or nothing.

        What the tier has of it already is not copied again.

        Args:
            namespace: as in the device's tree.
            tokens: all up to the snapshot.
            pages: of the device, with the last tokens' if they are less than a page.
            snapshot: of the device, with the ids of all that is to be copied besides.
            at_any_price: whether it takes the place of what is worth more, too.

        Returns:
            Whether it is there; False if all that it could take the place of is worth
            more, or in use.
        """
        tree = self.tree
        node, parts = self._plant(namespace, tokens)
        if node.snapshot is not None:
            tree.touch_snapshot(node)
            return True
        if not self._fill(node, parts, pages, snapshot, at_any_price):
            self._uproot(parts)
            self.stats.stores_refused += 1
            return False
        self._stored(node)
        return True

    def _plant(
        self, namespace: Hashable, tokens: Tokens
    ) -> tuple[Node, list[tuple[Node, int]]]:
        """Insert nodes that have no rows yet.

        They come before their rows: they are ranked among the others, and locked while
        these make room.

        Returns:
            The node that ends after all tokens, and those that are new, with the number
            of rows that each needs.
        """
        tree, size = self.tree, self.tree.page_size
        whole = len(tokens) // size
        node, fresh = tree.insert(namespace, tokens[: whole * size], _rows(whole))
        parts = [(node, len(fresh))] if fresh else []
        if rest := tokens[whole * size :]:
            node, is_new = tree.insert_tail(node, rest, 0)
            parts += [(node, 1)] if is_new else []
        return node, parts

    def _uproot(self, parts: list[tuple[Node, int]]) -> None:
        for part, _ in reversed(parts):
            self.tree.remove(part)

    def _fill(
        self,
        node: Node,
        parts: list[tuple[Node, int]],
        pages: Pages,
        snapshot: Snapshot,
        at_any_price: bool,
    ) -> bool:
        """Give new nodes rows, and the last one a snapshot, if there is room.

        Args:
            node: that gets the snapshot.
            parts: nodes without rows, and the rows that each needs.
            pages: of the device, for the whole path.
            snapshot: of the device.
            at_any_price: as in `store`.
        """
        memory, held = self.memory, self._windows_held(node)
        planned = Snapshot(
            slot=0,
            kind=snapshot.kind,
            origin=snapshot.origin,
            used_at=snapshot.used_at,
            hits=snapshot.hits,
        )
        for group, rows in zip(memory.windows, held, strict=True):
            group.pages.share([row for row in rows if row])
        self.tree.lock(node)
        count = sum([n for _, n in parts])
        found = self._make_room(node, planned, count, held, at_any_price)
        if found:
            stored: dict[PoolId, tuple[Pages, Pages]] = {}
            stored[Pool.KV] = self._place(parts, pages)
            planned.slot = memory.slots.allocate_snapshot()
            if memory.slots.needed:
                slots = array("i", (snapshot.slot,)), array("i", (planned.slot,))
                stored[Pool.STATE] = slots
            planned.windows = self._place_windows(node, held, snapshot, stored)
            self.tree.attach_snapshot(node, planned)
            self._copy(stored)
        self.tree.unlock(node)
        for group, rows in zip(memory.windows, held, strict=True):
            group.pages.release([row for row in rows if row])
        return found

    def _make_room(
        self,
        node: Node,
        planned: Snapshot,
        pages: int,
        held: list[Pages],
        at_any_price: bool,
    ) -> bool:
        """Free rows, at the price of what is worth less than the bundle, or of any."""
        tree = self.tree
        planned.used_at = tree.clock
        rank = tree.eviction.snapshot(node, planned)
        worth = math.inf if at_any_price else tree.eviction.worth(rank, tree.clock)
        missing = [rows.count(0) for rows in held]
        wanted = self.memory.wanted(pages, missing, slots=1)
        return self._broker.offer(wanted, worth)

    def _windows_held(self, node: Node) -> list[Pages]:
        """By window group, rows that the bundle at `node` finds there; 0 for none."""
        found = []
        for group, pairs in zip(self.memory.windows, self.memory.pairs, strict=True):
            live = self.memory.live(group, node.end)
            found.append(pairs.held(node.last_pages(len(live))))
        return found

    def _place(
        self, parts: list[tuple[Node, int]], pages: Pages
    ) -> tuple[Pages, Pages]:
        """Give new nodes their rows; returns what to copy, and where to."""
        count = sum([n for _, n in parts])
        rows = self.memory.pages.allocate(count)
        done = 0
        for node, number in parts:
            node.pages = rows[done : done + number]
            done += number
        self.memory.pages.adopt(rows)
        self.memory.pages.release(rows)
        for pairs in self.memory.pairs:
            pairs.begin_apart(rows, array("i"))
        return pages[len(pages) - count :], rows

    def _place_windows(
        self,
        node: Node,
        held: list[Pages],
        snapshot: Snapshot,
        stored: dict[PoolId, tuple[Pages, Pages]],
    ) -> tuple[Pages, ...]:
        """Rows of a snapshot's windows; notes in `stored` what to copy there."""
        found = []
        for index, (rows, own) in enumerate(zip(held, snapshot.windows, strict=True)):
            group, pairs = self.memory.windows[index], self.memory.pairs[index]
            lacking = [i for i, row in enumerate(rows) if not row]
            fresh = group.pages.allocate(len(lacking))
            path = node.last_pages(len(rows))
            pairs.begin(array("i", [path[i] for i in lacking]), fresh)
            rows = rows[:]
            for i, row in zip(lacking, fresh, strict=True):
                rows[i] = row
            group.pages.adopt(rows)
            group.pages.release(fresh)
            stored[Pool.window(index)] = array("i", [own[i] for i in lacking]), fresh
            found.append(rows)
        return tuple(found)

    def _copy(self, stored: dict[PoolId, tuple[Pages, Pages]]) -> None:
        for pool, (sources, rows) in stored.items():
            if rows:
                self.send(Store(pool, tuple(sources), tuple(rows)))
        counts = {pool: len(rows) for pool, (_, rows) in stored.items()}
        self.stats.stores += 1
        self.stats.stored_bytes += self.plan.bytes_of(counts)

    # --------------------------------------------------------------- restore

    def match(self, namespace: Hashable, tokens: Tokens, limit: int) -> Match:
        """Find the longest prefix that the tier has; see `MambaRadixCache.match`."""
        return self.tree.match(namespace, tokens, limit)

    def hold(self, match: Match, first: int, lacking: list[list[int]]) -> HostSource:
        """Keep rows as they are while they are loaded.

        Args:
            match: of this tier, with a snapshot.
            first: pages of the prefix that the device has.
            lacking: by window group, indices among the snapshot's pages of those that
                the device lacks.
        """
        node = match.node
        assert node is not None and node.snapshot is not None, "it is a hit"
        pages = match.pages[first:]
        if match.tail_page is not None:
            pages.append(match.tail_page)
        windows = tuple(
            [
                array("i", [own[i] for i in indices])
                for own, indices in zip(node.snapshot.windows, lacking, strict=True)
            ]
        )
        return self._hold(node, pages, windows)

    def hold_all(self, namespace: Hashable, tokens: Tokens) -> HostSource:
        """Keep all rows of a prefix of which the tier has the whole, with its end."""
        match = self.match(namespace, tokens, len(tokens))
        assert match.node is not None and match.length == len(tokens), (
            "it has the whole"
        )
        windows = _snapshot(match.node).windows
        return self.hold(match, 0, [list(range(len(rows))) for rows in windows])

    def hold_bundle(self, node: Node, start: int) -> HostSource:
        """Keep the rows of a bundle as they are while it is written.

        Args:
            node: with the snapshot at the bundle's end.
            start: tokens before it.
        """
        assert node.snapshot is not None, "a bundle has a state"
        count = -(-node.end // self.tree.page_size) - start // self.tree.page_size
        pages = node.last_pages(count)
        return self._hold(node, pages, node.snapshot.windows)

    def _hold(self, node: Node, pages: Pages, windows: tuple[Pages, ...]) -> HostSource:
        memory, snapshot = self.memory, _snapshot(node)
        if not node.state_lock:
            memory.slots.take_over(snapshot.slot)
        self.tree.lock(node)
        self.tree.lock_state(node)
        memory.pages.share(pages)
        for group, rows in zip(memory.windows, windows, strict=True):
            group.pages.share(rows)
        return HostSource(node, pages[:], snapshot.slot, windows)

    def bytes_of(self, source: HostSource) -> int:
        """Bytes of the rows that are read, on one rank."""
        windows = [len(rows) for rows in source.windows]
        wanted = self.memory.wanted(len(source.pages), windows, slots=1)
        return self.plan.bytes_of(wanted)

    def let_go(self, source: HostSource) -> None:
        """Undo a hold: the loads were awaited, or the bundle is written."""
        self._release(source)
        self.tree.unlock_state(source.node)
        if not source.node.state_lock:
            self.memory.slots.donate(source.slot)
        self.tree.unlock(source.node)

    def disown(self, source: HostSource) -> None:
        """Have the tree forget a bundle whose rows must stay until `free`.

        Nobody else holds it.
        """
        self.tree.unlock_state(source.node)
        self.tree.unlock(source.node)
        evicted = self.tree.detach_snapshot(source.node)
        self.memory.pages.drop(evicted.pages)
        self.memory.drop_windows(evicted.snapshot)

    def free(self, source: HostSource) -> None:
        """Give back the rows of what was disowned."""
        self._release(source)
        self.memory.slots.free_running(source.slot)

    def _release(self, source: HostSource) -> None:
        self.memory.pages.release(source.pages)
        for group, rows in zip(self.memory.windows, source.windows, strict=True):
            group.pages.release(rows)

    def window_rows(self, end: int, windows: Sequence[Pages]) -> dict[PoolId, PageRows]:
        """Rows of windows in a bundle, by pool.

        Args:
            end: of the bundle, in tokens.
            windows: by group, rows of what its window covers there.
        """
        memory, size, found = self.memory, self.tree.page_size, {}
        for index, (group, rows) in enumerate(
            zip(memory.windows, windows, strict=True)
        ):
            # Whole pages: others may share them, whose windows reach back further.
            start = memory.live(group, end).start * size
            found[Pool.window(index)] = PageRows(start, tuple(rows))
        return found

    def state_row(self, slot: int) -> int | None:
        """The row of a state in a bundle; None where there are no states."""
        return slot if self.memory.slots.needed else None

    # ----------------------------------------------------------------- fetch

    def obtain(
        self,
        namespace: Hashable,
        tokens: Tokens,
        planned: Snapshot,
        pages: int,
        *,
        at_any_price: bool = False,
    ) -> HostRows | None:
        """Rows for a prefix that comes from elsewhere, owned until `enter` or `drop`.

        Nobody finds them before.

        Args:
            namespace: as in the device's tree.
            tokens: of the prefix.
            planned: what it will be on the host, for its worth.
            pages: rows of KV that it needs.
            at_any_price: whether it takes the place of what is worth more, too.

        Returns:
            None if all that it could take the place of is worth more, or in use.
        """
        memory = self.memory
        live = [memory.live(group, len(tokens)) for group in memory.windows]
        node, parts = self._plant(namespace, tokens)
        self.tree.lock(node)
        missing = [_rows(len(one)) for one in live]
        found = self._make_room(node, planned, pages, missing, at_any_price)
        self.tree.unlock(node)
        self._uproot(parts)
        if not found:
            return None
        own = memory.pages.allocate(pages)
        windows = []
        for group, pairs, one in zip(memory.windows, memory.pairs, live, strict=True):
            windows.append(group.pages.allocate(len(one)))
            pairs.begin_apart(own, windows[-1])
        return HostRows(own, memory.slots.allocate_running(), tuple(windows))

    def enter(
        self,
        namespace: Hashable,
        tokens: Tokens,
        rows: HostRows,
        first: int,
        planned: Snapshot,
    ) -> None:
        """Have a prefix found whose rows hold what they should.

        What the tier has of it already stays as it is.

        Args:
            namespace: as in the device's tree.
            tokens: of the prefix.
            rows: of its pages from the page `first` on.
            first: of these pages; the tier has those before it.
            planned: its snapshot, which gets its row and those of windows here.
        """
        memory, tree = self.memory, self.tree
        node, parts = self._plant(namespace, tokens)
        for part, count in parts:
            end = -(-part.end // tree.page_size) - first
            part.pages = rows.pages[end - count : end]
            memory.pages.adopt(part.pages)
        if node.snapshot is None:
            memory.slots.donate(rows.slot)
            planned.slot = rows.slot
            planned.windows = memory.settle_windows(node, None, rows.windows)
            tree.attach_snapshot(node, planned)
        else:
            tree.touch_snapshot(node)
            memory.slots.free_running(rows.slot)
        self._give_back(rows)

    def drop(self, rows: HostRows) -> None:
        """Give back rows that hold nothing."""
        self.memory.slots.free_running(rows.slot)
        self._give_back(rows)

    def _give_back(self, rows: HostRows) -> None:
        self.memory.pages.release(rows.pages)
        for group, own in zip(self.memory.windows, rows.windows, strict=True):
            group.pages.release(own)

    # ------------------------------------------------------- use and the end

    def used(self, namespace: Hashable, tokens: Tokens, hit: int) -> None:
        """Note an admission, and that it resumed behind `hit` tokens, if at all."""
        self.tree.begin_admission()
        if not hit:
            return
        match = self.tree.match(namespace, tokens, hit)
        if match.length == hit and match.node is not None:
            self.tree.use_snapshot(match.node)

    def clear(self) -> None:
        """Forget everything; nothing may be held."""
        for evicted in self.tree.clear():
            self.memory.take_back(evicted)

    def levels(self) -> dict[PoolId, PoolLevel]:
        """How full each pool of rows is; rows in use are being loaded."""
        memory = self.memory
        found = {
            Pool.host(name): PoolLevel(pool.in_use, pool.reclaimable, pool.free)
            for name, pool in memory.page_pools.items()
        }
        if memory.slots.needed:
            slots = memory.slots
            level = PoolLevel(slots.running, slots.snapshots, slots.free)
            found[Pool.host(Pool.STATE)] = level
        return found

    # --------------------------------------------------------------- internal

    def _order(self, command: Command) -> None:
        """Send what moves rows, by the names of the host pools."""
        assert isinstance(command, Map | Unmap | Copy), "nothing else moves rows"
        self.send(replace(command, pool=Pool.host(command.pool)))

    def send(self, command: Command) -> None:
        """Order what is to be done with rows."""
        if self._enqueue is None:
            raise RuntimeError(f"nobody takes {command}: call send_to first")
        self._enqueue(command)


def _snapshot(node: Node) -> Snapshot:
    assert node.snapshot is not None, "it is a hit"
    return node.snapshot


def _rows(count: int) -> Pages:
    """Reserved ids, where there are no rows yet."""
    return array("i", bytes(4 * count))
