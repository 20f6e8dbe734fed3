# SPDX-License-Identifier: Apache-2.0
"""Every way in which SGLang drops or retracts requests, with a parked one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.environ import envs
from sglang.srt.managers.io_struct import AbortReq, PauseGenerationReqInput
from sglang.srt.managers.min_free_slots_delayer import MinFreeSlotsDelayer
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.runtime_context import get_context

from hybrid_plugin.sglang import patches
from tests.sglang.fakes import Bench, pausing, request

AT = 8
"""Where the parked request paused."""


@pytest.fixture(autouse=True)
def configured() -> Iterator[None]:
    with get_context().override_server_args():
        yield


@pytest.fixture
def bench() -> Bench:
    """With one parked request, and one that waits behind it."""
    bench = Bench()
    bench.park(pausing("parked", range(20), at=AT, priority=0))
    bench.scheduler.last_batch = None
    bench.queue(request("new", range(100, 110), priority=5))
    return bench


def parked(bench: Bench) -> Req:
    """The parked request."""
    return next(r for r in bench.scheduler.waiting_queue if bench.cache.is_parked(r))


def by_id(scheduler: Any) -> None:
    """A client aborts, or goes."""
    scheduler.abort_request(AbortReq(rid="parked"))


def all_at_once(scheduler: Any) -> None:
    """Before a weight update, or on request."""
    scheduler.abort_request(AbortReq(abort_all=True))


def by_deadline(scheduler: Any) -> None:
    """As SGLang tells its ranks of a time-out."""
    late = AbortReq(rid="parked", abort_message="late", finished_reason=None)
    scheduler.abort_request(late)


def by_priority(scheduler: Any) -> None:
    """The queue is full, and a request comes that is worth more."""
    scheduler.max_queued_requests = 2
    newcomer = request("newcomer", range(5), priority=10)
    assert not scheduler._abort_on_queued_limit(newcomer)


def test_parked_requests_wait_for_no_free_slots(bench: Bench) -> None:
    """SGLang's delay of new requests stands aside for them, and is there again."""
    delayer, seen = MinFreeSlotsDelayer(4), []
    scheduler = bench.scheduler
    scheduler.min_free_slots_delayer = delayer

    def plan(scheduler: Any, batch: str, running_batch: Any) -> str:
        seen.append(scheduler.min_free_slots_delayer)
        return batch

    assert patches._let_parked_go_on(plan, scheduler, "b", running_batch=None) == "b"
    assert seen == [None] and scheduler.min_free_slots_delayer is delayer
    scheduler.abort_request(AbortReq(rid="parked"))
    assert bench.cache.num_parked == 0
    patches._let_parked_go_on(plan, scheduler, "b", running_batch=None)
    assert seen == [None, delayer]


DROPS = {"id": by_id, "all": all_at_once, "time": by_deadline, "priority": by_priority}


@pytest.mark.parametrize("drop", DROPS.values(), ids=DROPS)
def test_a_parked_request_that_is_dropped_leaves_nothing(
    bench: Bench, drop: Callable[[Any], None]
) -> None:
    req = parked(bench)
    drop(bench.scheduler)
    assert req not in bench.scheduler.waiting_queue
    assert "parked" in bench.scheduler.told
    assert not req.kv.holds_kv
    assert not req.kv.holds_mamba
    bench.assert_idle()


def remembered(bench: Bench) -> dict[str, int]:
    """Entries in everything that the adapter and the core keep by request."""
    cache, core = bench.cache, bench.core
    return {
        "requests": len(cache._requests),
        "waiting": cache.front_door.waiting,
        "paused": len(cache._paused),
        "parked": len(cache._parked),
        "held": len(cache.front_door._sharing._held),
        "pauses": len(cache.front_door._sharing._pauses),
        "sequences": core.live,
        "commands": len(core._commands),
    }


@pytest.mark.parametrize("running", [False, True], ids=["parked", "running"])
def test_prompts_that_are_given_up_again_and_again_leave_nothing(running: bool) -> None:
    """Long prompts whose clients go, parked or while a chunk runs, one upon the other.

    They fill the pools many times over.  What is left is what pools and tree hold.
    """
    bench = Bench(pages=64, slots=9)
    nodes = []
    for number in range(100):
        tokens = range(1000 * number, 1000 * number + 120)
        bench.park(pausing("parked", tokens, at=40))
        if running:
            bench.scheduler.last_batch = None
            assert bench.step(chunk=40) == ["parked"]
        by_id(bench.scheduler)
        bench.scheduler.waiting_queue.clear()
        assert bench.step() == []
        bench.scheduler.last_batch = None
        bench.scheduler.running_batch.reqs.clear()
        bench.cache.run_commands()
        assert set(remembered(bench).values()) == {0}, remembered(bench)
        bench.assert_idle()
        nodes.append(sum(1 for _ in bench.core.tree.nodes()))
    assert len(bench.scheduler.told) == 100
    assert max(nodes[50:]) <= max(nodes[:50]), "the tree grows with each prompt"


def test_what_a_dropped_request_computed_stays_in_the_cache(bench: Bench) -> None:
    by_id(bench.scheduler)
    bench.queue(request("again", range(20)))
    bench.step()
    assert bench.scheduler.waiting_queue == []
    assert bench.core.stats.hit_tokens == AT


def test_an_abort_while_a_chunk_runs_ends_the_prompt(bench: Bench) -> None:
    req = parked(bench)
    req.sampling_params.custom_params = None
    assert bench.step(chunk=4)[:1] == ["parked"]
    by_id(bench.scheduler)
    assert req.to_finish is not None  # it is in the last batch, not in the queue
    bench.scheduler.waiting_queue.clear()
    assert bench.step() == []
    assert bench.scheduler.told == ["parked"]
    bench.assert_idle()
    # Under overlap the chunk's result comes later: it must not answer again.
    assert isinstance(req.finished_reason, FINISH_ABORT)
    assert req.finished_output


def test_the_queue_limit_counts_and_drops_no_parked_request(bench: Bench) -> None:
    bench.scheduler.max_queued_requests = 1
    limit = Scheduler._abort_on_queued_limit
    newcomer = request("newcomer", range(5), priority=10)
    assert not patches._hide_parked(limit, bench.scheduler, newcomer)
    assert bench.scheduler.told == ["new"]
    assert [r.rid for r in bench.scheduler.waiting_queue] == ["parked"]
    assert not patches._hide_parked(limit, bench.scheduler, newcomer)
    assert bench.scheduler.told == ["new"]


def test_the_deadline_of_the_queue_is_for_requests_that_wait(bench: Bench) -> None:
    for req in bench.scheduler.waiting_queue:
        req.time_stats.wait_queue_entry_time = time.perf_counter() - 100
    poll = Scheduler._poll_timeout_aborts
    with envs.SGLANG_REQ_WAITING_TIMEOUT.override(10):
        aborts = patches._hide_parked(poll, bench.scheduler)
    assert [abort.rid for abort in aborts] == ["new"]
    assert [r.rid for r in bench.scheduler.waiting_queue] == ["parked", "new"]


def pause(bench: Bench, mode: str) -> None:
    """As SGLang's hook registry calls it."""
    order = PauseGenerationReqInput(mode=mode)
    scheduler: Any = bench.scheduler
    patches._park_for_a_pause(scheduler, order)
    scheduler.pause_generation(order)
    patches._retract(None, scheduler, order)


def test_retraction_takes_parked_requests_too(bench: Bench) -> None:
    req = parked(bench)
    pause(bench, "retract")
    bench.assert_idle()
    assert [r.rid for r in bench.scheduler.waiting_queue] == ["parked", "new"]
    bench.cache.reset()  # as after an update of the weights
    assert bench.step() == ["parked", "new"]
    assert req.prefix_len == 0


def test_retraction_takes_a_request_whose_pause_is_still_in_a_batch() -> None:
    bench = Bench()
    bench.queue(pausing("paused", range(20), at=AT))
    assert bench.step() == ["paused"]
    pause(bench, "retract")
    bench.assert_idle()
    bench.cache.reset()
    assert bench.step() == ["paused"]
    assert bench.core.live == 1


@pytest.mark.parametrize("is_parked", [False, True])
def test_a_pause_of_a_prefill_server_loses_no_unfinished_prompt(
    is_parked: bool,
) -> None:
    """Another server has part of it: it goes on, and nothing is flushed meanwhile."""
    bench = Bench()
    bench.scheduler.disaggregation_mode = DisaggregationMode.PREFILL
    req = pausing("paused", range(20), at=AT)
    if is_parked:
        bench.park(req)
        bench.scheduler.last_batch = None
    else:
        bench.queue(req)
        assert bench.step() == ["paused"]
    pause(bench, "retract")
    assert [one.rid for one in bench.scheduler.waiting_queue] == ["paused"]
    assert bench.cache.is_parked(req) and req.kv.holds_kv
    with pytest.raises(RuntimeError, match="still hold pages"):
        bench.cache.reset()  # which SGLang does not call while somebody waits with KV
    assert bench.step() == ["paused"]
    assert req.prefix_len == AT and req.extend_end == 20


def test_a_pause_in_place_keeps_parked_requests(bench: Bench) -> None:
    pause(bench, "in_place")
    assert bench.cache.is_parked(parked(bench))
    assert bench.step() == ["parked", "new"]
    assert bench.core.stats.hit_tokens == 0


def test_a_stream_has_no_answer_of_a_paused_request(bench: Bench) -> None:
    sent: list[str] = []
    answering = request("answering", range(4))
    answering.output_ids.append(7)

    def original(streamer: Any, reqs: list[Req], *_: Any) -> None:
        sent.extend(req.rid for req in reqs)

    reqs = [parked(bench), answering]
    ours = SimpleNamespace(tree_cache=bench.cache)
    patches._stream(original, ours, reqs, False)
    assert sent == ["answering"]


def test_a_stream_without_our_cache_is_left_alone(bench: Bench) -> None:
    sent: list[str] = []

    def original(streamer: Any, reqs: list[Req], *_: Any) -> None:
        sent.extend(req.rid for req in reqs)

    stock = SimpleNamespace(tree_cache=object())
    patches._stream(original, stock, [parked(bench)], False)
    assert sent == ["parked"]
