# SPDX-License-Identifier: Apache-2.0
"""Restores: prefixes that are being copied from the host to the device.

A restore owns the pages and the slot that it fills, as a live sequence does: nobody
else touches, evicts or moves them.  When the loads should be over, the model's stream
is made to wait for them, and what they wrote enters the tree like what a sequence
leaves: from then on it is ordinary cached content.  Waiting earlier is always correct,
and only costs time, so a restore ends at once where nothing runs that the wait would
hold up, and where its memory is needed.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from hybrid_plugin.core.commands import Await, Load, Pool, PoolId
from hybrid_plugin.core.memory.cache_memory import CacheMemory
from hybrid_plugin.core.memory.pools import PagePool
from hybrid_plugin.core.sequence import LookUp
from hybrid_plugin.core.tiers.host_tier import HostSource, HostTier
from hybrid_plugin.core.tree.node import Node
from hybrid_plugin.core.tree.radix import Match
from hybrid_plugin.core.tree.snapshot import Snapshot
from hybrid_plugin.core.tree.tokens import Pages, Tokens

Needs: TypeAlias = Callable[[Mapping[PoolId, int], int], Mapping[PoolId, int] | None]
"""How many ids of the device's pools must be free, for ids that a restore and the
sequence behind it take, and pages for those behind other restores; None if it must not
have them."""


@dataclass(slots=True)
class TransferRates:
    """What was measured, and decides whether a restore beats computing."""

    load_bytes_per_second: float
    """From the host to the device, on every rank at least."""
    prefill_seconds_per_token: float | None = None
    """Of one sequence's prefill, at most; None before any was measured: a restore wins
    then."""
    running: int = 0
    """Sequences that run: what another one computes takes the device from them too."""

    def repays(
        self, size: int, tokens: int, queued: float, elsewhere: float | None = None
    ) -> bool:
        """Whether sequences wait for less long for a load than for its tokens.

        Args:
            size: bytes to load.
            tokens: that need not be computed then.
            queued: seconds until the loads before it are over.
            elsewhere: as for `waiting_seconds`.
        """
        seconds = queued + size / self.load_bytes_per_second
        return seconds < self.waiting_seconds(tokens, elsewhere)

    def waiting_seconds(self, tokens: int, elsewhere: float | None = None) -> float:
        """For how long sequences wait, all together, if so many tokens are computed.

        A load lets others go on, and only one sequence waits for it; the device is what
        all of them share.

        Args:
            tokens: of one sequence.
            elsewhere: what a token's prefill took another server of this model.  One
                that answers prompts which others compute knows only a bound itself.

        Returns:
            Infinite before it was measured how long prefill takes.
        """
        measured = (self.prefill_seconds_per_token, elsewhere)
        least = min((one for one in measured if one is not None), default=math.inf)
        return (1 + self.running) * tokens * least


@dataclass(slots=True, eq=False)
class Restore:
    """One prefix on its way to the device."""

    namespace: Hashable
    tokens: Tokens
    """Of the prefix."""
    ticket: int
    due: float
    """When it should be over, on the cache's clock."""
    start: int
    """Tokens that could be restored from the device when it began."""
    base: Node | None
    """Node of the device's tree where the KV ends that is there already; locked."""
    pages: Pages
    """Of all tokens: those before the base's end are shared with the tree."""
    slot: int
    windows: tuple[Pages, ...]
    """By window group, the pages that the prefix's end needs."""
    source: HostSource
    loads: int
    """Bytes on their way; there may be none, where all that is missing is in use."""
    rest: int
    """Pages that the sequence for which it began needs besides."""
    waiters: int = 0
    """Sequences that have yet to come to it.  While there are any it is not over by
    itself: what it brings would be the first to be evicted for others."""
    is_over: bool = False
    """Whether look-ups find it on the device; where it was not evicted since."""

    @property
    def length(self) -> int:
        """Tokens that can be restored from the device once it is over."""
        return len(self.tokens)


class Restores:
    """All restores of one cache."""

    def __init__(
        self, memory: CacheMemory, host: HostTier, rates: TransferRates
    ) -> None:
        """Begin with none.

        Args:
            memory: of the device.
            host: what is there.
            rates: what loads and computing take.
        """
        self._memory = memory
        self._tree = memory.tree
        self._host = host
        self.rates = rates
        self.running: list[Restore] = []
        """In the order in which they are over."""
        self._tickets = 0
        self._link_free = 0.0
        """When the last load should be over."""

    # ------------------------------------------------------------------ begin

    def begin(
        self,
        found: LookUp,
        now: float,
        needs: Needs,
    ) -> Restore | None:
        """Begin to restore what a waiting sequence lacks, or join a running restore.

        Args:
            found: of the sequence.
            now: the time.
            needs: says how many ids of the device's pools must be free.

        Returns:
            The restore to wait for; None if none is worth it.
        """
        host = self._host.match(found.namespace, found.tokens, found.limit)
        if host.length <= found.match.length:
            return None
        match = self._tree.match(found.namespace, found.tokens, found.limit)
        if host.length <= match.length:
            return None
        for restore in self.running:
            if restore.length == host.length and self._serves(restore, found):
                return restore
        return self._begin(found, host, match, now, needs)

    def _serves(self, restore: Restore, found: LookUp) -> bool:
        """Whether a restore brings the beginning of a sequence."""
        return (
            restore.namespace == found.namespace
            and found.tokens[: restore.length] == restore.tokens
        )

    def _begin(
        self,
        found: LookUp,
        host: Match,
        match: Match,
        now: float,
        needs: Needs,
    ) -> Restore | None:
        memory, size = self._memory, self._tree.page_size
        shared = min(match.kv_length, host.length // size * size)
        base = _path_pages(match.kv_node, shared // size)
        count = -(-host.length // size) - len(base)
        held = self._windows_held(host.length, base)
        wanted = memory.wanted(count, [own.count(0) for own in held], slots=1)
        plan = self._host.plan
        loaded = plan.bytes_of({pool: wanted[pool] for pool in plan.row_bytes})
        queued = self.queued(now)
        if not self.rates.repays(loaded, host.length - match.length, queued):
            return None
        memory.pages.share(base)
        self._share_windows(held)
        rest = -(-len(found.tokens) // size) - host.length // size
        others = sum([one.rest for one in self.running if one.waiters])
        needed = needs({**wanted, Pool.KV: count + rest}, others)
        if needed is None:
            memory.pages.release(base)
            self._release_windows(held)
            self._host.stats.loads_refused += 1
            return None
        node = self._lock(match.kv_node, shared)
        self._note_use(match)
        provided = memory.broker.provide(needed)
        assert provided, "what fits can be had: what is locked is in use"
        self._link_free = now + queued + loaded / self.rates.load_bytes_per_second
        lacking = [[i for i, page in enumerate(own) if not page] for own in held]
        fresh = memory.pages.allocate(count)
        self._tickets += 1
        restore = Restore(
            namespace=found.namespace,
            tokens=found.tokens[: host.length],
            ticket=self._tickets,
            due=self._link_free,
            start=match.length,
            base=node,
            pages=base + fresh,
            slot=memory.slots.allocate_running(),
            windows=self._fresh_windows(held, lacking, fresh),
            source=self._host.hold(host, len(base), lacking),
            loads=loaded,
            rest=rest,
        )
        self.running.append(restore)
        self._load(restore, fresh, lacking)
        return restore

    def _note_use(self, match: Match) -> None:
        """Note that the device's own snapshot is of use: what it keeps is not loaded.

        The sequence resumes from the one that is loaded.
        """
        if match.node is not None:
            self._memory.note_use(match.node, resumed=False)

    def _lock(self, node: Node | None, length: int) -> Node | None:
        """Lock the KV of the first `length` tokens of the path to a node."""
        return self._tree.lock_first(node, length)

    def _windows_held(self, length: int, base: Pages) -> list[Pages]:
        """By window group, the pages that a snapshot at `length` finds; 0 for none."""
        memory, found = self._memory, []
        for group, pairs in zip(memory.windows, memory.pairs, strict=True):
            live = memory.live(group, length)
            held = pairs.held(base[live.start : live.stop])
            found.append(held + array("i", bytes(4 * (len(live) - len(held)))))
        return found

    def _fresh_windows(
        self, held: list[Pages], lacking: list[list[int]], fresh: Pages
    ) -> tuple[Pages, ...]:
        """Allocate window pages where none are held; returns all of each group.

        Nobody else finds them before they are loaded: they are paired at the end.
        """
        memory, found = self._memory, []
        for index, group in enumerate(memory.windows):
            indices, own = lacking[index], held[index][:]
            new = group.pages.allocate(len(indices))
            memory.pairs[index].begin_apart(fresh, new)
            for i, page in zip(indices, new, strict=True):
                own[i] = page
            found.append(own)
        return tuple(found)

    def _load(self, restore: Restore, fresh: Pages, lacking: list[list[int]]) -> None:
        source, ticket = restore.source, restore.ticket
        loads: list[tuple[PoolId, Pages, Pages]] = [(Pool.KV, source.pages, fresh)]
        if self._memory.slots.needed:
            slot = array("i", (source.slot,)), array("i", (restore.slot,))
            loads.append((Pool.STATE, *slot))
        for index, own in enumerate(restore.windows):
            new = array("i", [own[i] for i in lacking[index]])
            loads.append((Pool.window(index), source.windows[index], new))
        for pool, rows, pages in loads:
            if rows:
                self._memory.enqueue(Load(pool, tuple(rows), tuple(pages), ticket))
        self._host.stats.loads += restore.loads > 0
        self._host.stats.loaded_bytes += restore.loads

    def queued(self, now: float) -> float:
        """Seconds until the loads should be over that run."""
        return max(self._link_free - now, 0.0)

    # -------------------------------------------------------------------- end

    def end_due(self, now: float) -> None:
        """End the restores that should be over and that no sequence will come to."""
        for restore in self.running[:]:
            if restore.due <= now and not restore.waiters:
                self.end(restore)

    def end(self, restore: Restore) -> None:
        """End a running restore."""
        self.running.remove(restore)
        self._end(restore)

    def end_all(self) -> bool:
        """End all restores, whether or not they should be over; False without any."""
        running, self.running = self.running, []
        for restore in running:
            self._end(restore)
        return bool(running)

    def _end(self, restore: Restore) -> None:
        """Have the stream wait for the loads; what they wrote enters the tree."""
        memory = self._memory
        if restore.loads:
            memory.enqueue(Await(restore.ticket))
        self._host.let_go(restore.source)
        node = self._insert(restore)
        snapshot = restore.source.node.snapshot
        assert snapshot is not None, "what is held is not evicted"
        if node.snapshot is None:
            memory.slots.donate(restore.slot)
            windows = memory.settle_windows(node, None, restore.windows)
            copy = Snapshot(restore.slot, windows, snapshot.kind, snapshot.origin)
            copy.hits = snapshot.hits
            copy.restored = restore.length - restore.start
            copy.fetched = min(snapshot.fetched, copy.restored)
            copy.source, snapshot.fetched = snapshot.source, 0
            self._tree.attach_snapshot(node, copy)
        else:
            self._tree.touch_snapshot(node)
            memory.slots.free_running(restore.slot)
        memory.pages.release(restore.pages)
        self._release_windows(restore.windows)
        if restore.base is not None:
            self._tree.unlock(restore.base)
        restore.is_over = True

    def _insert(self, restore: Restore) -> Node:
        tree, pages, size = self._tree, restore.pages, self._tree.page_size
        whole = restore.length // size
        begin = 0 if restore.base is None else restore.base.end
        node, taken = tree.insert(
            restore.namespace,
            restore.tokens[begin : whole * size],
            pages[begin // size : whole],
            restore.base,
        )
        self._memory.pages.adopt(taken)
        if rest := restore.tokens[whole * size :]:
            node, is_new = tree.insert_tail(node, rest, pages[whole])
            if is_new:
                self._memory.pages.adopt(pages[whole:])
        return node

    # ---------------------------------------------------------------- counting

    def held(self) -> dict[PoolId, list[int]]:
        """By pool, the ids that nobody but restores refers to."""
        memory, pages = self._memory, self._alone(self._memory.pages, self._pages())
        found: dict[PoolId, list[int]] = {Pool.KV: pages}
        for index, group in enumerate(memory.windows):
            found[Pool.window(index)] = self._alone(group.pages, self._windows(index))
        if memory.slots.needed:
            found[Pool.STATE] = [restore.slot for restore in self.running]
        return found

    def window_pages(self, index: int) -> int:
        """Pages of a window group that restores alone have in use."""
        pool, held = self._memory.windows[index].pages, self._windows(index)
        return sum(pool.references(page)[0] == count for page, count in held.items())

    def _pages(self) -> Counter[int]:
        return Counter([page for one in self.running for page in one.pages])

    def _windows(self, index: int) -> Counter[int]:
        return Counter([page for one in self.running for page in one.windows[index]])

    def _alone(self, pool: PagePool, held: Counter[int]) -> list[int]:
        return [page for page, n in held.items() if pool.references(page) == (n, 0)]

    def _share_windows(self, held: list[Pages]) -> None:
        for group, own in zip(self._memory.windows, held, strict=True):
            group.pages.share([page for page in own if page])

    def _release_windows(self, held: list[Pages] | tuple[Pages, ...]) -> None:
        for group, own in zip(self._memory.windows, held, strict=True):
            group.pages.release([page for page in own if page])


def _path_pages(node: Node | None, count: int) -> Pages:
    """The first `count` pages of the path to a node."""
    pages = array("i")
    while node is not None and node.parent is not None:
        pages = node.pages + pages
        node = node.parent
    return pages[:count]
