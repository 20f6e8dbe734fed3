# SPDX-License-Identifier: Apache-2.0
"""What is written behind the host, what comes back, and who waits for it."""

from __future__ import annotations

import pickle
from array import array
from collections.abc import Hashable, Sequence
from dataclasses import replace

import pytest

from hybrid_plugin.core.cache import HybridCache
from hybrid_plugin.core.commands import (
    BundleRows,
    Command,
    Discard,
    Fetch,
    Load,
    PageRows,
    Pool,
    Store,
    Write,
)
from hybrid_plugin.core.memory.pools import PagePool, SlotPool
from hybrid_plugin.core.policy.snapshot_positions import SnapshotPolicy
from hybrid_plugin.core.tiers.fetches import Fetching
from hybrid_plugin.core.tiers.host_plan import HostPlan
from hybrid_plugin.core.tiers.host_tier import HostTier
from hybrid_plugin.core.tiers.outer_tier import StoredBundle
from hybrid_plugin.core.tiers.recent_finds import RecentFinds
from hybrid_plugin.core.tiers.restores import Restore, TransferRates
from hybrid_plugin.core.tree.tokens import Tokens as TokenArray
from tests.core.audit import audit
from tests.core.outer import Entry, FakeTier, key_of
from tests.core.support import ByMinimum, Economical, Tokens, serve, span, start

PLAN = HostPlan({Pool.KV: 1, Pool.STATE: 4}, block_bytes=4, blocks=16)
RATES = TransferRates(load_bytes_per_second=10.0, prefill_seconds_per_token=1.0)
CHAT = span(0, 10)
TURN = (*CHAT, 100, 101, 102)
"""All tokens of a chat; the last one was sampled and not computed."""
NEXT = (*TURN, 103, 104)
LATER = span(200, 225)


def make(
    plan: HostPlan = PLAN,
    rates: TransferRates = RATES,
    budget: int = 1_000,
    read_bytes_per_second: float = 10.0,
) -> HybridCache:
    """A cache with a host tier and a disk; pages of 4 tokens."""
    return HybridCache(
        PagePool(33),
        SlotPool(9),
        4,
        SnapshotPolicy(4, 1_000_000),
        eviction=ByMinimum(1),
        host=HostTier(plan, 4, ByMinimum()),
        rates=replace(rates),
        tiers=(FakeTier(budget, read_bytes_per_second),),
    )


def of(kind: type, commands: list[Command]) -> list[Command]:
    return [command for command in commands if isinstance(command, kind)]


def disk(cache: HybridCache) -> FakeTier:
    (tier,) = cache.lower_tiers.outer
    assert isinstance(tier, FakeTier)
    return tier


def host(cache: HybridCache) -> HostTier:
    assert cache.host is not None
    return cache.host


def forget(cache: HybridCache) -> None:
    """Evict everything from the device and the host, as a restart does."""
    while cache.memory.evict_pages(1_000) or host(cache).memory.evict_pages(1_000):
        pass


def ids(*tokens: int) -> array[int]:
    return array("q", tokens)


def chat_on_disk(cache: HybridCache) -> str:
    """Serve a chat of 12 computed tokens that only the disk has then; its key."""
    serve(cache, "chat", CHAT, (100, 101, 102))
    cache.drain_commands()
    cache.lower_tiers.done(1, True)
    forget(cache)
    return key_of(None, ids(*TURN[:12]))


def fetch(cache: HybridCache, tokens: Tokens) -> Fetching:
    """Ask for a fetch that must begin."""
    found = cache.lower_tiers.restore(cache.look_up(tokens))
    assert isinstance(found, Fetching) and not found.is_over
    return found


def brought(cache: HybridCache, *, waiting: int) -> Fetching:
    """A fetch that is over, to which so many sequences have yet to come."""
    chat_on_disk(cache)
    begun = fetch(cache, NEXT)
    for _ in range(waiting):
        cache.lower_tiers.join(begun)
    cache.drain_commands()
    cache.lower_tiers.done(2, True)
    return begun


def used(cache: HybridCache) -> dict[str, int]:
    return {pool: level.used for pool, level in host(cache).levels().items()}


# ---------------------------------------------------------------------- write


def test_what_the_host_stores_is_written_behind_its_stores() -> None:
    cache = make()
    serve(cache, "chat", CHAT, (100, 101, 102))
    assert cache.lower_tiers.writing == 1
    commands = cache.drain_commands()
    tokens = ids(*TURN[:12])
    rows = BundleRows(
        key_of(None, tokens), None, tokens, 0, {Pool.KV: PageRows(0, (1, 2, 3))}, 1
    )
    assert commands[-1] == Write(1, rows)
    assert all(commands.index(c) < len(commands) - 1 for c in of(Store, commands))
    assert used(cache) == {"host.kv": 3, "host.state": 1}
    cache.lower_tiers.done(1, True)
    assert used(cache) == {"host.kv": 0, "host.state": 0}
    assert cache.lower_tiers.writing == 0
    stats = disk(cache).stats
    assert (stats.stores, stats.stored_bytes) == (1, 7)
    audit(cache)


def test_a_turn_begins_where_the_one_before_it_ends() -> None:
    """Its first page, which holds tokens of both, is written with both."""
    cache = make()
    serve(cache, "chat", CHAT[:9], (100, 101))
    cache.drain_commands()
    cache.lower_tiers.done(1, True)
    serve(cache, "next", (*CHAT[:9], 100, 101, 103), (104, 105))
    (write,) = of(Write, cache.drain_commands())
    assert isinstance(write, Write)
    assert (write.rows.start, len(write.rows.tokens)) == (10, 13)
    kv = write.rows.pages[Pool.KV]
    assert kv.start == 10 and len(kv.rows) == 2


def test_two_at_a_time_and_the_oldest_first() -> None:
    cache = make()
    for i in range(4):
        serve(cache, f"r{i}", span(20 * i, 20 * i + 5), (500, 501))
    cache.drain_commands()
    assert [one.tokens[0] for one in disk(cache).begun.values()] == [0, 20]
    cache.lower_tiers.done(2, False, reason="disk full")
    cache.drain_commands()
    assert [one.tokens[0] for one in disk(cache).begun.values()] == [0, 40]
    assert disk(cache).stats.store_failures == {"disk full": 1}
    assert cache.lower_tiers.writing == 3
    audit(cache)


def test_a_failed_write_is_discarded_on_all_ranks() -> None:
    cache = make()
    serve(cache, "chat", CHAT, (100, 101, 102))
    cache.drain_commands()
    cache.lower_tiers.done(1, False, reason="disk full")
    assert of(Discard, cache.drain_commands()) == [
        Discard((key_of(None, ids(*TURN[:12])),))
    ]
    assert not disk(cache).find(None, ids(*NEXT), 100)
    audit(cache)


def test_what_continues_a_bundle_waits_for_its_outcome() -> None:
    cache = make()
    serve(cache, "chat", CHAT, (100, 101, 102))
    serve(cache, "next", NEXT, (105, 106))
    cache.drain_commands()
    assert [one.start for one in disk(cache).begun.values()] == [0]
    cache.lower_tiers.done(1, True)
    (write,) = of(Write, cache.drain_commands())
    assert isinstance(write, Write) and write.rows.start == 12


def test_what_the_host_evicts_before_its_turn_is_not_written() -> None:
    cache = make()
    serve(cache, "chat", CHAT, (100, 101, 102))
    while host(cache).memory.evict_pages(1_000):
        pass
    assert not of(Write, cache.drain_commands())
    assert cache.lower_tiers.writing == 0


def test_notes_do_not_pile_up() -> None:
    """What the host evicted long ago is not remembered."""
    cache = make(rates=replace(RATES, prefill_seconds_per_token=1e-9))
    for i in range(200):
        serve(cache, f"r{i}", span(20 * i, 20 * i + 9), (5000, 5001))
    assert cache.lower_tiers.writing <= 2 * PLAN.blocks


def test_what_the_tier_does_not_take() -> None:
    cache = make(budget=6)
    serve(cache, "chat", CHAT, (100, 101, 102))
    assert not of(Write, cache.drain_commands())
    assert disk(cache).stats.stores_refused == 1
    assert not any(used(cache).values())
    audit(cache)


def test_what_makes_room_goes_first() -> None:
    cache = make(budget=8)
    old = chat_on_disk(cache)
    serve(cache, "later", LATER[:7], (100, 101))
    commands = cache.drain_commands()
    assert commands.index(Discard((old,))) < commands.index(of(Write, commands)[0])


def test_what_is_there_is_not_written_again() -> None:
    cache = make()
    chat_on_disk(cache)
    serve(cache, "again", CHAT, (100, 101, 102))
    assert of(Store, cache.drain_commands()) and not cache.lower_tiers.writing


# ---------------------------------------------------------------------- fetch


def test_a_fetch_fills_rows_of_the_host() -> None:
    cache = make()
    key = chat_on_disk(cache)
    found = fetch(cache, NEXT)
    assert (found.length, cache.lower_tiers.fetching) == (12, 1)
    tokens = ids(*TURN[:12])
    rows = BundleRows(key, None, tokens, 0, {Pool.KV: PageRows(0, (1, 2, 3))}, 1)
    assert cache.drain_commands()[-1] == Fetch(2, "disk", (rows,))
    assert used(cache) == {"host.kv": 3, "host.state": 1}
    assert not cache.lower_tiers.is_restored(found)
    assert not host(cache).match(None, ids(*NEXT), 14).length, "not reported yet"
    audit(cache)


def test_what_was_fetched_is_restored_and_counted() -> None:
    cache = make()
    chat_on_disk(cache)
    start(cache, "runs", LATER)
    found = fetch(cache, NEXT)
    cache.drain_commands()
    cache.lower_tiers.done(2, True)
    assert cache.lower_tiers.is_restored(found) and cache.lower_tiers.fetching == 0
    restore = cache.lower_tiers.restore(cache.look_up(NEXT), after=found)
    assert isinstance(restore, Restore) and restore.length == 12
    assert len(of(Load, cache.drain_commands())) == 2
    cache.pass_time(100.0)
    before = disk(cache).stats.queried_tokens, host(cache).stats.queried_tokens
    assert start(cache, "next", NEXT).hit == 12
    stats = disk(cache).stats
    assert (stats.loads, stats.loaded_bytes, stats.hit_tokens) == (1, 7, 12)
    assert host(cache).stats.hit_tokens == 0
    assert (stats.queried_tokens, host(cache).stats.queried_tokens) == (
        before[0] + 15,
        before[1] + 15,
    )
    audit(cache)


def test_what_was_fetched_stays_until_who_waits_for_it_has_come() -> None:
    cache = make()
    begun = brought(cache, waiting=1)
    forget(cache)
    assert used(cache) == {"host.kv": 3, "host.state": 1}
    restore = cache.lower_tiers.restore(cache.look_up(NEXT), begun)
    assert isinstance(restore, Restore) and restore.length == 12
    cache.lower_tiers.join(restore)
    cache.lower_tiers.leave(begun)
    assert begun.kept is None
    cache.lower_tiers.end_restores()
    assert used(cache) == {"host.kv": 0, "host.state": 0}
    audit(cache)


def test_what_was_fetched_for_two_stays_for_the_second() -> None:
    cache = make()
    begun = brought(cache, waiting=2)
    cache.lower_tiers.leave(begun)
    forget(cache)
    audit(cache)
    assert host(cache).match(None, ids(*NEXT), len(NEXT)).length == 12
    cache.lower_tiers.leave(begun)
    forget(cache)
    assert host(cache).match(None, ids(*NEXT), len(NEXT)).length == 0
    audit(cache)


def test_a_flush_forgets_what_somebody_has_yet_to_come_to() -> None:
    cache = make()
    begun = brought(cache, waiting=1)
    assert cache.flush()
    assert used(cache) == {"host.kv": 0, "host.state": 0}
    cache.lower_tiers.leave(begun)
    audit(cache)


def test_what_the_host_has_is_not_fetched() -> None:
    cache = make()
    chat_on_disk(cache)
    serve(cache, "chat", CHAT, (100, 101, 102))
    serve(cache, "next", NEXT, (105, 106))
    cache.drain_commands()
    cache.lower_tiers.done(2, True)
    forget(cache)
    serve(cache, "chat", CHAT, (100, 101, 102))
    while cache.memory.evict_pages(1_000):
        pass
    found = fetch(cache, (*NEXT, 105, 106, 107))
    (command,) = of(Fetch, cache.drain_commands())
    assert isinstance(command, Fetch)
    assert [(one.start, len(one.tokens)) for one in command.rows] == [(12, 16)]
    assert (found.start, found.length, found.size) == (12, 16, 5)
    node = host(cache).match(None, ids(*NEXT), 14).node
    assert node is not None and node.snapshot is not None
    assert node.snapshot.hits == 1, "it is of use: the fetch builds on it"
    audit(cache)


def test_a_chain_is_filled_in_the_order_of_the_sequence() -> None:
    """Where a bundle ends inside a page, the next one begins in the same row."""
    cache = make()
    serve(cache, "chat", CHAT[:9], (100, 101))
    cache.drain_commands()
    cache.lower_tiers.done(1, True)
    tokens = (*CHAT[:9], 100, 101, 103)
    serve(cache, "next", tokens, (104, 105))
    cache.drain_commands()
    cache.lower_tiers.done(2, True)
    forget(cache)
    fetch(cache, (*tokens, 104, 105, 106))
    (command,) = of(Fetch, cache.drain_commands())
    assert isinstance(command, Fetch)
    first, second = command.rows
    assert first.state is None and second.state is not None
    assert first.pages[Pool.KV].rows[-1] == second.pages[Pool.KV].rows[0]
    assert (first.start, second.start, len(second.tokens)) == (0, 10, 13)


def test_many_wait_for_one_fetch() -> None:
    cache = make()
    chat_on_disk(cache)
    found = fetch(cache, NEXT)
    assert cache.lower_tiers.restore(cache.look_up((*TURN, 300, 301))) is found
    assert len(of(Fetch, cache.drain_commands())) == 1


def test_nobody_waits_longer_than_computing_takes() -> None:
    """A rank that never answers costs those who wait as much again, and no more."""
    cache = make()
    chat_on_disk(cache)
    serve(cache, "part", CHAT[:8], (8,))
    cache.drain_commands()
    while cache.memory.evict_pages(1_000):
        pass
    found = fetch(cache, NEXT)
    assert found.length - found.start == 4
    cache.pass_time(3.9)
    assert not cache.lower_tiers.is_restored(found)
    cache.pass_time(4.0)
    assert cache.lower_tiers.is_restored(found) and not found.is_over
    restore = cache.lower_tiers.restore(cache.look_up(NEXT))
    assert isinstance(restore, Restore) and restore.length == 8, "of the host at least"
    assert used(cache)["host.state"] == 1 + cache.lower_tiers.writing, (
        "its rows stay its own"
    )
    cache.lower_tiers.done(found.ticket, True)
    assert host(cache).match(None, ids(*NEXT), 14).length == 12
    audit(cache)


def test_a_failed_fetch_gives_back_its_rows_and_is_not_tried_again() -> None:
    cache = make()
    key = chat_on_disk(cache)
    found = fetch(cache, NEXT)
    cache.drain_commands()
    cache.lower_tiers.done(2, False, reason="corrupt", bundle=0)
    assert cache.lower_tiers.is_restored(found)
    assert cache.lower_tiers.restore(cache.look_up(NEXT), after=found) is None
    assert cache.lower_tiers.restore(cache.look_up(NEXT)) is None, "it is forgotten"
    assert of(Discard, cache.drain_commands()) == [Discard((key,))]
    assert disk(cache).stats.load_failures == {"corrupt": 1}
    assert not any(used(cache).values())
    audit(cache)


def test_nothing_is_fetched_twice_in_a_row() -> None:
    """What was brought may be gone before the sequence comes to it."""
    cache = make()
    chat_on_disk(cache)
    found = fetch(cache, NEXT)
    cache.lower_tiers.done(2, True)
    forget(cache)
    assert cache.lower_tiers.restore(cache.look_up(NEXT), after=found) is None


@pytest.mark.parametrize(
    ("read", "prefill", "begins"),
    [(10.0, 1.0, True), (0.1, 1.0, False), (10.0, 0.01, False), (0.1, None, True)],
)
def test_only_what_repays_is_fetched(
    read: float, prefill: float | None, begins: bool
) -> None:
    """7 bytes from the disk and 7 to the device, or 12 tokens of prefill."""
    rates = replace(RATES, prefill_seconds_per_token=prefill)
    cache = make(rates=rates, read_bytes_per_second=read)
    chat_on_disk(cache)
    assert (cache.lower_tiers.restore(cache.look_up(NEXT)) is not None) == begins


def test_a_fetch_counts_those_before_it() -> None:
    """At 1 byte a second, one prefix is there after 7 seconds, the other after 14."""
    rates = replace(RATES, load_bytes_per_second=1e9)
    cache = make(rates=rates, read_bytes_per_second=1.0)
    chat_on_disk(cache)
    tier = disk(cache)
    for first in (300, 400):
        tokens = ids(*span(first, first + 12))
        tier.entries[key_of(None, tokens)] = Entry(None, tokens, 0, 7)
    fetch(cache, NEXT)
    assert cache.lower_tiers.restore(cache.look_up(span(300, 314))) is None
    cache.lower_tiers.done(2, True)
    fetch(cache, span(300, 314))
    cache.pass_time(3.0)
    fetch(cache, span(400, 414))


def test_a_host_that_holds_what_is_worth_more_is_left_alone() -> None:
    cache = HybridCache(
        PagePool(33),
        SlotPool(9),
        4,
        SnapshotPolicy(4, 1_000_000),
        eviction=ByMinimum(1),
        host=HostTier(replace(PLAN, blocks=6), 4, Economical()),
        rates=replace(RATES),
        tiers=(FakeTier(1_000, 10.0),),
    )
    serve(cache, "long", span(0, 40), (100, 101))
    cache.drain_commands()
    cache.lower_tiers.done(1, True)
    short = ids(*span(300, 304))
    disk(cache).entries[key_of(None, short)] = Entry(None, short, 0, 5)
    assert cache.lower_tiers.restore(cache.look_up(span(300, 306))) is None
    assert disk(cache).stats.loads_refused == 1
    audit(cache)


def test_of_several_tiers_the_longest_prefix_and_then_the_first() -> None:
    near, far = FakeTier(100, 10.0, "near"), FakeTier(100, 10.0, "far")
    far.keeps_bundles = False
    cache = make()
    cache = HybridCache(
        PagePool(33),
        SlotPool(9),
        4,
        cache.policy,
        eviction=ByMinimum(1),
        host=HostTier(PLAN, 4, ByMinimum()),
        rates=replace(RATES),
        tiers=(near, far),
    )
    for tier, end in ((near, 8), (far, 12)):
        for prompt in (span(0, end), span(50, 58)):
            tokens = ids(*prompt)
            tier.entries[key_of(None, tokens)] = Entry(None, tokens, 0, 7)
    assert fetch(cache, span(0, 16)).tier is far
    assert fetch(cache, span(50, 66)).tier is near


# -------------------------------------------------------------- flush, and faults


def test_a_flush_forgets_what_is_on_its_way() -> None:
    cache = make()
    chat_on_disk(cache)
    fetch(cache, NEXT)
    serve(cache, "later", LATER, (300, 301))
    cache.drain_commands()
    assert cache.flush()
    assert cache.lower_tiers.writing == cache.lower_tiers.fetching == 1
    assert any(used(cache).values()), "rows that are in use stay in use"
    audit(cache)
    serve(cache, "again", LATER, (300, 301))
    assert not of(Write, cache.drain_commands()), "that key is out"
    cache.lower_tiers.done(3, True)
    cache.lower_tiers.done(2, True)
    assert not any(used(cache).values())
    assert not cache.tree.match(None, ids(*NEXT), 14).length
    assert not host(cache).match(None, ids(*NEXT), 14).length
    (discarded,) = of(Discard, cache._commands)
    assert discarded == Discard((key_of(None, ids(*LATER, 300)),))
    assert of(Write, cache.drain_commands())
    audit(cache)


def test_a_flush_discards_what_the_tier_has() -> None:
    cache = make()
    key = chat_on_disk(cache)
    assert cache.flush()
    assert cache.drain_commands()[-1] == Discard((key,))
    assert cache.lower_tiers.restore(cache.look_up(NEXT)) is None


def test_reports_of_nothing() -> None:
    cache = make()
    with pytest.raises(ValueError, match="nothing is on its way under ticket 1"):
        cache.lower_tiers.done(1, True)
    with pytest.raises(ValueError, match="there is no outer tier"):
        HybridCache(PagePool(3), SlotPool(3), 4, cache.policy).lower_tiers.done(1, True)


def test_tiers_that_cannot_go_together() -> None:
    cache = make()
    with pytest.raises(ValueError, match="come once"):
        cache.lower_tiers.use_outer([FakeTier(1)])
    with pytest.raises(ValueError, match="need a host tier"):
        HybridCache(PagePool(3), SlotPool(3), 4, cache.policy, tiers=(FakeTier(1),))
    bare = HybridCache(
        PagePool(33),
        SlotPool(9),
        4,
        cache.policy,
        host=HostTier(PLAN, 4, ByMinimum()),
        rates=RATES,
    )
    with pytest.raises(ValueError, match="the same name"):
        bare.lower_tiers.use_outer([FakeTier(1), FakeTier(1)])
    with pytest.raises(ValueError, match="only one outer tier keeps"):
        bare.lower_tiers.use_outer([FakeTier(1), FakeTier(1, name="other")])


def test_found_is_a_chain() -> None:
    """What the fakes say is what the protocol asks for."""
    tier = FakeTier(100)
    for begin, end in ((0, 4), (4, 9)):
        tokens = ids(*span(0, end))
        tier.entries[key_of(None, tokens)] = Entry(None, tokens, begin, 7)
    found = tier.find(None, ids(*span(0, 20)), 20)
    assert [(one.start, one.end) for one in found] == [(0, 4), (4, 9)]
    del tier.entries[key_of(None, ids(*span(0, 4)))]
    assert found[0] == StoredBundle(key_of(None, ids(*span(0, 4))), 0, 4)
    assert not tier.find(None, ids(*span(0, 20)), 20)


# ------------------------------------------------------------- who asks the tier


class _Asked(FakeTier):
    """Counts how often it is asked."""

    asked = 0

    def find(
        self, namespace: Hashable, tokens: TokenArray, limit: int
    ) -> Sequence[StoredBundle]:
        self.asked += 1
        return FakeTier.find(self, namespace, tokens, limit)


def test_the_tier_is_asked_once_for_each_sequence_and_version() -> None:
    tier = _Asked(100)
    finds = RecentFinds(tier)
    tokens = ids(*span(0, 20))
    for _ in range(3):
        assert not finds.find(None, tokens, 19)
    assert tier.asked == 1
    finds.find("adapter", tokens, 19)
    finds.find("adapter", tokens, 18)
    assert tier.asked == 3
    first = ids(*span(0, 4))
    tier.begun["k"] = tier.entries[key_of(None, first)] = Entry(None, first, 0, 7)
    tier.stored("k", None)
    assert finds.find(None, tokens, 19) == [StoredBundle(key_of(None, first), 0, 4)]
    assert len(finds) == 1
    del tokens
    assert len(finds) == 0, "nobody has the sequence any more"


def test_equal_sequences_are_told_apart_by_who_has_them() -> None:
    """One that takes the memory of another is a new one."""
    tier = _Asked(100)
    finds = RecentFinds(tier)
    for i in range(50):
        finds.find(None, ids(*span(i, i + 9)), 8)
    assert tier.asked == 50


# ----------------------------------------------------------------- on the way


def test_commands_arrive_as_they_were() -> None:
    cache = make()
    serve(cache, "chat", CHAT, (100, 101, 102))
    write = of(Write, cache.drain_commands())
    assert pickle.loads(pickle.dumps(write)) == write


def test_a_fetch_carries_its_tokens_once() -> None:
    tokens = ids(*span(0, 10_000))
    rows = tuple(
        BundleRows(
            "k", "a", tokens[:end], end - 500, {Pool.KV: PageRows(0, (1,))}, None
        )
        for end in range(500, 10_001, 500)
    )
    sent = pickle.dumps(Fetch(1, "disk", rows))
    assert len(sent) < 9 * len(tokens)
    assert pickle.loads(sent) == Fetch(1, "disk", rows)


@pytest.mark.parametrize(
    "other",
    [
        BundleRows("k", None, ids(1, 2), 0, {}, None),
        BundleRows("k", "a", ids(0, 1, 2), 0, {}, None),
    ],
)
def test_a_fetch_is_of_one_sequence(other: BundleRows) -> None:
    last = BundleRows("l", None, ids(0, 1, 2, 3), 2, {}, None)
    with pytest.raises(ValueError, match="of one sequence"):
        pickle.dumps(Fetch(1, "disk", (other, last)))


def test_what_the_host_gets_of_the_device_was_not_brought_by_another_tier() -> None:
    """However its snapshot came to the device: it counts for that tier once."""
    cache = make()
    chat_on_disk(cache)
    fetching = fetch(cache, NEXT)
    cache.drain_commands()
    cache.lower_tiers.done(fetching.ticket, True)
    assert cache.lower_tiers.restore(cache.look_up(NEXT), fetching) is not None
    cache.drain_commands()
    while host(cache).memory.evict_pages(1000):
        pass
    assert cache.admit("other", cache.bypass(CHAT), num_tokens=12) is not None
    cache.drain_commands()
    cache.finish("other", TURN, 12)
    cache.drain_commands()
    (kept,) = [node for node in host(cache).tree.nodes() if node.snapshot]
    assert kept.snapshot is not None
    assert (kept.snapshot.restored, kept.snapshot.fetched) == (0, 0)
