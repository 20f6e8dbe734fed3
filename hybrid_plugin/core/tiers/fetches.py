# SPDX-License-Identifier: Apache-2.0
"""Fetches: prefixes that an outer tier brings to host memory.

A fetch owns the rows that it fills.  Only when all ranks have reported that they are
filled do they enter the host's tree; from then on they are restored to the device like
anything else there.  While sequences have yet to come to them they stay: nothing was
ever resumed from them, so they would be the first to make way for others.  If a rank
fails, the rows are free again, and the sequences that waited compute.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

from hybrid_plugin.core.commands import BundleRows, Fetch, PageRows, Pool, PoolId
from hybrid_plugin.core.sequence import LookUp
from hybrid_plugin.core.tiers.fetch_queue import FetchQueue
from hybrid_plugin.core.tiers.host_tier import HostRows, HostSource, HostTier
from hybrid_plugin.core.tiers.outer_tier import OuterTier, StoredBundle
from hybrid_plugin.core.tiers.recent_finds import RecentFinds
from hybrid_plugin.core.tiers.restores import TransferRates
from hybrid_plugin.core.tree.node import Node
from hybrid_plugin.core.tree.radix import Match
from hybrid_plugin.core.tree.snapshot import Snapshot, SnapshotKind
from hybrid_plugin.core.tree.tokens import Tokens


@dataclass(slots=True, eq=False)
class Fetching:
    """One prefix on its way to the host."""

    tier: OuterTier
    namespace: Hashable
    tokens: Tokens
    """Of the prefix."""
    ticket: int
    bundles: tuple[StoredBundle, ...]
    """Those of its bundles that are fetched."""
    start: int
    """Tokens that could be restored from the host or the device when it began."""
    base: Node | None
    """Node of the host's tree where the KV ends that is there already; locked."""
    first: int
    """The page of the prefix that the first of its rows is for."""
    rows: HostRows
    size: int
    """Bytes of the rows."""
    began: float
    """On the cache's clock."""
    elsewhere: float | None
    """`OuterTier.token_seconds`."""
    waiters: int = 0
    """Sequences that have yet to come to it.  It goes on without any; what it brought
    stays on the host as long as there are some."""
    kept: HostSource | None = None
    """What it brought, where it is over and sequences have yet to come."""
    is_over: bool = False
    """Whether the host has it, or nobody will bring it."""
    is_flushed: bool = False
    """Whether nobody may find what it brings or has brought."""
    reason: str = ""
    """Why nobody will bring it."""

    @property
    def length(self) -> int:
        """Tokens that can be restored from the host once it is over."""
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class _Offer:
    """What a tier has of a sequence beyond the host."""

    tier: OuterTier
    bundles: tuple[StoredBundle, ...]
    """Those that the host's KV does not cover."""

    @property
    def end(self) -> int:
        return self.bundles[-1].end

    @property
    def key(self) -> str:
        """Of the last bundle."""
        return self.bundles[-1].key

    @property
    def elsewhere(self) -> float | None:
        """See `OuterTier.token_seconds`."""
        return self.tier.token_seconds(self.key)


class Fetches:
    """All fetches of one cache."""

    def __init__(
        self,
        host: HostTier,
        tiers: Sequence[OuterTier],
        rates: TransferRates,
        new_ticket: Callable[[], int],
    ) -> None:
        """Begin with none.

        Args:
            host: where to.
            tiers: where from; of several that have as much, the first.
            rates: what loads from the host and computing take.
            new_ticket: numbers fetches, and what else is reported.
        """
        self._new_ticket = new_ticket
        self._host = host
        self._finds = [(tier, RecentFinds(tier)) for tier in tiers]
        self._rates = rates
        self._queues = {tier.name: FetchQueue(tier.reads_at_once) for tier in tiers}
        self.running: dict[int, Fetching] = {}
        """By ticket, in the order in which they began."""
        self._kept: list[Fetching] = []
        """Those that are over, and whose rows wait for sequences."""

    # ------------------------------------------------------------------ begin

    def begin(self, found: LookUp, now: float, queued: float) -> Fetching | None:
        """Begin to fetch what a waiting sequence lacks, or join a running fetch.

        Args:
            found: of the sequence.
            now: the time.
            queued: seconds until the loads from the host are over that run.

        Returns:
            The fetch to wait for; None if none is worth it, or if it should have been
            over long ago.
        """
        host = self._host.match(found.namespace, found.tokens, found.limit)
        have = max(host.length, found.match.length)
        offers = [
            offer
            for tier, finds in self._finds
            if (offer := self._offer(tier, finds, found, host, have)) is not None
        ]
        for offer in sorted(offers, key=lambda one: -one.end):
            running = self._running_for(found, offer.end)
            if running is not None:
                return running if now < self.awaited_until(running) else None
            if not self._repays(offer, have, now, queued):
                computing = self._rates.waiting_seconds(
                    offer.end - have, offer.elsewhere
                )
                offer.tier.fetch_refused(offer.key, computing)
                continue
            return self._begin(offer, found, host, have, now)
        return None

    def bring(self, found: LookUp, now: float) -> Fetching | None:
        """Begin to fetch a prefix before any sequence needs it, whatever it is worth.

        Args:
            found: look-up of a sequence that begins with it.
            now: the time.

        Returns:
            The fetch, or one that runs already; None if no tier has more of it than
            device and host, or if the host's memory is in use.
        """
        host = self._host.match(found.namespace, found.tokens, found.limit)
        have = max(host.length, found.match.length)
        offers = [
            offer
            for tier, finds in self._finds
            if (offer := self._offer(tier, finds, found, host, have)) is not None
        ]
        if not offers:
            return None
        offer = max(offers, key=lambda one: one.end)
        running = self._running_for(found, offer.end)
        return running or self._begin(offer, found, host, have, now, at_any_price=True)

    def awaited_until(self, fetch: Fetching) -> float:
        """When sequences compute what a fetch brings, on the cache's clock.

        What that takes depends on how many sequences run by now: they wait for it too.
        """
        tokens = fetch.length - fetch.start
        computing = self._rates.waiting_seconds(tokens, fetch.elsewhere)
        return fetch.began + fetch.tier.patience(computing)

    def _offer(
        self,
        tier: OuterTier,
        finds: RecentFinds,
        found: LookUp,
        host: Match,
        have: int,
    ) -> _Offer | None:
        bundles = finds.find(found.namespace, found.tokens, found.limit)
        if not bundles or bundles[-1].end <= have:
            return None
        # A page that is not whole at the end needs all tokens in it.
        last = bundles[-1]
        there = min(host.kv_length, self._whole(last.end))
        if tier.is_divisible:
            # KV may be there without the state behind it; some page comes with that.
            start = min(self._whole(there), self._whole(last.end - 1))
            return _Offer(tier, (replace(last, start=start),))
        lacking = [one for one in bundles if one.end > there]
        # KV may be there without the state behind it.
        return _Offer(tier, tuple(lacking or [last]))

    def _whole(self, tokens: int) -> int:
        """So many of them as are in whole pages."""
        size = self._host.tree.page_size
        return tokens // size * size

    def _running_for(self, found: LookUp, end: int) -> Fetching | None:
        for fetch in self.running.values():
            if (
                fetch.length == end
                and not fetch.is_flushed
                and fetch.namespace == found.namespace
                and found.tokens[:end] == fetch.tokens
            ):
                return fetch
        return None

    def _repays(self, offer: _Offer, have: int, now: float, queued: float) -> bool:
        """Whether sequences wait for less long than if the tokens are computed."""
        size, tier = self._size(offer), offer.tier
        waiting = self._queues[tier.name].seconds(now)
        reading = waiting + tier.read_seconds(offer.key, size)
        return self._rates.repays(
            size, offer.end - have, reading + queued, offer.elsewhere
        )

    def _begin(
        self,
        offer: _Offer,
        found: LookUp,
        host: Match,
        have: int,
        now: float,
        *,
        at_any_price: bool = False,
    ) -> Fetching | None:
        tier, tokens = offer.tier, found.tokens[: offer.end]
        size = self._host.tree.page_size
        base = self._host.tree.lock_first(
            host.kv_node, min(host.kv_length, self._whole(offer.end))
        )
        first = offer.bundles[0].start // size
        planned = Snapshot(0, kind=SnapshotKind.TURN_END)
        rows = self._host.obtain(
            found.namespace,
            tokens,
            planned,
            -(-offer.end // size) - first,
            at_any_price=at_any_price,
        )
        if rows is None:
            if base is not None:
                self._host.tree.unlock(base)
            tier.stats.loads_refused += 1
            return None
        fetch = Fetching(
            tier=tier,
            namespace=found.namespace,
            tokens=tokens,
            ticket=self._new_ticket(),
            bundles=offer.bundles,
            start=have,
            base=base,
            first=first,
            rows=rows,
            size=self._size(offer),
            began=now,
            elsewhere=offer.elsewhere,
        )
        self._note_use(host)
        self.running[fetch.ticket] = fetch
        self._queues[tier.name].add(now, tier.read_seconds(offer.key, fetch.size))
        tier.begin_fetch(offer.key, fetch.size)
        self._host.send(Fetch(fetch.ticket, tier.name, self._rows_of(fetch)))
        return fetch

    def _note_use(self, host: Match) -> None:
        """Note that the host's own snapshot is of use: what it keeps is not fetched."""
        node = host.node
        if node is not None and node.snapshot is not None:  # it has not made room
            self._host.tree.use_snapshot(node)

    def _size(self, offer: _Offer) -> int:
        """Bytes of the rows that an offer fills."""
        memory, page_size = self._host.memory, self._host.tree.page_size
        first = offer.bundles[0].start // page_size
        live = [len(memory.live(group, offer.end)) for group in memory.windows]
        wanted = memory.wanted(-(-offer.end // page_size) - first, live, slots=1)
        return self._host.plan.bytes_of(wanted)

    def _rows_of(self, fetch: Fetching) -> tuple[BundleRows, ...]:
        """Where each bundle goes; windows and the state are those of the last one."""
        size, found = self._host.tree.page_size, []
        for bundle in fetch.bundles:
            begin = bundle.start // size - fetch.first
            end = -(-bundle.end // size) - fetch.first
            own = tuple(fetch.rows.pages[begin:end])
            pages: dict[PoolId, PageRows] = {Pool.KV: PageRows(bundle.start, own)}
            state = None
            if bundle is fetch.bundles[-1]:
                pages |= self._host.window_rows(fetch.length, fetch.rows.windows)
                state = self._host.state_row(fetch.rows.slot)
            tokens = fetch.tokens[: bundle.end]
            found.append(
                BundleRows(
                    bundle.key, fetch.namespace, tokens, bundle.start, pages, state
                )
            )
        return tuple(found)

    # -------------------------------------------------------------------- end

    def succeeded(self, ticket: int, now: float, seconds: float | None) -> None:
        """Have the host find what a fetch brought."""
        fetch = self._end(ticket, now)
        tier = fetch.tier
        tier.fetched([one.key for one in fetch.bundles], fetch.size, seconds)
        tier.stats.loads += 1
        tier.stats.loaded_bytes += fetch.size
        if fetch.is_flushed:
            self._host.drop(fetch.rows)
            return
        planned = Snapshot(0, kind=SnapshotKind.TURN_END, source=tier.name)
        planned.fetched = fetch.length - fetch.start
        self._host.enter(
            fetch.namespace, fetch.tokens, fetch.rows, fetch.first, planned
        )
        if fetch.base is not None:
            self._host.tree.unlock(fetch.base)
        if fetch.waiters:
            self._keep(fetch)

    def left(self, fetch: Fetching) -> None:
        """Note that one sequence less has yet to come to a fetch."""
        fetch.waiters -= 1
        if not fetch.waiters and fetch.kept is not None:
            self._kept.remove(fetch)
            self._let_go(fetch)

    def failed(
        self, ticket: int, now: float, reason: str, bundle: int | None
    ) -> Sequence[str]:
        """Give back the rows of a fetch.

        Args:
            ticket: of the fetch.
            now: the time.
            reason: why it failed.
            bundle: index among its bundles of the one that could not be read; None
                where that is not known.

        Returns:
            Keys to discard.
        """
        fetch = self._end(ticket, now)
        fetch.reason = reason
        self._host.drop(fetch.rows)
        if fetch.base is not None:
            self._host.tree.unlock(fetch.base)
        fetch.tier.stats.load_failures[reason] += 1
        broken = fetch.bundles[-1 if bundle is None else bundle]
        return fetch.tier.fetch_failed(broken.key, reason)

    def flush(self) -> None:
        """Have nobody find what fetches bring, nor keep what they brought."""
        kept, self._kept = self._kept, []
        for fetch in kept:
            self._let_go(fetch)
            fetch.is_flushed = True
        for fetch in self.running.values():
            if fetch.base is not None:
                self._host.tree.unlock(fetch.base)
            fetch.base, fetch.is_flushed = None, True

    def _keep(self, fetch: Fetching) -> None:
        fetch.kept = self._host.hold_all(fetch.namespace, fetch.tokens)
        self._kept.append(fetch)

    def _let_go(self, fetch: Fetching) -> None:
        assert fetch.kept is not None, "it was kept"
        self._host.let_go(fetch.kept)
        fetch.kept = None

    def _end(self, ticket: int, now: float) -> Fetching:
        fetch = self.running.pop(ticket)
        fetch.is_over = True
        if not any(one.tier is fetch.tier for one in self.running.values()):
            self._queues[fetch.tier.name].clear(now)
        return fetch
