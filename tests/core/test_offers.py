# SPDX-License-Identifier: Apache-2.0
"""What is offered to other servers, and what of their offers is fetched."""

from __future__ import annotations

import math
from array import array
from dataclasses import replace

import pytest

from hybrid_plugin.core.cache import HybridCache
from hybrid_plugin.core.commands import (
    BundleRows,
    Decline,
    Fetch,
    Offer,
    PageRows,
    Pool,
    Store,
    Withdraw,
)
from hybrid_plugin.core.memory.pools import PagePool, SlotPool
from hybrid_plugin.core.policy.snapshot_positions import SnapshotPolicy
from hybrid_plugin.core.tiers.fetches import Fetching
from hybrid_plugin.core.tiers.host_plan import HostPlan
from hybrid_plugin.core.tiers.host_tier import HostTier
from hybrid_plugin.core.tiers.restores import TransferRates
from tests.core.audit import audit
from tests.core.outer import Entry, FakePeers, FakeTier
from tests.core.support import ByMinimum, Tokens, serve, span, start

PLAN = HostPlan({Pool.KV: 1, Pool.STATE: 4}, block_bytes=4, blocks=16)
RATES = TransferRates(load_bytes_per_second=10.0, prefill_seconds_per_token=1.0)
CHAT = span(0, 10)
"""A prompt that ends inside its third page."""


def make(rates: TransferRates = RATES, patience: float = 100.0) -> HybridCache:
    """A cache with a host tier and peers; pages of 4 tokens."""
    return HybridCache(
        PagePool(33),
        SlotPool(9),
        4,
        SnapshotPolicy(4, 1_000_000),
        eviction=ByMinimum(1),
        host=HostTier(PLAN, 4, ByMinimum()),
        rates=replace(rates),
        tiers=(FakePeers(patience),),
    )


def peers(cache: HybridCache) -> FakePeers:
    tier = cache.lower_tiers.outer[-1]
    assert isinstance(tier, FakePeers)
    return tier


def used(cache: HybridCache) -> dict[str, int]:
    assert cache.host is not None
    return {pool: level.used for pool, level in cache.host.levels().items()}


def ids(*tokens: int) -> array[int]:
    return array("q", tokens)


def given(cache: HybridCache, *tokens: int, key: str = "theirs") -> None:
    """Have a peer offer a prefix."""
    peers(cache).entries[key] = Entry(None, ids(*tokens), 0, 1)
    peers(cache).version += 1


def prefetched(cache: HybridCache, tokens: Tokens) -> Fetching:
    found = cache.lower_tiers.prefetch(cache.look_up(tokens))
    assert found is not None
    return found


# ---------------------------------------------------------------------- offers


def test_a_prefix_is_offered_behind_its_stores() -> None:
    cache = make()
    serve(cache, "chat", CHAT, (100,))
    key = cache.lower_tiers.offer(None, CHAT)
    assert (
        key is not None
        and cache.lower_tiers.has_unsent_offers
        and cache.lower_tiers.offering == 1
    )
    commands = cache.drain_commands()
    tokens = ids(*CHAT)
    rows = BundleRows(key, None, tokens, 0, {Pool.KV: PageRows(0, (1, 2, 3))}, 1)
    assert commands[-1] == Offer(1, rows)
    stores = [i for i, one in enumerate(commands) if isinstance(one, Store)]
    assert stores and max(stores) < len(commands) - 1
    assert not cache.lower_tiers.has_unsent_offers
    assert used(cache) == {"host.kv": 3, "host.state": 1}
    audit(cache)
    cache.lower_tiers.done(1, True, seconds=1.0)
    assert (
        used(cache) == {"host.kv": 0, "host.state": 0}
        and not cache.lower_tiers.offering
    )
    stats = peers(cache).stats
    assert (stats.stores, stats.stored_bytes) == (1, 3 * 1 + 4)
    audit(cache)


def test_a_lease_that_ends_unread_frees_the_rows() -> None:
    cache = make()
    serve(cache, "chat", CHAT, (100,))
    cache.lower_tiers.offer(None, CHAT)
    cache.drain_commands()
    cache.lower_tiers.done(1, False, reason="unread")
    assert used(cache) == {"host.kv": 0, "host.state": 0}
    assert peers(cache).stats.store_failures == {"unread": 1}
    audit(cache)


def test_what_is_offered_is_not_evicted() -> None:
    cache = make()
    serve(cache, "chat", CHAT, (100,))
    cache.lower_tiers.offer(None, CHAT)
    for i in range(6):
        serve(cache, f"{i}", span(1000 * (i + 1), 1000 * (i + 1) + 20), (1,))
        cache.drain_commands()
        audit(cache)
    assert cache.host is not None
    assert cache.host.match(None, ids(*CHAT), 10).length == 10
    assert used(cache) == {"host.kv": 3, "host.state": 1}


def test_the_longest_prefix_that_the_host_has_is_offered() -> None:
    cache = make()
    serve(cache, "short", CHAT[:8], (200,))
    serve(cache, "long", CHAT, (100, 101))
    assert cache.lower_tiers.offer(None, CHAT) is not None  # 11 tokens are there, and 8
    offer = cache.drain_commands()[-1]
    assert isinstance(offer, Offer) and len(offer.rows.tokens) == 8
    assert cache.lower_tiers.offer(None, (*CHAT, 100, 101)) is not None
    offer = cache.drain_commands()[-1]
    assert isinstance(offer, Offer) and len(offer.rows.tokens) == 11


def test_what_the_host_refused_is_stored_to_be_offered() -> None:
    """It will be read at once, and all else perhaps."""
    cache = make()
    host = cache.host
    assert host is not None
    host.tree.eviction.worth = lambda *_: -math.inf  # type: ignore[method-assign]
    for first in (100, 200):
        serve(cache, f"from {first}", span(first, first + 100), (7,))
    serve(cache, "chat", CHAT, (100,))
    cache.drain_commands()
    assert host.stats.stores_refused == 1
    assert not host.match(None, ids(*CHAT), len(CHAT)).length
    assert cache.lower_tiers.offer(None, CHAT) is not None
    *stores, offer = cache.drain_commands()
    assert [one.pool for one in stores if isinstance(one, Store)] == [
        Pool.KV,
        Pool.STATE,
    ]
    assert isinstance(offer, Offer) and len(offer.rows.tokens) == len(CHAT)
    assert not host.match(None, ids(*span(100, 200)), 100).length, "it made room"
    audit(cache)


def test_nothing_is_offered_that_the_host_has_not() -> None:
    cache = make()
    serve(cache, "chat", CHAT, (100,))
    for namespace, tokens in (("salt", CHAT), (None, (7, *CHAT)), (None, CHAT[:9])):
        assert cache.lower_tiers.offer(namespace, tokens) is None
    assert peers(cache).stats.stores_refused == 3
    assert not cache.lower_tiers.has_unsent_offers and not cache.lower_tiers.offering


def test_a_tier_may_not_take_an_offer() -> None:
    cache = make()
    serve(cache, "chat", CHAT, (100,))
    peers(cache).begin_store = lambda *_: None  # type: ignore[method-assign]
    assert cache.lower_tiers.offer(None, CHAT) is None
    assert used(cache) == {"host.kv": 0, "host.state": 0}
    audit(cache)


def test_one_prefix_may_be_offered_many_times() -> None:
    cache = make()
    serve(cache, "chat", CHAT, (100,))
    keys = [cache.lower_tiers.offer(None, CHAT) for _ in range(3)]
    assert len(set(keys)) == 3 == cache.lower_tiers.offering
    cache.drain_commands()
    for ticket in (2, 1):
        cache.lower_tiers.done(ticket, True)
        assert used(cache) == {"host.kv": 3, "host.state": 1}
        audit(cache)
    cache.lower_tiers.done(3, True)
    assert used(cache) == {"host.kv": 0, "host.state": 0}


def test_a_flush_withdraws_and_frees_at_once() -> None:
    cache = make()
    serve(cache, "chat", CHAT, (100,))
    cache.lower_tiers.offer(None, CHAT)
    cache.drain_commands()
    assert cache.flush() and cache.lower_tiers.has_unsent_offers
    assert used(cache) == {"host.kv": 0, "host.state": 0}
    assert cache.drain_commands() == [Withdraw((1,))]
    assert cache.lower_tiers.offering == 1, "until the ranks report"
    assert cache.flush() and cache.drain_commands() == []
    cache.lower_tiers.done(1, False, reason="cleared")
    assert not cache.lower_tiers.offering
    audit(cache)


def test_without_peers_nothing_is_offered() -> None:
    cache = HybridCache(PagePool(9), SlotPool(5), 4, SnapshotPolicy(4))
    assert cache.lower_tiers.offer(None, CHAT) is None
    assert cache.lower_tiers.prefetch(cache.look_up(CHAT)) is None
    assert not cache.lower_tiers.offering and not cache.lower_tiers.has_unsent_offers


def test_two_tiers_cannot_offer() -> None:
    cache = make()
    host, rates = cache.host, cache.rates
    other = FakePeers(1.0)
    other.name = "others"  # type: ignore[misc]
    with pytest.raises(ValueError, match="and one offers them"):
        HybridCache(
            PagePool(9),
            SlotPool(5),
            4,
            SnapshotPolicy(4),
            host=host,
            rates=rates,
            tiers=(FakePeers(1.0), other),
        )


def test_what_is_not_needed_is_declined_with_the_next_commands() -> None:
    cache = make()
    serve(cache, "chat", CHAT, (100,))
    cache.drain_commands()
    cache.lower_tiers.decline("theirs")
    assert cache.lower_tiers.has_unsent_offers and not cache.lower_tiers.offering
    assert cache.drain_commands() == [Decline(("theirs",))]
    assert not cache.lower_tiers.has_unsent_offers
    audit(cache)


# --------------------------------------------------------------------- fetches


def test_what_a_peer_offers_is_fetched_when_a_request_comes() -> None:
    cache = make()
    given(cache, *CHAT)
    fetch = prefetched(cache, (*CHAT, 50))
    assert (fetch.length, cache.lower_tiers.fetching) == (10, 1)
    rows = BundleRows(
        "theirs", None, ids(*CHAT), 0, {Pool.KV: PageRows(0, (1, 2, 3))}, 1
    )
    assert cache.drain_commands()[-1] == Fetch(1, "peer", (rows,))
    assert cache.lower_tiers.restore(cache.look_up((*CHAT, 50))) is fetch
    cache.lower_tiers.done(1, True, seconds=1.0)
    assert fetch.is_over and not peers(cache).entries
    restore = cache.lower_tiers.restore(cache.look_up((*CHAT, 50)), fetch)
    assert restore is not None and restore.length == 10
    audit(cache)


@pytest.mark.parametrize(
    ("there", "start", "rows"),
    [(4, 4, 2), (8, 8, 1), (9, 8, 1)],
)
def test_a_fetch_begins_where_the_hosts_kv_ends(
    there: int, start: int, rows: int
) -> None:
    cache = make()
    serve(cache, "chat", CHAT[:there], (100,))
    cache.drain_commands()
    given(cache, *CHAT)
    prefetched(cache, (*CHAT, 50))
    fetch = cache.drain_commands()[-1]
    assert isinstance(fetch, Fetch)
    (bundle,) = fetch.rows
    assert bundle.start == start == bundle.pages[Pool.KV].start
    assert len(bundle.pages[Pool.KV].rows) == rows
    cache.lower_tiers.done(fetch.ticket, True)
    audit(cache)
    assert cache.host is not None
    assert cache.host.match(None, ids(*CHAT), 10).length == 10


def test_a_state_comes_with_some_page() -> None:
    """Where the host has all of the KV, and no state at its end."""
    cache = make()
    serve(cache, "chat", span(0, 12), (100,))
    cache.drain_commands()
    given(cache, *range(8))
    prefetched(cache, (*range(8), 50))
    fetch = cache.drain_commands()[-1]
    assert isinstance(fetch, Fetch)
    (bundle,) = fetch.rows
    assert (bundle.start, len(bundle.pages[Pool.KV].rows)) == (4, 1)
    cache.lower_tiers.done(fetch.ticket, True)
    audit(cache)
    assert cache.host is not None
    assert cache.host.match(None, ids(*range(8)), 8).length == 8


def test_what_the_host_has_is_not_fetched_from_a_peer() -> None:
    cache = make()
    serve(cache, "chat", CHAT, (100,))
    given(cache, *CHAT)
    assert cache.lower_tiers.prefetch(cache.look_up((*CHAT, 50))) is None


def test_a_request_waits_no_longer_than_the_patience() -> None:
    unmeasured = TransferRates(load_bytes_per_second=10.0)
    for rates, patience, until in ((unmeasured, 30.0, 30.0), (RATES, 30.0, 10.0)):
        cache = make(rates, patience)
        given(cache, *CHAT)
        fetch = prefetched(cache, (*CHAT, 50))
        cache.pass_time(until - 0.1)
        assert not cache.lower_tiers.is_restored(fetch)
        cache.pass_time(until)
        assert cache.lower_tiers.is_restored(fetch) and not fetch.is_over
        assert cache.lower_tiers.restore(cache.look_up((*CHAT, 50))) is None


def test_a_request_waits_longer_the_more_sequences_run_beside_it() -> None:
    """They would wait for what it computes, those too that came after it."""
    cache = make()
    given(cache, *CHAT)
    fetch = prefetched(cache, (*CHAT, 50))
    start(cache, "other", span(1000, 1002))
    cache.pass_time(15.0)
    assert not cache.lower_tiers.is_restored(fetch), "10 tokens, which two wait for"
    cache.finish("other", span(1000, 1002), computed=0)
    assert cache.lower_tiers.is_restored(fetch) and not fetch.is_over


def test_who_computed_a_prompt_says_what_computing_takes() -> None:
    """Before anything was measured here, or where only a bound is known."""
    for here in (None, 50.0):
        cache = make(TransferRates(10.0, here))
        peers(cache).token_seconds_there = 1.0
        given(cache, *CHAT)
        fetch = prefetched(cache, (*CHAT, 50))
        cache.pass_time(9.9)
        assert not cache.lower_tiers.is_restored(fetch)
        cache.pass_time(10.0)
        assert cache.lower_tiers.is_restored(fetch)
    cache = make(TransferRates(10.0, 50.0))
    peers(cache).token_seconds_there = 1.0
    peers(cache).read_bytes_per_second = 0.6
    given(cache, *CHAT)
    assert cache.lower_tiers.prefetch(cache.look_up((*CHAT, 50))) is None
    assert peers(cache).refused == {"theirs": 10.0}


@pytest.mark.parametrize(("read", "begins"), [(1.0, True), (0.6, False)])
def test_only_what_repays_is_fetched_from_a_peer(read: float, begins: bool) -> None:
    """7 bytes from the peer and 7 to the device, or 10 tokens of prefill."""
    cache = make()
    peers(cache).read_bytes_per_second = read
    given(cache, *CHAT)
    found = cache.lower_tiers.prefetch(cache.look_up((*CHAT, 50)))
    assert (found is not None) == begins
    assert peers(cache).refused == ({} if begins else {"theirs": 10.0})
    assert peers(cache).fetching == ({"theirs": 7} if begins else {})


def test_two_are_fetched_beside_each_other_and_a_third_one_waits() -> None:
    """At 1 byte a second, two prefixes are there after 7 seconds, another after 14."""
    cache = make()
    peers(cache).read_bytes_per_second = 1.0
    chats = [span(100 * n, 100 * n + 10) for n in range(1, 4)]
    for n, chat in enumerate(chats):
        given(cache, *chat, key=f"{n}")
    for chat in chats[:2]:
        prefetched(cache, (*chat, 50))
    assert cache.lower_tiers.prefetch(cache.look_up((*chats[2], 50))) is None
    assert peers(cache).refused == {"2": 10.0}
    for ticket in (1, 2):
        cache.lower_tiers.done(ticket, True)
    prefetched(cache, (*chats[2], 50))


def test_a_fetch_that_failed_is_not_tried_again() -> None:
    cache = make()
    given(cache, *CHAT)
    fetch = prefetched(cache, (*CHAT, 50))
    cache.drain_commands()
    cache.lower_tiers.done(1, False, reason="the peer does not answer")
    assert fetch.is_over and used(cache) == {"host.kv": 0, "host.state": 0}
    assert cache.lower_tiers.prefetch(cache.look_up((*CHAT, 50))) is None
    assert cache.lower_tiers.restore(cache.look_up((*CHAT, 50))) is None
    audit(cache)


def test_of_a_disk_and_a_peer_the_longer_prefix_is_fetched() -> None:
    cache = make()
    disk = FakeTier(1000)
    cache.lower_tiers._outer = None
    cache.lower_tiers.use_outer((disk, FakePeers(100.0)))
    disk.entries["None/[0, 1, 2, 3]"] = Entry(None, ids(*range(4)), 0, 1)
    given(cache, *CHAT)
    prefetched(cache, (*CHAT, 50))
    fetch = cache.drain_commands()[-1]
    assert isinstance(fetch, Fetch) and fetch.source == "peer"
