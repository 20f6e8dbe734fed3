# SPDX-License-Identifier: Apache-2.0
"""What enters host memory, what comes back, and which commands that takes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hybrid_plugin.core.cache import HybridCache
from hybrid_plugin.core.commands import (
    Await,
    Command,
    Load,
    Map,
    Pool,
    Store,
)
from hybrid_plugin.core.memory.attention_windows import SlidingWindow
from hybrid_plugin.core.memory.pools import NoSlots, PagePool, SlotPool
from hybrid_plugin.core.memory.window_tables import WindowGroup
from hybrid_plugin.core.policy.snapshot_positions import SnapshotPolicy
from hybrid_plugin.core.tiers.host_plan import HostPlan
from hybrid_plugin.core.tiers.host_tier import HostTier
from hybrid_plugin.core.tiers.restores import Restore, TransferRates
from hybrid_plugin.core.tree.snapshot import SnapshotKind
from tests.core.audit import audit
from tests.core.support import (
    ByMinimum,
    Economical,
    Tokens,
    prefill,
    serve,
    span,
    start,
    state,
)

PLAN = HostPlan({Pool.KV: 1, Pool.STATE: 4}, block_bytes=4, blocks=16)
RATES = TransferRates(load_bytes_per_second=10.0, prefill_seconds_per_token=1.0)
CHAT = span(0, 10)
TURN = (*CHAT, 100, 101, 102)
LATER = span(200, 225)


def make(
    plan: HostPlan = PLAN,
    rates: TransferRates = RATES,
    pages: int = 33,
    slots: int = 9,
    grid: int = 0,
    prompt_end: int = 1_000_000,
) -> HybridCache:
    """A cache with a host tier; pages of 4 tokens."""
    return HybridCache(
        PagePool(pages),
        SlotPool(slots),
        4,
        SnapshotPolicy(4, 1_000_000, grid=grid),
        eviction=ByMinimum(1, prompt_end),
        host=HostTier(plan, 4, ByMinimum()),
        rates=replace(rates),
    )


def of(kind: type, commands: list[Command]) -> list[Command]:
    return [command for command in commands if isinstance(command, kind)]


def host(cache: HybridCache) -> HostTier:
    assert cache.host is not None
    return cache.host


def forget(cache: HybridCache) -> None:
    """Evict everything from the device."""
    while cache.memory.evict_pages(1_000):
        pass


def wait(cache: HybridCache, tokens: Tokens) -> Restore:
    """Ask for a restore that must begin."""
    restore = cache.lower_tiers.restore(cache.look_up(tokens))
    assert restore is not None
    return restore


@pytest.fixture
def cache() -> HybridCache:
    """A chat of 12 computed tokens that only the host has, and a request that runs."""
    cache = make()
    serve(cache, "chat", CHAT, (100, 101, 102))
    forget(cache)
    start(cache, "runs", LATER)
    cache.drain_commands()
    cache.advance("runs", len(LATER))
    cache.drain_commands()
    cache.pass_time(100.0)
    return cache


# ---------------------------------------------------------------------- store


def test_a_turn_is_stored_with_its_kv_and_state() -> None:
    cache = make()
    serve(cache, "chat", CHAT, (100, 101, 102))
    commands = cache.drain_commands()
    assert of(Store, commands) == [
        Store(Pool.KV, (1, 2, 3), (1, 2, 3)),
        Store(Pool.STATE, (1,), (1,)),
    ]
    assert commands.index(Map("host.state", (1,))) < commands.index(
        Store(Pool.STATE, (1,), (1,))
    )
    stats = host(cache).stats
    assert (stats.stores, stats.stored_bytes) == (1, 7)
    level = cache.levels()["host.kv"]
    assert (level.used, level.cached, level.free) == (0, 3, 0)


def test_the_next_turn_stores_what_the_host_lacks() -> None:
    cache = make()
    serve(cache, "chat", CHAT, (100, 101, 102))
    cache.drain_commands()
    serve(cache, "next", (*TURN, 103, 104), (105, 106))
    stored = of(Store, cache.drain_commands())
    assert stored == [
        Store(Pool.KV, (4,), (4,)),
        Store(Pool.STATE, (2,), (2,)),
    ]


def test_a_snapshot_is_stored_behind_the_copy_that_takes_it() -> None:
    cache = make(prompt_end=1)
    start(cache, "chat", CHAT)
    steps = prefill(cache, "chat", CHAT)
    assert [end for end, _ in steps] == [8, 10]
    commands = steps[1][1]
    behind = commands.index(state(1, 2)) + 1
    rest = [c for c in commands[behind:] if not isinstance(c, Map)]
    assert rest == [
        Store(Pool.KV, (1, 2), (1, 2)),
        Store(Pool.STATE, (2,), (1,)),
    ]


def test_what_a_pass_writes_is_stored_behind_it() -> None:
    cache = make(grid=4)
    start(cache, "chat", CHAT)
    cache.pause_at("chat", 8)
    cache.cross("chat", 10)
    assert not of(Store, cache._commands)
    assert not of(Store, cache.drain_commands())
    assert of(Store, cache.drain_commands()) == [
        Store(Pool.KV, (1,), (1,)),
        Store(Pool.STATE, (2,), (1,)),
        Store(Pool.KV, (2,), (2,)),
        Store(Pool.STATE, (3,), (2,)),
    ]


def test_what_was_evicted_before_its_pass_is_not_stored() -> None:
    cache = make(grid=4)
    start(cache, "chat", CHAT)
    cache.pause_at("chat", 8)
    cache.cross("chat", 10)
    while cache.memory.evict_snapshot():
        pass
    cache.drain_commands()
    assert not of(Store, cache.drain_commands())


def test_private_content_is_not_stored() -> None:
    cache = make(prompt_end=1)
    start(cache, "chat", CHAT, cacheable=False)
    prefill(cache, "chat", CHAT)
    cache.finish("chat", CHAT, len(CHAT))
    assert not of(Store, cache.drain_commands())
    assert not host(cache).stats.stores


def test_what_is_worth_less_than_all_else_is_not_stored() -> None:
    """All or nothing: not its KV either."""
    tier = HostTier(replace(PLAN, blocks=6), 4, Economical())
    cache = make()
    cache = HybridCache(
        PagePool(33),
        SlotPool(9),
        4,
        cache.policy,
        eviction=ByMinimum(1),
        host=tier,
        rates=RATES,
    )
    serve(cache, "long", span(0, 40), (100, 101))
    before = {pool: level.cached for pool, level in tier.levels().items()}
    serve(cache, "short", span(300, 302), (103, 104))
    assert tier.stats.stores_refused == 1
    assert before == {pool: level.cached for pool, level in tier.levels().items()}
    audit(cache)


def test_a_flush_empties_the_host() -> None:
    cache = make()
    serve(cache, "chat", CHAT, (100, 101, 102))
    assert cache.flush()
    assert host(cache).match(None, cache.look_up(TURN).tokens, 12).length == 0
    assert cache.levels()["host.kv"].cached == cache.levels()["host.state"].cached == 0


def test_namespaces_are_apart() -> None:
    cache = make()
    serve(cache, "chat", CHAT, (100, 101, 102), namespace="adapter")
    forget(cache)
    assert cache.lower_tiers.restore(cache.look_up(TURN)) is None
    assert cache.lower_tiers.restore(cache.look_up(TURN, "adapter")) is not None


# -------------------------------------------------------------------- restore


def test_a_prefix_comes_back(cache: HybridCache) -> None:
    restore = wait(cache, TURN)
    assert not restore.is_over and cache.look_up(TURN).match.length == 0
    assert restore.due == cache.lower_tiers.restores_due == 100.0 + 7 / 10.0
    pages = tuple(restore.pages)
    assert cache.drain_commands() == [
        Load(Pool.KV, (1, 2, 3), pages, 1),
        Load(Pool.STATE, (1,), (restore.slot,), 1),
    ]
    audit(cache)
    cache.pass_time(100.6)
    assert not cache.drain_commands()
    cache.pass_time(100.7)
    assert cache.drain_commands() == [Await(1)]
    found = cache.look_up(TURN)
    assert restore.is_over and found.match.length == 12
    assert found.match.pages == restore.pages
    assert found.origin is SnapshotKind.TURN_END
    assert cache.lower_tiers.restores_due is None
    audit(cache)


def test_requests_share_a_restore(cache: HybridCache) -> None:
    restore = wait(cache, TURN)
    assert wait(cache, (*TURN, 7)) is restore
    assert host(cache).stats.loads == 1


def test_one_that_needs_less_does_not_hold_back_one_that_needs_more(
    cache: HybridCache,
) -> None:
    longer = (*TURN, *span(110, 120))
    start(cache, "longer", longer)
    cache.finish("longer", longer, len(longer))
    forget(cache)
    first = wait(cache, TURN)
    second = wait(cache, (*longer, 7))
    assert (first.length, second.length) == (12, 23)
    audit(cache)
    cache.pass_time(200.0)
    assert cache.look_up((*longer, 7)).match.length == 23
    audit(cache)


def test_one_with_another_prefix_gets_its_own(cache: HybridCache) -> None:
    start(cache, "other", span(50, 60))
    cache.finish("other", span(50, 60), 10)
    forget(cache)
    first, second = wait(cache, TURN), wait(cache, span(50, 62))
    assert first is not second
    assert second.due == pytest.approx(first.due + 0.7)  # behind it on the link


def test_only_what_the_device_lacks_is_loaded(cache: HybridCache) -> None:
    """Its KV is there, but not its state."""
    start(cache, "again", TURN)
    cache.drain_commands()
    cache.advance("again", 13)  # KV alone
    cache.drain_commands()
    restore = wait(cache, TURN)
    assert of(Load, cache.drain_commands()) == [
        Load(Pool.STATE, (1,), (restore.slot,), 1)
    ]
    assert host(cache).stats.loaded_bytes == 4
    audit(cache)


def test_what_a_restore_builds_on_is_of_use(cache: HybridCache) -> None:
    """The turn before is on the device: its state is not read, its KV not loaded."""
    longer = (*TURN, *span(110, 120))
    start(cache, "longer", longer)
    cache.finish("longer", longer, len(longer))
    forget(cache)
    serve(cache, "chat", CHAT, (100, 101, 102))
    node = cache.look_up(longer).match.node
    assert node is not None and node.snapshot is not None
    assert (node.end, node.snapshot.hits) == (12, 0)
    restore = wait(cache, (*longer, 7))
    assert (restore.start, restore.length) == (12, 23)
    assert node.snapshot.hits == 1
    assert wait(cache, (*longer, 8)) is restore
    assert node.snapshot.hits == 1, "it is built on once"
    audit(cache)


def test_nothing_is_held_up_where_nothing_runs(cache: HybridCache) -> None:
    cache.finish("runs", LATER, len(LATER))
    cache.drain_commands()
    restore = wait(cache, TURN)
    assert restore.is_over and cache.look_up(TURN).match.length == 12
    assert [type(c) for c in cache.drain_commands()] == [Load, Load, Await]


def test_the_last_one_that_ends_ends_restores(cache: HybridCache) -> None:
    restore = wait(cache, TURN)
    cache.finish("runs", LATER, len(LATER))
    assert restore.is_over


def test_growth_ends_restores_that_hold_its_memory() -> None:
    cache = make(pages=12)
    serve(cache, "chat", CHAT, (100, 101, 102))
    forget(cache)
    start(cache, "runs", LATER)
    restore = wait(cache, TURN)
    assert cache.pages.free == 1
    assert (
        cache.lower_tiers.restoring(Pool.KV) == 3
        and cache.lower_tiers.restoring(Pool.STATE) == 1
    )
    assert cache.grow("runs", 36) is not None
    assert restore.is_over
    audit(cache)


def test_an_admission_ends_restores_that_hold_its_memory() -> None:
    cache = make(pages=12)
    serve(cache, "chat", CHAT, (100, 101, 102))
    forget(cache)
    start(cache, "runs", span(200, 210))
    restore = wait(cache, TURN)
    assert start(cache, "before", span(300, 330)).hit == 0
    assert restore.is_over
    audit(cache)


def test_a_refused_admission_ends_no_restore() -> None:
    cache = make(pages=12)
    serve(cache, "chat", CHAT, (100, 101, 102))
    forget(cache)
    start(cache, "runs", span(200, 210))
    restore = wait(cache, TURN)
    found = cache.look_up(span(300, 335))
    assert cache.admit("before", found, num_tokens=35) is None
    assert not restore.is_over


def test_it_begins_only_with_room_for_the_whole_request() -> None:
    cache = make(pages=12)
    serve(cache, "chat", CHAT, (100, 101, 102))
    forget(cache)
    start(cache, "runs", span(200, 210))
    longest = (*TURN, *span(400, 419))
    assert cache.lower_tiers.restore(cache.look_up((*longest, 7))) is None
    assert host(cache).stats.loads_refused == 1
    assert cache.lower_tiers.restore(cache.look_up(longest)) is not None


@pytest.mark.parametrize(
    ("others", "seconds", "begins"),
    [(0, 0.029, False), (0, 0.03, True), (3, 0.0116, False), (3, 0.0117, True)],
)
def test_it_must_beat_what_all_wait_for_computing(
    cache: HybridCache, others: int, seconds: float, begins: bool
) -> None:
    """7 bytes at 10 a second, against 12 tokens that each running request waits for."""
    assert cache.rates is not None
    for n in range(others):
        start(cache, f"runs {n}", span(500 + 20 * n, 504 + 20 * n))
    cache.rates.prefill_seconds_per_token = seconds
    assert (cache.lower_tiers.restore(cache.look_up(TURN)) is not None) == begins


def test_it_begins_where_no_prefill_was_measured(cache: HybridCache) -> None:
    assert cache.rates is not None
    cache.rates.prefill_seconds_per_token = None
    cache.rates.load_bytes_per_second = 1e-9
    assert cache.lower_tiers.restore(cache.look_up(TURN)) is not None


def test_what_was_evicted_again_is_not_waited_for_again(cache: HybridCache) -> None:
    restore = wait(cache, TURN)
    cache.pass_time(200.0)
    cache.memory.evict_snapshot()
    found = cache.look_up(TURN)
    assert not found.match.length
    assert cache.lower_tiers.restore(found, after=restore) is None


def test_it_waits_for_its_sequence_to_come(cache: HybridCache) -> None:
    restore = wait(cache, TURN)
    restore.waiters = 1
    cache.pass_time(200.0)
    assert not restore.is_over
    assert cache.lower_tiers.is_restored(restore) and restore.is_over


def test_hits_of_the_host_are_counted_once(cache: HybridCache) -> None:
    stats = host(cache).stats
    before = stats.queried_tokens
    wait(cache, TURN)
    cache.pass_time(200.0)
    start(cache, "next", TURN)
    assert (stats.queried_tokens - before, stats.hit_tokens) == (13, 12)
    start(cache, "again", TURN)
    assert (stats.queried_tokens - before, stats.hit_tokens) == (14, 12)


def test_a_flush_ends_restores(cache: HybridCache) -> None:
    cache.drain_commands()
    restore = wait(cache, TURN)
    assert not cache.flush()
    cache.finish("runs", (), 0)
    assert restore.is_over and cache.flush()
    assert of(Await, cache.drain_commands()) == [Await(1)]
    audit(cache)


def test_the_host_lets_nothing_go_that_is_loaded(cache: HybridCache) -> None:
    wait(cache, TURN)
    tier = host(cache)
    assert not tier.memory.evict_pages(1_000) and not tier.memory.evict_snapshot()
    level = cache.levels()["host.kv"]
    assert (level.used, level.cached) == (3, 0)
    cache.lower_tiers.end_restores()
    assert tier.memory.evict_pages(1_000)


# -------------------------------------------------------------------- windows


def test_windows_come_back_with_the_snapshot() -> None:
    """What the window no longer covers is neither stored nor restored."""
    window = SlidingWindow(5)
    plan = HostPlan({Pool.KV: 1, Pool.window(0): 1}, block_bytes=4, blocks=16)
    cache = HybridCache(
        PagePool(33),
        NoSlots(),
        4,
        SnapshotPolicy(4, 1_000_000),
        eviction=ByMinimum(1),
        windows=(WindowGroup(window, PagePool(33)),),
        host=HostTier(plan, 4, ByMinimum(), (window,)),
        rates=replace(RATES),
    )
    serve(cache, "chat", CHAT, (100, 101, 102))
    assert of(Store, cache.drain_commands()) == [
        Store(Pool.KV, (1, 2, 3), (1, 2, 3)),
        Store(Pool.window(0), (3,), (1,)),
    ]
    forget(cache)
    restore = cache.lower_tiers.restore(cache.look_up(TURN))
    assert restore is not None
    assert of(Load, cache.drain_commands()) == [
        Load(Pool.KV, (1, 2, 3), tuple(restore.pages), 1),
        Load(Pool.window(0), (1,), tuple(restore.windows[0]), 1),
    ]
    assert cache.look_up(TURN).match.length == 12
    audit(cache)


# ---------------------------------------------------------------- construction


def test_a_tier_needs_rates() -> None:
    with pytest.raises(ValueError, match="measured rates"):
        HybridCache(
            PagePool(9),
            SlotPool(3),
            4,
            SnapshotPolicy(4),
            host=HostTier(PLAN, 4, ByMinimum()),
        )


def test_full_attention_alone_has_no_tier() -> None:
    with pytest.raises(ValueError, match="state layers or attention windows"):
        HybridCache(
            PagePool(9),
            NoSlots(),
            4,
            SnapshotPolicy(4),
            host=HostTier(HostPlan({Pool.KV: 1}, 4, 4), 4, ByMinimum()),
            rates=RATES,
        )
