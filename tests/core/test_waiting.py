# SPDX-License-Identifier: Apache-2.0
"""Admissions that wait, because what they would evict is worth more."""

from __future__ import annotations

import random

import pytest

from hybrid_plugin.core.cache import HybridCache
from hybrid_plugin.core.commands import Pool
from hybrid_plugin.core.policy.concurrency import ConcurrencyTradeoff
from hybrid_plugin.core.policy.costs import STEP_TOKENS
from tests.core.audit import audit
from tests.core.elastic import ElasticEngine, ElasticSetup
from tests.core.engine import FakeEngine
from tests.core.setups import Setup
from tests.core.support import (
    NO_SNAPSHOTS,
    Economical,
    Tiers,
    admit,
    make_cache,
    span,
    start,
)


class NeverWaits(ConcurrencyTradeoff):
    """Takes what it can get, whatever that costs."""

    def should_wait(self, lost: float, running: int) -> bool:
        return False


class Careless(HybridCache):
    """Starts every sequence that there is room for."""

    def __post_init__(self, tiers: Tiers) -> None:
        self.concurrency = NeverWaits()
        super().__post_init__(tiers)


FIXED = Setup(
    pages=1500,
    slots=12,
    max_running=40,
    branch_min=4,
    prompt_end_min=NO_SNAPSHOTS,
    chunk_end_min=NO_SNAPSHOTS,
)
ELASTIC = ElasticSetup(
    pages=3000,
    slots=60,
    budget=2700,
    slot_bytes=120,
    max_running=40,
    branch_min=4,
    prompt_end_min=NO_SNAPSHOTS,
    chunk_end_min=NO_SNAPSHOTS,
)


def hits(engine: FakeEngine) -> int:
    """Tokens restored for many requests at once, behind three system prompts."""
    rng = random.Random(0)
    systems = [span(1000 * i, 1000 * i + 480) for i in (1, 2, 3)]
    for number in range(60):
        own = span(10_000 + 100 * number, 10_000 + 100 * number + rng.randint(5, 12))
        prompt = rng.choice(systems) + own
        answer = rng.randint(2, 9)
        engine.submit(prompt + span(50_000, 50_000 + answer), len(prompt))
    while engine.waiting or engine.running:
        engine.step(512)
    engine.check()
    assert engine.finished == 60
    return engine.cache.stats.hit_tokens


@pytest.mark.parametrize("setup", [FIXED, ELASTIC], ids=["fixed", "elastic"])
def test_a_crowd_restores_more_if_it_waits(setup: Setup) -> None:
    engine = ElasticEngine if isinstance(setup, ElasticSetup) else FakeEngine
    with_care, without = (hits(engine(setup, cls)) for cls in (HybridCache, Careless))
    assert with_care > without


def full_cache(lost_per_byte: float) -> HybridCache:
    """Three slots: two sequences run, one snapshot is left of earlier ones."""
    cache = make_cache(slots=4, policy=Economical())
    start(cache, "first", span(700, 705))
    cache.finish("first", (), 5)  # sequences end as soon as they answer
    for number in range(2):
        start(cache, f"running {number}", span(100 * number, 100 * number + 5))
    start(cache, "earlier", span(500, 506))
    cache.finish("earlier", span(500, 506), 6)
    assert cache.slots.free == 0
    cache.memory._lost, cache.memory._freed = lost_per_byte, 1.0
    cache.concurrency.pass_tokens = 0
    return cache


def test_a_sequence_waits_for_memory_that_is_worth_more() -> None:
    cache = full_cache(lost_per_byte=1.0)
    refusals = cache.stats.refusals
    assert admit(cache, "late", span(600, 605)) is None
    assert cache.stats.refusals == refusals + 1
    cache.finish("running 0", (), 0)
    assert start(cache, "late", span(600, 605)).hit == 0, "a slot is free"
    audit(cache)


def test_it_waits_for_the_snapshot_that_goes_next() -> None:
    cache = full_cache(lost_per_byte=0.0)
    assert admit(cache, "late", span(600, 605)) is None
    cache.concurrency.answer = 10  # long answers gain more
    assert admit(cache, "late", span(600, 605)) is not None
    assert cache.slots.snapshots == 0


def test_a_pass_that_all_prefills_share_is_a_gain_without_any_answer() -> None:
    """As on a server that only prefills."""
    cache = full_cache(lost_per_byte=0.0)
    cache.concurrency.pass_tokens = 1024
    assert admit(cache, "late", span(600, 605)) is not None


def test_it_starts_where_what_goes_is_worth_nothing() -> None:
    cache = make_cache(pages=9, policy=Economical())
    start(cache, "first", span(700, 705))
    cache.finish("first", (), 5)
    for number in range(2):
        start(cache, f"running {number}", span(100 * number, 100 * number + 5))
    start(cache, "earlier", span(500, 508))
    cache.finish("earlier", span(500, 508), 9)  # its state is behind what is known
    assert (cache.pages.reclaimable, cache.pages.free) == (2, 2)
    assert cache.slots.snapshots == 0
    assert admit(cache, "late", span(600, 612)) is not None
    assert cache.pages.reclaimable == 1


def test_alone_it_never_waits() -> None:
    cache = full_cache(lost_per_byte=1e9)
    for number in range(2):
        cache.finish(f"running {number}", (), 0)
    for number in range(2):
        start(cache, f"filling {number}", span(900 + 10 * number, 905 + 10 * number))
        cache.finish(f"filling {number}", span(900 + 10 * number, 905 + 10 * number), 5)
    assert cache.slots.free == 0 and cache.live == 0
    assert admit(cache, "alone", span(600, 605)) is not None
    audit(cache)


def test_what_is_evicted_sets_the_price() -> None:
    cache = full_cache(lost_per_byte=0.0)
    policy = cache.tree.eviction
    node = cache.tree.next_snapshot()
    assert node is not None and node.snapshot is not None
    lost = policy.expected_tokens(node, node.snapshot, cache.tree.clock)
    assert lost > 0
    taken = {Pool.KV: 3, Pool.STATE: 1}  # 16 bytes
    next_one = 16 * (cache.tree.snapshot_worth() or 0.0)
    assert next_one > 0
    assert cache.memory.price(taken, taken) == pytest.approx(next_one)
    cache.memory._lost, cache.memory._freed = next_one, 8.0  # twice as much
    assert cache.memory.price(taken, taken) == pytest.approx(2 * next_one)
    cache.memory._lost = cache.memory._freed = 0.0
    assert cache.memory.evict_snapshot()
    assert cache.memory.lost_per_byte == pytest.approx(lost / 8), "a slot and a page"
    assert cache.memory.price(taken, taken) == 0, "a slot is free now"
    wanted = {**taken, Pool.STATE: 2}
    assert cache.memory.price(wanted, taken) == pytest.approx(2 * lost)


@pytest.mark.parametrize(
    ("lost", "running", "answer", "waits"),
    [
        (1.0, 0, 0, False),
        (257.0, 1, 0, True),
        (255.0, 1, 0, False),
        (1e9, 64, None, False),
        (3.0, 16, 1, False),
        (3.1, 16, 1, True),
        (3.1, 16, 2, False),
        (0.0, 64, 1, False),
    ],
)
def test_what_one_more_sequence_is_worth(
    lost: float, running: int, answer: float | None, waits: bool
) -> None:
    """The gain of one more is a pass that prefills, of 256 tokens here, and `answer`
    steps of 512, over `running` squared."""
    assert STEP_TOKENS == 512
    tradeoff = ConcurrencyTradeoff(answer, pass_tokens=256)
    assert tradeoff.should_wait(lost, running) == waits


def test_answers_are_averaged() -> None:
    tradeoff = ConcurrencyTradeoff()
    for _ in range(300):
        tradeoff.ended(64)
    assert tradeoff.answer == 64
    tradeoff.ended(32)
    assert tradeoff.answer == 63
