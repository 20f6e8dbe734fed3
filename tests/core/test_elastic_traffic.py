# SPDX-License-Identifier: Apache-2.0
"""Elastic pools under random traffic: content, holes, budget and every invariant.

48,000 seeded operations and a Hypothesis machine; broken controllers show that
the checks can say no.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from hybrid_plugin.core.cache import HybridCache
from hybrid_plugin.core.commands import Command, Copy, Map, Pool, PoolId, Unmap
from hybrid_plugin.core.memory.elastic import ElasticBroker
from tests.core.device import ContentError
from tests.core.elastic import (
    ElasticEngine,
    ElasticSetup,
    random_elastic_setup,
    seeded_traffic,
)
from tests.core.profiles import SOAK_FACTOR, machine_settings
from tests.core.support import Tiers
from tests.core.test_invariants import EngineMachine

EPISODES = 20 * SOAK_FACTOR
OPERATIONS = 600
SEEDS = 8
"""That caches broken on purpose are tried with: the first one catches all of them."""


@pytest.mark.parametrize("page_size", [1, 2, 4, 16])
def test_traffic(page_size: int) -> None:
    names = (
        "hit_tokens",
        "resumed_hit_tokens",
        "refusals",
        "moves",
        "granules_emptied",
        "promised_hits",
        "promises_broken",
        "promises_evicted",
    )
    totals = dict.fromkeys(names, 0.0)
    for seed in range(EPISODES):
        traffic = seeded_traffic(seed, page_size)
        engine = traffic.engine
        assert isinstance(engine, ElasticEngine)
        try:
            traffic.run(OPERATIONS, check_every=10)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, {engine.setup}: {error}") from error
        done = engine.cache.stats.as_dict() | engine.controller.stats.as_dict()
        for name in names:
            totals[name] += done[name]
    assert all(totals.values()), f"the traffic exercises too little: {totals}"


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_traffic_with_windows(page_size: int) -> None:
    """Window groups share the budget with pages and states; or there are no states."""
    totals = dict.fromkeys(("hit_tokens", "refusals", "moves", "granules_emptied"), 0.0)
    for seed in range(EPISODES // 2):
        traffic = seeded_traffic(seed, page_size, windows=True)
        engine = traffic.engine
        assert isinstance(engine, ElasticEngine) and engine.setup.windows
        try:
            traffic.run(OPERATIONS // 2, check_every=10)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, {engine.setup}: {error}") from error
        done = engine.cache.stats.as_dict() | engine.controller.stats.as_dict()
        for name in totals:
            totals[name] += done[name]
    assert all(totals.values()), f"the traffic exercises too little: {totals}"


class ElasticMachine(EngineMachine):
    """Requests come, run, end and are preempted on pools that share a budget."""

    @initialize(seed=st.integers(0, 10_000))
    def start(self, seed: int) -> None:
        setup = random_elastic_setup(random.Random(seed), self.page_size)
        self.engine = ElasticEngine(setup)


TestElastic = ElasticMachine.TestCase
TestElastic.settings = machine_settings()


# ------------------------------------------------------------- broken on purpose


class SkipsMaps(HybridCache):
    def enqueue(self, command: Command) -> None:
        if not isinstance(command, Map):
            HybridCache.enqueue(self, command)


class SkipsUnmaps(HybridCache):
    def enqueue(self, command: Command) -> None:
        if not isinstance(command, Unmap):
            HybridCache.enqueue(self, command)


class MapsLate(HybridCache):
    """Its maps follow everything else that was ordered for a step."""

    def drain_commands(self) -> list[Command]:
        commands = HybridCache.drain_commands(self)
        return sorted(commands, key=lambda c: isinstance(c, Map))


class UnmapsEarly(HybridCache):
    """Takes memory away before the copies that still read it."""

    def drain_commands(self) -> list[Command]:
        commands = HybridCache.drain_commands(self)
        return sorted(commands, key=lambda c: not isinstance(c, Unmap))


class SkipsCopiesOfMovedIds(HybridCache):
    def __post_init__(self, tiers: Tiers) -> None:
        HybridCache.__post_init__(self, tiers)
        enqueue = self.memory.enqueue

        def broken(command: Command) -> None:
            if not isinstance(command, Copy):
                enqueue(command)

        self.memory.enqueue = broken  # type: ignore[method-assign]


class ForgetsMovedPages(HybridCache):
    """Empties granules without telling the tree."""

    def __post_init__(self, tiers: Tiers) -> None:
        HybridCache.__post_init__(self, tiers)
        self.tree.renumber = lambda **_: None  # type: ignore[method-assign]


class _Generous(ElasticBroker):
    """Grants more than there is."""

    def fits(
        self,
        wanted: Mapping[PoolId, int],
        pinned: Mapping[PoolId, Iterable[int]] | None = None,
        returned: Mapping[PoolId, Sequence[int]] | None = None,
    ) -> bool:
        return True


class _Spendthrift(ElasticBroker):
    """Maps whether or not the budget has anything left."""

    def _map_slack(self, member: Any, some: int) -> bool:
        if member.takes_memory():
            self._map(member)
        return bool(member.ids.free)


class _Stingy(ElasticBroker):
    """Refuses what only other pools could give."""

    def fits(
        self,
        wanted: Mapping[PoolId, int],
        pinned: Mapping[PoolId, Iterable[int]] | None = None,
        returned: Mapping[PoolId, Sequence[int]] | None = None,
    ) -> bool:
        members = self._members
        return super().fits(wanted, pinned, returned) and all(
            members[pool].ids.free + members[pool].ids.cached >= count
            for pool, count in wanted.items()
        )


def _with(controller: type[ElasticBroker]) -> type[HybridCache]:
    class Cache(HybridCache):
        def __init__(self, **fields: Any) -> None:
            ours = fields["broker"]
            fields["broker"] = controller(ours.budget, ours._budgets)
            HybridCache.__init__(self, **fields)

    Cache.__name__ = controller.__name__
    return Cache


BROKEN = [
    SkipsMaps,
    SkipsUnmaps,
    MapsLate,
    UnmapsEarly,
    SkipsCopiesOfMovedIds,
    ForgetsMovedPages,
    _with(_Generous),
    _with(_Spendthrift),
    _with(_Stingy),
]


def first_failure(cache: type[HybridCache]) -> Exception:
    """What the first failing traffic fails with; fails if none does."""
    for seed in range(SEEDS):
        for page_size in (1, 4):
            traffic = seeded_traffic(seed, page_size, cache)
            try:
                traffic.run(300, check_every=5)
            except (AssertionError, LookupError, ValueError) as failure:
                return failure
    pytest.fail(f"{cache.__name__} went through")


@pytest.mark.parametrize("cache", BROKEN, ids=lambda cache: cache.__name__)
def test_a_broken_one_is_caught(cache: type[HybridCache]) -> None:
    assert isinstance(first_failure(cache), Exception)


def test_the_sound_one_goes_through() -> None:
    with pytest.raises(pytest.fail.Exception, match="went through"):
        first_failure(HybridCache)


def test_a_page_without_memory_cannot_be_touched() -> None:
    engine = ElasticEngine(ElasticSetup(pages=12))
    for touch in (
        lambda: engine.device.run([Copy(Pool.KV, 1, 11)]),
        lambda: engine.device.run([Copy(Pool.STATE, 5, 0)]),
        lambda: engine.device.pages[11][0],
    ):
        with pytest.raises(ContentError, match="has no memory"):
            touch()
