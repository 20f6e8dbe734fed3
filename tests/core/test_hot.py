# SPDX-License-Identifier: Apache-2.0
"""Snapshots that sequence after sequence resumes from outlive a crowd."""

from __future__ import annotations

import random

import pytest

from hybrid_plugin.core.cache import HybridCache
from hybrid_plugin.core.policy.slot_tradeoff import SlotTradeoff
from hybrid_plugin.core.tree.radix import Match
from tests.core.audit import audit
from tests.core.elastic import ElasticEngine, ElasticSetup
from tests.core.engine import FakeEngine, Setup
from tests.core.support import (
    Tokens,
    admit,
    make_cache,
    prefill,
    serve,
    span,
    start,
)

SYSTEM = span(0, 8)


def serve_two(cache: HybridCache) -> None:
    """Two prompts that part behind the system prompt: it gets a snapshot."""
    serve(cache, "a", SYSTEM + span(100, 104))
    serve(cache, "b", SYSTEM + span(110, 114))


def start_hitting(cache: HybridCache, count: int) -> None:
    """Sequences behind the system prompt."""
    for number in range(count):
        assert start(cache, f"s{number}", SYSTEM + span(200, 205)).hit == 8


def unrelated(number: int) -> Tokens:
    """A prompt that begins like no other."""
    return span(400 + 10 * number, 405 + 10 * number)


def crowded() -> HybridCache:
    """Five slots: the system prompt's snapshot, and four sequences that hit it."""
    cache = make_cache(pages=65, slots=6)
    serve_two(cache)
    start_hitting(cache, 4)
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
    start_hitting(cache, 3)
    assert (cache.slots.running, cache.slots.snapshots) == (3, 0)
    audit(cache)


def test_it_goes_once_nobody_resumes_from_it() -> None:
    cache = crowded()
    for number in range(4):
        cache.finish(f"s{number}", (), 0)
        start(cache, f"other {number}", unrelated(number))
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
        start(cache, f"other {number}", unrelated(number))
    assert cache.slots.running == 5
    audit(cache)


def test_unused_ones_go_before_it_whatever_the_segment() -> None:
    cache = make_cache(pages=65, slots=8)
    serve_two(cache)
    start_hitting(cache, 3)
    serve(cache, "c", span(300, 305))
    assert [node.end for node in cache.tree.snapshots()] == [12, 12, 5, 8]
    for number in range(3):
        assert cache.slots.free == 0 or number == 0
        start(cache, f"t{number}", unrelated(number))
    assert asks_the_system_prompt(cache) == 8
    audit(cache)


class Careless(HybridCache):
    """Lets every admission take what it can get."""

    def _must_wait(self, match: Match, pages: int, branch: int) -> bool:
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


def test_long_answers_are_worth_more_than_it() -> None:
    cache = crowded()
    for number in range(40):
        cache.finish("s0", (), 1000)  # as if it had decoded for so long
        start(cache, "s0", SYSTEM + span(300 + 10 * number, 305 + 10 * number))
    assert cache.slots.free == 0
    start(cache, "late", span(900, 905))
    assert asks_the_system_prompt(cache) == 0
    audit(cache)


def test_a_slot_is_left_for_a_branch_on_its_way() -> None:
    cache = make_cache(pages=65, slots=7)
    serve(cache, "a", SYSTEM + span(100, 104))
    for number in range(3):
        start(cache, f"other {number}", unrelated(number))
    prompt = SYSTEM + span(110, 114)
    assert start(cache, "b", prompt).hit == 0
    assert (cache.slots.free, cache.slots.snapshots) == (1, 1)
    start(cache, "c", span(300, 305))
    assert admit(cache, "d", span(500, 505)) is None
    prefill(cache, "b", prompt)
    assert asks_the_system_prompt(cache) == 8
    assert admit(cache, "d", SYSTEM + span(400, 405)) is not None
    audit(cache)


@pytest.mark.parametrize(
    ("saving", "among", "running", "answer", "pays"),
    [
        (500, 8, 64, 32, True),
        (500, 8, 64, 1000, False),
        (500, 8, 11, 32, False),
        (500, 1, 11, 32, True),
        (1, 1, 1, 0, True),
        (0, 1, 64, 0, False),
    ],
)
def test_what_a_slot_is_worth(
    saving: int, among: int, running: int, answer: int, pays: bool
) -> None:
    keeping = SlotTradeoff(float(answer))
    assert keeping.pays(saving, among=among, running=running) == pays


def test_answers_are_averaged() -> None:
    keeping = SlotTradeoff()
    for _ in range(300):
        keeping.ended(64)
    assert 63 < keeping.answer < 64
