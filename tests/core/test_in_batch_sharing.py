# SPDX-License-Identifier: Apache-2.0
"""Who waits for whom, and what that saves."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from functools import partial

import pytest

from hybrid_plugin.core.cache import HybridCache
from hybrid_plugin.core.policy.in_batch_sharing import (
    InBatchPrefixSharing,
    Prefill,
    waiting_prefill,
)
from tests.core.support import Tokens, make_cache, span, start, state

FEWEST = 8
SYSTEM = span(0, 18)
"""Four pages of 4, and a half."""


def prompt(own: int, shared: Tokens = SYSTEM) -> Tokens:
    """A prompt of its own behind what it budgets."""
    return shared + span(own, own + 10)


class Queue:
    """Sequences that wait, each with a namespace."""

    def __init__(self, cache: HybridCache, fewest: int = FEWEST) -> None:
        cache.policy = replace(cache.policy, in_batch_prefix_min_tokens=fewest)
        self.cache = cache
        self.following = InBatchPrefixSharing(cache)
        self.prompts: dict[str, tuple[Tokens, Hashable]] = {}

    def add(self, seq_id: str, tokens: Tokens, namespace: Hashable = None) -> None:
        self.prompts[seq_id] = (tokens, namespace)

    def plan(self) -> list[str]:
        """Who is held."""
        waiting = [(seq_id, partial(self.prefill, seq_id)) for seq_id in self.prompts]
        self.following.plan(waiting)
        return [seq_id for seq_id in self.prompts if self.following.holds(seq_id)]

    def prefill(self, seq_id: str) -> Prefill:
        return waiting_prefill(self.cache, seq_id, *self.prompts[seq_id])

    def admit(self, seq_id: str, chunk: int | None = None) -> int:
        """Admit one and schedule its first chunk; returns its hit."""
        tokens, namespace = self.prompts.pop(seq_id)
        pauses = self.following.pauses_of(seq_id)
        found = self.cache.look_up(tokens, namespace, pause_at=pauses)
        hit = found.match.length
        end = min(len(tokens), hit + (chunk or len(tokens)))
        end = self.cache.chunk_end(found.snapshot_positions, hit, end, len(tokens))
        assert self.cache.admit(seq_id, found, num_tokens=end) is not None
        self.cache.drain_commands()
        self.cache.advance(seq_id, end)
        return hit


def late_to(chunk: int) -> Queue:
    """One that waits while another has computed a chunk of what both begin with."""
    queue = Queue(make_cache())
    queue.add("live", prompt(100))
    queue.plan()
    queue.admit("live", chunk=chunk)
    queue.add("late", prompt(200))
    return queue


def test_the_first_leads_and_pauses_where_the_others_part_from_it() -> None:
    queue = Queue(make_cache())
    for number in range(3):
        queue.add(f"s{number}", prompt(100 * number))
    assert queue.plan() == ["s1", "s2"]
    assert queue.following.pauses_of("s0") == (16,)
    assert queue.cache.stats.in_batch_prefix_waits == 2
    assert queue.admit("s0") == 0
    assert queue.cache.sequence("s0").computed == 16
    assert queue.plan() == []
    assert queue.admit("s1") == queue.admit("s2") == 16


def test_what_follows_restores_what_the_leader_saved() -> None:
    queue = Queue(make_cache())
    queue.add("leader", prompt(100))
    queue.add("other", prompt(200))
    queue.plan()
    queue.admit("leader")
    saved = queue.cache.drain_commands()
    assert saved == [state(1, 2)], "the state after the pause"
    queue.plan()
    found = queue.cache.look_up(prompt(200))
    assert queue.cache.admit("other", found, num_tokens=28) is not None
    assert queue.cache.drain_commands() == [state(2, 3)]


def test_a_live_sequence_leads_too() -> None:
    queue = late_to(chunk=4)
    assert queue.plan() == ["late"]
    assert queue.cache.snapshot_positions_of("live") == (16,)


def test_nobody_waits_for_what_has_passed() -> None:
    queue = late_to(chunk=20)
    assert queue.plan() == []


def test_nobody_waits_for_a_sequence_that_ended() -> None:
    queue = late_to(chunk=4)
    assert queue.plan() == ["late"]
    queue.cache.finish("live", prompt(100), 4)
    assert queue.plan() == []


@pytest.mark.parametrize(("shared", "held"), [(7, []), (8, ["second"])])
def test_waiting_must_save_enough(shared: int, held: list[str]) -> None:
    queue = Queue(make_cache())
    queue.add("first", prompt(100, span(0, shared)))
    queue.add("second", prompt(200, span(0, shared)))
    assert queue.plan() == held


def test_what_is_cached_is_not_saved_by_waiting() -> None:
    cache = make_cache()
    start(cache, "before", SYSTEM[:12])
    cache.advance("before", 12)
    cache.finish("before", SYSTEM[:12], 12)
    queue = Queue(cache)
    queue.add("first", prompt(100))
    queue.add("second", prompt(200))
    assert queue.plan() == [], "12 of 16 are there"
    queue.add("third", (*prompt(100)[:-1], 0))
    assert queue.plan() == ["third"], "24 of 28 would be"


def test_the_same_prompt_again_waits_for_all_but_its_end() -> None:
    queue = Queue(make_cache())
    queue.add("first", span(0, 16))
    queue.add("second", span(0, 16))
    assert queue.plan() == ["second"]
    assert queue.following.pauses_of("first") == (12,), "one token is to be computed"


def test_a_pause_that_is_planned_will_do() -> None:
    queue = Queue(make_cache(pages=65))
    long = span(0, 64)
    queue.add("leader", (*long, 1000))
    queue.add("near", (*long[:52], 2000))
    queue.add("far", (*long[:60], 3000))
    assert queue.plan() == ["near", "far"]
    assert queue.following.pauses_of("leader") == (52,), "not 60 as well"


def test_another_namespace_does_not_lead() -> None:
    queue = Queue(make_cache())
    queue.add("first", prompt(100), "one")
    queue.add("second", prompt(200), "another")
    assert queue.plan() == []


def test_what_must_not_be_shared_does_not_lead() -> None:
    queue = Queue(make_cache())
    found = queue.cache.look_up(prompt(100))
    queue.cache.admit("private", found, num_tokens=4, cacheable=False)
    queue.add("late", prompt(200))
    assert queue.plan() == []


def test_nobody_waits_if_that_is_switched_off() -> None:
    queue = Queue(make_cache(), fewest=0)
    queue.add("first", prompt(100))
    queue.add("second", prompt(200))
    assert queue.plan() == []


def test_who_waits_is_counted_once() -> None:
    queue = late_to(chunk=4)
    queue.plan()
    queue.cache.advance("live", 8)
    assert queue.plan() == ["late"]
    assert queue.cache.stats.in_batch_prefix_waits == 1


def test_a_position_behind_is_no_pause() -> None:
    cache = make_cache()
    start(cache, "a", prompt(100))
    cache.advance("a", 8)
    for position in (8, 28):
        with pytest.raises(ValueError, match="does not get to"):
            cache.pause_at("a", position)
