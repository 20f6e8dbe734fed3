# SPDX-License-Identifier: Apache-2.0
"""Memory for a whole prompt moves when it is admitted, not at every step."""

from __future__ import annotations

from collections.abc import Sequence

from hybrid_plugin.core.cache import HybridCache
from hybrid_plugin.core.commands import Command, Map, Pool, Unmap
from hybrid_plugin.core.memory.elastic import ElasticBroker
from tests.core.audit import audit
from tests.core.elastic import ElasticSetup
from tests.core.support import (
    NO_SNAPSHOTS,
    Tokens,
    admit,
    make_cache,
    serve,
    span,
    start,
)

LONG = span(0, 48)


def full_cache(chunk_end: int = NO_SNAPSHOTS) -> HybridCache:
    """Pages of 4 tokens in granules of 2; 40 bytes, of which slots have 33."""
    cache = ElasticSetup(
        pages=60,
        slots=20,
        budget=40,
        prompt_end_min=NO_SNAPSHOTS,
        chunk_end_min=chunk_end,
        economical=False,  # nobody waits for what is cached
    ).build()
    for number in range(10):
        serve(cache, f"short {number}", span(1000 + 10 * number, 1004 + 10 * number))
    assert isinstance(cache.broker, ElasticBroker)
    assert cache.broker.slack < 2
    cache.drain_commands()
    return cache


def moves(commands: Sequence[Command]) -> list[Command]:
    return [command for command in commands if isinstance(command, Map | Unmap)]


def moving_steps(cache: HybridCache, tokens: Tokens, reserve: int) -> list[int]:
    """Ends of the steps of a prefill that wait for memory."""
    start(cache, "long", tokens, num_tokens=8, reserve_tokens=reserve)
    steps = []
    for end in range(8, len(tokens) + 1, 8):
        assert cache.grow("long", end) is not None
        if moves(cache.drain_commands()):
            steps.append(end)
        cache.advance("long", end)
        audit(cache)
    return steps


def test_a_long_prompt_waits_once() -> None:
    assert moving_steps(full_cache(), LONG, reserve=len(LONG)) == [8]


def test_two_prompts_at_a_time_do_not_take_each_other_s() -> None:
    cache = full_cache()
    prompts = {"a": LONG[:32], "b": span(100, 132)}
    for name, tokens in prompts.items():
        start(cache, name, tokens, num_tokens=8, reserve_tokens=len(tokens))
    assert moves(cache.drain_commands())
    for end in range(16, 33, 8):
        for name in prompts:
            assert cache.grow(name, end) is not None
            cache.advance(name, end)
    assert moves(cache.drain_commands()) == []
    audit(cache)


def test_without_a_reserve_it_waits_again_and_again() -> None:
    assert moving_steps(full_cache(), LONG, reserve=0) == [16, 32, 40, 48]


def test_snapshots_on_the_way_do_not_take_it_back() -> None:
    cache = full_cache(chunk_end=8)
    assert moving_steps(cache, LONG, reserve=len(LONG)) == [8]
    assert cache.stats.snapshots_taken > 10


def test_what_was_promised_to_a_sequence_ends_with_it() -> None:
    cache = full_cache()
    start(cache, "long", LONG, num_tokens=8, reserve_tokens=len(LONG))
    assert cache.sequence("long").promised == 10
    cache.finish("long", LONG, 0)
    assert cache.promised_pages() == 0
    audit(cache)
    start(cache, "short", span(500, 504))
    assert cache.sequence("short").promised == 0
    audit(cache)


def test_nobody_starts_on_what_was_promised() -> None:
    cache = full_cache()
    start(cache, "long", LONG, num_tokens=8, reserve_tokens=len(LONG))
    running = 0
    while admit(cache, f"other {running}", span(500, 504)) is not None:
        running += 1
    assert running == 5
    assert isinstance(cache.broker, ElasticBroker)
    assert cache.broker.fits({Pool.STATE: 1}), "it is kept for the prompt's rest"
    for end in range(16, 49, 8):
        assert cache.grow("long", end) is not None
        cache.advance("long", end)
    audit(cache)


def test_nor_where_memory_does_not_move() -> None:
    cache = make_cache(pages=16, slots=6)
    start(cache, "long", LONG, num_tokens=8, reserve_tokens=len(LONG))
    assert cache.pages.free == 13 and cache.promised_pages() == 10
    assert admit(cache, "a", span(500, 512)) is not None
    assert admit(cache, "b", span(600, 604)) is None
    assert cache.grow("long", 48) is not None
    audit(cache)


def test_what_a_running_sequence_generates_may_take_it() -> None:
    cache = make_cache(pages=16, slots=6)
    start(cache, "a", span(500, 512))
    start(cache, "long", LONG, num_tokens=8, reserve_tokens=len(LONG))
    assert cache.pages.free == cache.promised_pages() == 10
    assert cache.grow("a", 16) is not None
    audit(cache)
