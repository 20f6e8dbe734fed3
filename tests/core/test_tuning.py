# SPDX-License-Identifier: Apache-2.0
"""The weight of a FLOP-aware policy, found by replay."""

from __future__ import annotations

import pytest

from hybrid_plugin.core.cache import HybridCache
from hybrid_plugin.core.memory.pools import PagePool, SlotPool
from hybrid_plugin.core.policy.eviction import FlopAware
from hybrid_plugin.core.policy.snapshot_positions import SnapshotPolicy
from hybrid_plugin.core.policy.tuning import AlphaTuner
from hybrid_plugin.core.tuned_cache import tuner_of
from tests.core.elastic import ElasticSetup
from tests.core.support import NO_SNAPSHOTS, Tokens, serve, span

PAGE = 4


def weighing(alpha: float) -> FlopAware:
    return FlopAware(float, token_bytes=1, slot_bytes=1000, alpha=alpha)


def build(policy: FlopAware) -> HybridCache:
    """Room for a few snapshots, and KV for everything."""
    rules = SnapshotPolicy(PAGE, NO_SNAPSHOTS, NO_SNAPSHOTS, NO_SNAPSHOTS, 0.0)
    return HybridCache(PagePool(5000), SlotPool(6), PAGE, rules, eviction=policy)


def tuned(policy: FlopAware, trial: int = 20, pause: int = 1000) -> HybridCache:
    cache = build(policy)
    cache.tuner = AlphaTuner(policy, build, alphas=(0.0, 2.0), trial=trial, pause=pause)
    return cache


def long_ones_return(cache: HybridCache, rounds: int, start: int = 0) -> None:
    """Two long conversations go on now and then, among many short requests."""
    for turn in range(start, start + rounds):
        for chat in (1, 2):
            history = span(10_000 * chat, 10_000 * chat + 80 + 8 * turn)
            serve(cache, f"chat {chat}", history, (0, 1))
        for other in range(6):
            first = 1_000_000 + 100 * (10 * turn + other)
            short = span(first, first + 8)
            serve(cache, "other", short, (0, 1))


def short_ones_return(cache: HybridCache, rounds: int) -> None:
    """Short requests come twice in a row, among long ones that never do."""
    for turn in range(rounds):
        for other in range(6):
            first = 2_000_000 + 1000 * (10 * turn + other)
            for _ in range(2):
                serve(cache, "short", span(first, first + 9), ())
            serve(cache, "long", span(first + 100, first + 400), ())


def test_takes_the_weight_that_hits_more() -> None:
    policy = weighing(0.0)
    cache = tuned(policy)
    long_ones_return(cache, 8)
    assert policy.alpha == 2.0


def test_goes_back_where_recency_is_better() -> None:
    policy = weighing(2.0)
    cache = tuned(policy)
    short_ones_return(cache, 8)
    assert policy.alpha == 0.0


def test_the_cache_hits_more_with_a_tuner() -> None:
    plain, with_tuner = build(weighing(0.0)), tuned(weighing(0.0))
    for cache in (plain, with_tuner):
        long_ones_return(cache, 30)
    assert with_tuner.stats.hit_tokens > plain.stats.hit_tokens


def test_rests_between_trials() -> None:
    policy = weighing(0.0)
    cache = tuned(policy, pause=100)
    long_ones_return(cache, 8)
    assert policy.alpha == 2.0
    policy.alpha = 0.5  # nobody looks while it rests
    long_ones_return(cache, 4, start=8)
    assert policy.alpha == 0.5
    long_ones_return(cache, 24, start=12)
    assert policy.alpha == 2.0


def test_counts_nothing_before_all_copies_evict() -> None:
    policy = weighing(0.5)
    cache = tuned(policy, trial=1)
    for first in (0, 100, 200):
        serve(cache, "few", span(first, first + 8), (0, 1))
    assert policy.alpha == 0.5


def test_passes_over_what_does_not_fit_and_what_may_not_be_cached() -> None:
    policy = weighing(0.5)
    cache = tuned(policy, trial=1)

    def small(copy: FlopAware) -> HybridCache:
        rules = SnapshotPolicy(PAGE, NO_SNAPSHOTS, NO_SNAPSHOTS, NO_SNAPSHOTS, 0.0)
        return HybridCache(PagePool(3), SlotPool(3), PAGE, rules, eviction=copy)

    cache.tuner = AlphaTuner(policy, small, alphas=(0.0, 1.0), trial=1)
    serve(cache, "long", span(0, 100))
    private: Tokens = span(500, 508)
    found = cache.look_up(private)
    assert cache.admit("private", found, num_tokens=8, cacheable=False) is not None
    cache.advance("private", 8)
    cache.finish("private", private, 8)
    assert policy.alpha == 0.5


def test_it_copies_the_cache_in_charge() -> None:
    cache = build(weighing(0.5))
    cache.tuner = tuner_of(cache)
    copies = [c for c in cache.tuner._copies.values() if isinstance(c, HybridCache)]
    assert {(c.pages.capacity, c.slots.capacity) for c in copies} == {(5000, 6)}
    assert all(c.policy is cache.policy and c.tuner is None for c in copies)
    serve(cache, "a", span(0, 30), ())
    assert {c.stats.queried_tokens for c in copies} == {30}


def test_what_has_no_weight_is_not_tuned() -> None:
    rules = SnapshotPolicy(PAGE, NO_SNAPSHOTS, NO_SNAPSHOTS, NO_SNAPSHOTS, 0.0)
    cache = HybridCache(PagePool(50), SlotPool(6), PAGE, rules)
    with pytest.raises(ValueError, match="only a flop-aware policy"):
        tuner_of(cache)
    with pytest.raises(ValueError, match="pools of fixed size"):
        elastic = ElasticSetup(pages=12).build()
        elastic.eviction = weighing(0.5)
        tuner_of(elastic)


def test_a_trial_without_evictions_ends() -> None:
    policy = weighing(0.3)
    cache = tuned(policy, trial=4, pause=8)
    assert cache.tuner is not None
    trials = []
    for _ in range(20):
        serve(cache, "same", span(0, 30), ())
        trials.append(bool(cache.tuner._copies))
    assert trials == [True] * 7 + [False] * 8 + [True] * 5
    assert policy.alpha == 0.3
