# SPDX-License-Identifier: Apache-2.0
"""The request's front door on plain requests, without an engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from hybrid_plugin.config import HybridConfig
from hybrid_plugin.core.cache import HybridCache
from hybrid_plugin.core.commands import Pool
from hybrid_plugin.core.memory.pools import PagePool, SlotPool
from hybrid_plugin.core.policy.in_batch_sharing import LOOK_AHEAD
from hybrid_plugin.core.tiers.host_plan import HostPlan
from hybrid_plugin.core.tiers.host_tier import HostTier
from hybrid_plugin.core.tiers.restores import TransferRates
from hybrid_plugin.core.tree.tokens import as_tokens
from hybrid_plugin.engine.front_door import FrontDoor
from tests.core.outer import FakeTier
from tests.core.support import ByMinimum

PAGE = 4


@dataclass
class Request:
    """A request whose tokens count up from `first`."""

    seq_id: str
    num_tokens: int
    first: int = 0
    space: Hashable = None
    cacheable: bool = True
    may_hit: bool = True
    may_pause: bool = True
    is_check: bool = False
    hint: Any = None
    resumed: bool = False
    is_over: bool = True
    reads: int = 0
    """How often its tokens were read."""
    max_tokens: int = 0

    def tokens(self) -> Sequence[int]:
        self.reads += 1
        return list(range(self.first, self.first + self.num_tokens))

    def namespace(self) -> Hashable:
        return self.space


def door(
    pages: int = 40,
    slots: int = 9,
    *,
    sharing: int = 0,
    clock: Callable[[], float] | None = lambda: 0.0,
    canonical: bool = False,
) -> FrontDoor:
    options = HybridConfig(in_batch_prefix_min_tokens=sharing)
    policy = options.snapshot_policy(PAGE)
    if canonical:
        policy = replace(policy, grid=2 * PAGE, canonical=True)
    cache = HybridCache(
        PagePool(pages), SlotPool(slots), PAGE, policy, eviction=ByMinimum()
    )
    return FrontDoor(cache, logging.getLogger(__name__), clock)


def run(to: FrontDoor, request: Request, upto: int | None = None) -> int:
    """Look a request up, admit it and compute it; returns its hit."""
    found = to.look_up(request)
    hit = found.match.length
    assert to.admit(request, hit, num_tokens=request.num_tokens) is not None
    start, last = hit, upto or request.num_tokens
    while start < last:
        start = to.chunk_end(request, start, last)
        to.advance(request.seq_id, start)
    return hit


def serve(to: FrontDoor, request: Request) -> int:
    hit = run(to, request)
    to.end(request, request.num_tokens)
    return hit


def assert_idle(to: FrontDoor) -> None:
    assert to.waiting == 0 and to.cache.live == 0
    levels = to.cache.levels()
    assert levels["kv"].used == levels["state"].used == 0


def test_a_request_leaves_what_the_next_one_resumes() -> None:
    to = door()
    assert serve(to, Request("a", 10)) == 0
    assert serve(to, Request("b", 12)) == 10
    assert_idle(to)


def test_a_look_up_that_is_stale_is_repeated() -> None:
    to = door()
    late = Request("late", 12, first=100)
    to.look_up(late)
    serve(to, Request("other", 10))
    assert to.admit(late, 0, num_tokens=12) is not None
    assert late.reads == 1


def test_a_hit_that_is_gone_is_not_admitted() -> None:
    to = door()
    serve(to, Request("a", 10))
    late = Request("late", 12)
    hit = to.look_up(late).match.length
    assert hit == 10 and to.cache.flush()
    assert to.admit(late, hit, num_tokens=12) is None
    assert to.cache.live == 0
    assert run(to, late) == 0


def test_a_hit_that_the_engine_cut_short_is_what_is_restored() -> None:
    to = door()
    serve(to, Request("a", 10, hint={"hybrid_keep": [4]}))
    cut = Request("cut", 12)
    assert to.look_up(cut).match.length == 10
    admission = to.admit(cut, 4, num_tokens=12)
    assert admission is not None and admission.hit == 4


def test_a_request_that_was_never_looked_up_is_looked_up_at_admission() -> None:
    to = door()
    assert to.admit(Request("a", 10), 0, num_tokens=10) is not None


def test_tokens_are_read_once_while_it_waits_and_runs() -> None:
    to = door(pages=4)
    filler, one = Request("filler", 12, first=100), Request("one", 12)
    run(to, filler)
    for _ in range(3):
        to.plan_sharing([one])
        assert to.admit(one, to.look_up(one).match.length, num_tokens=12) is None
    to.end(filler, 12)
    run(to, one)
    assert one.reads == 1


def test_tokens_that_grew_are_read_again() -> None:
    to = door()
    one = Request("one", 10)
    to.look_up(one)
    one.num_tokens = 12
    assert to.look_up(one).length == 12


def test_a_request_that_may_not_hit_still_leaves_what_others_hit() -> None:
    to = door()
    serve(to, Request("a", 10))
    assert serve(to, Request("b", 12, may_hit=False)) == 0
    assert serve(to, Request("c", 14)) == 12


def test_a_request_that_is_not_cacheable_leaves_nothing() -> None:
    to = door()
    serve(to, Request("a", 10))
    assert serve(to, Request("b", 12, cacheable=False)) == 0
    assert serve(to, Request("c", 14)) == 10


def test_namespaces_keep_requests_apart() -> None:
    to = door()
    serve(to, Request("a", 10, space="x"))
    assert serve(to, Request("b", 12, space="y")) == 0
    assert serve(to, Request("c", 12, space="x")) == 10


def test_chunks_end_at_snapshot_positions() -> None:
    to = door()
    one = Request("one", 20, hint={"hybrid_keep": [8]})
    to.look_up(one)
    assert to.chunk_end(one, 0, 20) == 8  # before it is admitted
    to.admit(one, 0, num_tokens=20)
    assert to.chunk_end(one, 0, 20) == 8
    assert to.chunk_end(one, 8, 20) == 20


def test_a_request_that_may_not_pause_is_not_cut() -> None:
    to = door()
    one = Request("one", 20, hint={"hybrid_keep": [8]}, may_pause=False)
    to.look_up(one)
    assert to.chunk_end(one, 0, 20) == 20


def test_a_bad_hint_costs_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    to = door()
    for name in ("a", "b"):
        assert to.look_up(Request(name, 20, hint={"hybrid_keep": "x"}))
    assert len(caplog.records) == 1


def promised(to: FrontDoor) -> list[int]:
    """Positions whose use is promised now."""
    return sorted(
        node.end
        for node in to.cache.tree.nodes()
        if node.snapshot is not None and node.snapshot.promise
    )


def test_a_ttl_begins_at_the_end_and_is_over_in_time() -> None:
    now = [100.0]
    to = door(clock=lambda: now[0])
    hint = {"hybrid_keep": [9], "hybrid_ttl": 30}
    one = Request("one", 20, hint=hint)
    run(to, one)
    now[0] = 200.0
    to.end(one, 20)
    now[0] = 229.9
    serve(to, Request("other", 8, first=900))
    assert promised(to) == [8, 20]
    now[0] = 230.0
    serve(to, Request("third", 8, first=950))
    assert promised(to) == []
    assert to.cache.stats.promises_broken == 1


def test_a_turn_that_nobody_continues_leaves_nothing_but_after_a_preemption() -> None:
    to = door()
    assert serve(to, Request("a", 10, hint={"hybrid_ttl": 0})) == 0
    assert serve(to, Request("a", 12, hint={"hybrid_ttl": 0}, is_over=False)) == 0
    assert serve(to, Request("a", 13, hint={"hybrid_ttl": 0}, resumed=True)) == 12
    assert_idle(to)


def test_who_may_not_hit_has_a_ttl_too() -> None:
    to = door()
    serve(to, Request("a", 10, may_hit=False, hint={"hybrid_ttl": 5}))
    assert promised(to) == [10]


def test_without_a_common_time_ttls_are_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    to = door(clock=None)
    for name in ("a", "b"):
        serve(to, Request(name, 10, hint={"hybrid_ttl": 5}))
    assert promised(to) == []
    assert len(caplog.records) == 1 and "hybrid_ttl needs one scheduler" in caplog.text
    serve(to, Request("c", 10, first=50, hint={"hybrid_ttl": 0}))
    assert serve(to, Request("d", 12, first=50)) == 0


def test_requests_with_one_prefix_wait_for_the_first() -> None:
    to = door(sharing=8)
    leader, follower = Request("leader", 40), Request("follower", 41)
    to.plan_sharing([leader, follower])
    assert to.must_wait("follower") and not to.must_wait("leader")
    run(to, leader, upto=36)
    to.plan_sharing([follower])
    assert not to.must_wait("follower")
    assert run(to, follower) == 36


@pytest.mark.parametrize("field", ["cacheable", "may_hit"])
def test_who_cannot_hit_does_not_wait(field: str) -> None:
    to = door(sharing=8)
    unable = Request("unable", 41, **{field: False})
    to.plan_sharing([Request("leader", 40), unable])
    assert not to.must_wait("unable")


@pytest.mark.parametrize("may_hit", [True, False])
def test_a_long_queue_costs_no_more_than_its_beginning(may_hit: bool) -> None:
    """Whatever waits: a step looks at as many requests as may be admitted soon."""
    to, read = door(sharing=8), []

    def queue() -> Iterator[Request]:
        for number in range(10_000):
            read.append(number)
            yield Request(f"other {number}", 40, first=number, may_hit=may_hit)

    to.plan_sharing(queue())
    assert len(read) <= LOOK_AHEAD + 1


def test_those_that_have_begun_do_not_hide_those_behind_them() -> None:
    """An engine may queue paused prompts again, ahead of the others."""
    to = door(sharing=8)
    begun = Request("begun", 30, first=900)
    run(to, begun, upto=8)
    queue = [begun] * LOOK_AHEAD
    to.plan_sharing([*queue, Request("leader", 40), Request("follower", 40)])
    assert to.must_wait("follower")


def test_those_that_cannot_share_do_not_hide_those_behind_them() -> None:
    to = door(sharing=8)
    queue = [Request(f"other {i}", 40, may_hit=False) for i in range(LOOK_AHEAD - 2)]
    to.plan_sharing([*queue, Request("leader", 40), Request("follower", 40)])
    assert to.must_wait("follower")


def test_an_admission_that_is_not_used_gives_all_back() -> None:
    to = door()
    one = Request("one", 10)
    to.admit(one, to.look_up(one).match.length, num_tokens=10)
    to.withdraw("one")
    to.withdraw("one")  # not live any more: nothing to do
    assert_idle(to)


def test_an_end_before_admission_forgets_the_request() -> None:
    to = door()
    one = Request("one", 10)
    to.look_up(one)
    to.end(one, 0)
    assert_idle(to)
    assert one.reads == 1


def test_a_step_of_a_request_that_ended_meanwhile_does_nothing() -> None:
    to = door()
    one = Request("one", 10)
    serve(to, one)
    to.advance("one", 11)
    assert_idle(to)


def test_a_flush_waits_for_live_requests() -> None:
    to = door()
    one = Request("one", 10)
    run(to, one)
    assert not to.flush()
    to.end(one, 10)
    to.look_up(Request("two", 10))
    assert to.flush() and to.waiting == 0
    assert serve(to, Request("three", 12)) == 0


def test_a_deterministic_request_has_room_for_its_whole_answer() -> None:
    """Nobody may be preempted: an answer that is computed again has other bits."""
    for canonical, admitted in ((False, True), (True, False)):
        to = door(pages=6, canonical=canonical)
        first = Request("first", 8, max_tokens=12)
        second = Request("second", 8, first=50, max_tokens=12)
        for request in (first, second):
            to.look_up(request)
        assert to.admit(first, 0, num_tokens=8) is not None
        assert (to.admit(second, 0, num_tokens=8) is not None) == admitted


# ------------------------------------------------------------ behind the host


def disk_door(now: list[float]) -> tuple[FrontDoor, Request]:
    """A front door behind which only the disk has a request's first 8 tokens.

    Bytes come at one in a second, from the disk and from the host, and to compute a
    token takes ten seconds.

    Args:
        now: the time, which the test moves on.
    """
    plan = HostPlan({Pool.KV: 1, Pool.STATE: 4}, block_bytes=4, blocks=16)
    cache = HybridCache(
        PagePool(40),
        SlotPool(9),
        PAGE,
        HybridConfig().snapshot_policy(PAGE),
        eviction=ByMinimum(),
        host=HostTier(plan, PAGE, ByMinimum()),
        rates=TransferRates(1.0, 10.0),
        tiers=(FakeTier(100, 1.0),),
    )
    to = FrontDoor(cache, logging.getLogger(__name__), lambda: now[0])
    serve(to, Request("chat", 8))
    cache.drain_commands()
    cache.lower_tiers.done(1, True)
    assert cache.host is not None
    while cache.memory.evict_pages(1_000) or cache.host.memory.evict_pages(1_000):
        pass
    run(to, Request("runs", 12, first=500))
    return to, Request("next", 12)


def test_a_request_waits_for_the_disk_and_then_for_the_host() -> None:
    now = [0.0]
    to, request = disk_door(now)
    assert to.must_wait_for_restore(request) and to.is_restoring("next")
    now[0] = 50.0
    to.pass_time()
    assert to.must_wait_for_restore(request), "nothing was reported"
    to.cache.lower_tiers.done(2, True)
    assert to.must_wait_for_restore(request), "it is on the host"
    now[0] = 60.0
    to.pass_time()
    assert not to.must_wait_for_restore(request)
    assert run(to, request) == 8


def test_a_request_computes_what_the_disk_cannot_give() -> None:
    to, request = disk_door([0.0])
    assert to.must_wait_for_restore(request)
    to.cache.lower_tiers.done(2, False, reason="corrupt")
    assert not to.must_wait_for_restore(request)
    assert run(to, request) == 0


def test_a_request_does_not_wait_for_a_disk_that_hangs() -> None:
    """8 tokens are computed in 80 seconds, and each running request waits for that."""
    now = [0.0]
    to, request = disk_door(now)
    assert to.must_wait_for_restore(request)
    now[0] = 80.0 * (1 + to.cache.live)
    to.pass_time()
    assert not to.must_wait_for_restore(request) and not to.is_restoring("next")
    assert not to.must_wait_for_restore(Request("other", 12)), "it is late for all"
    assert run(to, request) == 0
    to.cache.lower_tiers.done(2, True)


def test_a_request_that_leaves_lets_a_fetch_go_on() -> None:
    to, request = disk_door([0.0])
    assert to.must_wait_for_restore(request)
    to.end(request, 0)
    assert to.waiting == 0 and to.cache.lower_tiers.fetching == 1
    to.cache.lower_tiers.done(2, True)
    assert to.must_wait_for_restore(Request("same", 12)), "from the host now"
    assert to.cache.lower_tiers.fetching == 0


def test_what_was_fetched_for_a_request_stays_until_it_comes_or_is_over() -> None:
    now = [0.0]
    for ends in (False, True):
        to, request = disk_door(now)
        assert to.must_wait_for_restore(request)
        to.cache.lower_tiers.done(2, True)
        if ends:
            to.end(request, 0)
        assert to.cache.host is not None
        while to.cache.host.memory.evict_pages(1_000):
            pass
        kept = to.cache.host.match(None, as_tokens(request.tokens()), 12).length
        assert kept == (0 if ends else 8)
    to, request = disk_door(now)
    assert to.must_wait_for_restore(request)
    to.cache.lower_tiers.done(2, True)
    assert to.must_wait_for_restore(request), "it is on the host"
    now[0] += 60.0
    to.pass_time()
    assert not to.must_wait_for_restore(request)
    assert run(to, request) == 8
    assert to.cache.host is not None
    assert not any(level.used for level in to.cache.host.levels().values())
