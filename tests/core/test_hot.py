# SPDX-License-Identifier: Apache-2.0
"""Snapshots that sequence after sequence resumes from outlive a crowd."""

from __future__ import annotations

import random

import pytest

from hybrid_plugin.core.cache import HybridCache
from hybrid_plugin.core.radix import Match
from tests.core.audit import audit
from tests.core.elastic import ElasticEngine, ElasticSetup
from tests.core.engine import FakeEngine, Setup
from tests.core.support import admit, make_cache, serve, span, start

SYSTEM = span(0, 8)


def serve_two(cache: HybridCache) -> None:
    """Two prompts that part behind the system prompt: it gets a snapshot."""
    serve(cache, "a", SYSTEM + span(100, 104))
    serve(cache, "b", SYSTEM + span(110, 114))


def crowded() -> HybridCache:
    """Five slots: the system prompt's snapshot, and four sequences that hit it."""
    cache = make_cache(pages=65, slots=6)
    serve_two(cache)
    for number in range(4):
        assert start(cache, f"s{number}", SYSTEM + span(200, 205)).hit == 8
    return cache


def asks_the_system_prompt(cache: HybridCache) -> int:
    return cache.look_up(SYSTEM + span(300, 305)).match.length


def test_an_admission_waits_rather_than_take_it() -> None:
    cache = crowded()
    assert (cache.slots.running, cache.slots.snapshots) == (4, 1)
    assert admit(cache, "late", span(400, 405)) is None
    assert admit(cache, "later", SYSTEM + span(400, 405)) is None
    assert asks_the_system_prompt(cache) == 8
    cache.finish("s0", (), 0)
    assert start(cache, "late", span(400, 405)).hit == 0
    assert asks_the_system_prompt(cache) == 8
    audit(cache)


def test_it_goes_where_too_few_sequences_run() -> None:
    cache = make_cache(pages=65, slots=4)
    serve_two(cache)
    for number in range(3):
        start(cache, f"s{number}", SYSTEM + span(200, 205))
    assert (cache.slots.running, cache.slots.snapshots) == (3, 0)
    audit(cache)


def test_it_goes_once_nobody_resumes_from_it() -> None:
    cache = crowded()
    for number in range(4):
        cache.finish(f"s{number}", (), 0)
        start(cache, f"other {number}", span(400 + 10 * number, 405 + 10 * number))
        assert asks_the_system_prompt(cache) == 8
    start(cache, "one more", span(500, 505))
    assert asks_the_system_prompt(cache) == 0
    audit(cache)


def test_a_chat_s_next_turn_does_not_make_it_hot() -> None:
    cache = make_cache(pages=65, slots=6)
    history = span(0, 10)
    serve(cache, "turn 1", history)
    start(cache, "turn 2", history + span(50, 55))
    for number in range(4):
        start(cache, f"other {number}", span(100 + 10 * number, 105 + 10 * number))
    assert cache.slots.running == 5
    audit(cache)


def test_unused_ones_go_before_it_whatever_the_segment() -> None:
    cache = make_cache(pages=65, slots=8)
    serve_two(cache)
    for number in range(3):
        start(cache, f"s{number}", SYSTEM + span(200, 205))
    serve(cache, "c", span(300, 305))
    assert [node.end for node in cache.tree.snapshots()] == [12, 12, 5, 8]
    for number in range(3):
        assert cache.slots.free == 0 or number == 0
        start(cache, f"t{number}", span(400 + 10 * number, 405 + 10 * number))
    assert asks_the_system_prompt(cache) == 8
    audit(cache)


class Careless(HybridCache):
    """Lets every admission take what it can get."""

    def _costs_hot(self, match: Match, pages: int) -> bool:
        return False


NEVER = 1000
FIXED = Setup(
    pages=129,
    slots=12,
    max_running=40,
    branch_min=4,
    prompt_end_min=NEVER,
    chunk_end_min=NEVER,
)
ELASTIC = ElasticSetup(
    pages=200,
    slots=60,
    budget=300,
    slot_bytes=12,
    max_running=40,
    branch_min=4,
    prompt_end_min=NEVER,
    chunk_end_min=NEVER,
)


def hits(engine: FakeEngine) -> int:
    """Tokens that are restored for many requests at once, behind two system prompts."""
    rng = random.Random(0)
    systems = [span(1000 * i, 1000 * i + 24) for i in (1, 2)]
    for number in range(60):
        own = span(10_000 + 100 * number, 10_000 + 100 * number + rng.randint(5, 12))
        prompt = rng.choice(systems) + own
        answer = rng.randint(2, 9)
        engine.submit(prompt + span(50_000, 50_000 + answer), len(prompt))
    while engine.waiting or engine.running:
        engine.step(64)
    engine.check()
    assert engine.finished == 60
    return engine.cache.stats.hit_tokens


@pytest.mark.parametrize("setup", [FIXED, ELASTIC], ids=["fixed", "elastic"])
def test_a_crowd_restores_more(setup: Setup) -> None:
    engine = ElasticEngine if isinstance(setup, ElasticSetup) else FakeEngine
    with_care, without = (hits(engine(setup, cls)) for cls in (HybridCache, Careless))
    assert with_care > 1.1 * without
