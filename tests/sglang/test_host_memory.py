# SPDX-License-Identifier: Apache-2.0
"""Requests whose prefix the device forgot, and the host has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

import torch
from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.schedule_batch import Req, release_req
from sglang.srt.runtime_context import get_context

from hybrid_plugin.core.cache import HybridCache
from hybrid_plugin.core.commands import Await, Command, Load, Pool, Store
from hybrid_plugin.core.memory.pools import PagePool, SlotPool
from hybrid_plugin.core.policy.costs import CPU_PASS_TOKENS
from hybrid_plugin.core.tiers.host_plan import plan_host
from hybrid_plugin.core.tiers.host_tier import HostTier
from hybrid_plugin.core.tiers.restores import TransferRates
from hybrid_plugin.sglang import host_steps, patches
from hybrid_plugin.sglang.allocator import most_pages
from hybrid_plugin.sglang.parking import retract_parked
from tests.core.support import ByMinimum
from tests.sglang.fakes import PAGE, POLICY, Bench, pausing, request

LENGTH = 32
"""Tokens of a prompt: eight pages."""


@pytest.fixture(autouse=True)
def configured() -> Iterator[None]:
    with get_context().override_server_args():
        yield


class HostBench(Bench):
    """Pools for two prompts, host memory for many; a token's prefill takes a second."""

    def __init__(self, pages: int = 21, slots: int = 5, rows: int = 9) -> None:
        super().__init__(pages, slots, rows)
        self.ran: list[Command] = []
        self.cache._executor.run = self.ran.extend  # type: ignore[method-assign]
        self.clock.token_seconds = 1.0
        self.clock.now = 100.0

    def make_core(self, pages: int, slots: int) -> HybridCache:
        plan = plan_host({Pool.KV: 64, Pool.STATE: 256}, 1 << 20)
        return HybridCache(
            PagePool(pages),
            SlotPool(slots),
            PAGE,
            POLICY,
            eviction=ByMinimum(),
            host=HostTier(plan, PAGE, ByMinimum()),
            rates=TransferRates(load_bytes_per_second=100.0),
        )

    def serve(self, rid: str, first: int) -> None:
        """Compute a prompt, and end."""
        req = request(rid, range(first, first + LENGTH))
        self.queue(req)
        while req in self.scheduler.waiting_queue:
            self.step()
        while req.extend_end < LENGTH:
            self.step()
        self.finish(req)

    def forget(self) -> None:
        """Have others take the place of what is cached on the device."""
        for index in range(4):
            self.serve(f"other {index}", 10_000 * (index + 1))
        self.scheduler.last_batch = None

    def keep_busy(self) -> Req:
        """A request that runs, so that nobody awaits a restore for want of work."""
        req = request("busy", range(90_000, 90_012))
        self.queue(req)
        assert self.step() == ["busy"]
        return req

    def take(self) -> list[Command]:
        """Commands that ran since the last call, and those that are queued."""
        self.cache.run_commands()
        ran, self.ran[:] = list(self.ran), []
        return ran

    def wait_for_restore(self) -> Req:
        """A request whose prefix is on its way."""
        again = request("again", [*range(LENGTH), 7, 8])
        self.queue(again)
        self.take()
        assert self.step() == []
        return again


def forgotten() -> HostBench:
    """The device forgot the prompt of `LENGTH` tokens from 0 on."""
    bench = HostBench()
    bench.serve("one", 0)
    bench.forget()
    return bench


def kinds(commands: list[Command]) -> list[type]:
    return [type(command) for command in commands]


@pytest.mark.parametrize("build", [HostBench, Bench], ids=["host memory", "without"])
def test_prefill_servers_send_what_may_come_from_the_host_behind_the_pass(
    build: Callable[[], Bench],
) -> None:
    """Its pages are filled by a copy that the pass awaits, and SGLang does not."""
    bench, allowed = build(), []

    def send(scheduler: Any, req: Any, allow_send: bool = True) -> None:
        allowed.append(allow_send)

    for asked in (True, False):
        patches._send_behind_restores(send, bench.scheduler, "a request", asked)
    has_host = bench.core.host is not None
    assert allowed == [not has_host, False]


def test_what_is_cached_is_stored_when_the_server_idles() -> None:
    bench = HostBench()
    bench.serve("one", 0)
    bench.ran.clear()
    bench.cache.idle()
    stored = [one for one in bench.ran if isinstance(one, Store)]
    assert {(one.pool, len(one.sources)) for one in stored} == {
        (Pool.KV, LENGTH // PAGE),
        (Pool.STATE, 1),
    }
    lists: list[list[Command]] = []
    bench.cache._executor.run = lists.append  # type: ignore[method-assign]
    bench.cache.idle()
    assert lists == [], "nothing is launched while a server idles"


def test_a_request_waits_until_its_prefix_should_be_there() -> None:
    bench = forgotten()
    bench.keep_busy()
    again = bench.wait_for_restore()
    assert set(kinds(bench.take())) == {Load}
    due = bench.core.lower_tiers.restores_due
    assert due is not None and due > bench.clock.now
    bench.clock.now = due - 0.01
    assert bench.step() == [] and bench.take() == []
    bench.assert_conserved()
    bench.clock.now = due
    assert bench.step() == ["again"]
    assert again.prefix_len == LENGTH
    ran = bench.take()
    assert kinds(ran)[0] is Await, "before anything reads what was loaded"
    assert bench.core.host is not None
    assert bench.core.host.stats.hit_tokens == LENGTH
    bench.assert_conserved()


def test_others_with_the_prefix_wait_for_the_same_restore() -> None:
    bench = forgotten()
    bench.keep_busy()
    bench.wait_for_restore()
    bench.queue(request("too", [*range(LENGTH), 9]))
    assert bench.step() == []
    assert kinds(bench.take()).count(Load) == 2, "of pages, and of a slot"


def test_nobody_overtakes_a_request_whose_prefix_is_on_its_way() -> None:
    bench = forgotten()
    bench.keep_busy()
    bench.wait_for_restore()
    bench.queue(request("other", range(500, 508)))
    assert bench.step() == []
    bench.assert_conserved()
    bench.clock.now += 1000
    assert bench.step() == ["again", "other"]


def test_those_behind_begin_to_restore_as_many_as_have_rows() -> None:
    bench = HostBench(pages=60, slots=9, rows=4)
    for number in range(3):
        bench.serve(str(number), 1000 * number)
    for index in range(8):
        bench.serve(f"other {index}", 10_000 * (index + 1))
    bench.scheduler.last_batch = None
    bench.keep_busy()
    for number in range(3):
        start = 1000 * number
        bench.queue(request(f"again {number}", [*range(start, start + LENGTH), 7]))
    bench.take()
    assert bench.step() == []
    loads = [one for one in bench.take() if isinstance(one, Load)]
    assert {load.ticket for load in loads} == {1, 2}, "two rows are left"
    bench.clock.now += 1000
    assert bench.step() == ["again 0", "again 1"]


def test_a_parked_request_goes_on_ahead_of_them() -> None:
    bench = HostBench(pages=40, slots=9)
    bench.serve("one", 0)
    for index in range(8):
        bench.serve(f"other {index}", 10_000 * (index + 1))
    bench.scheduler.last_batch = None
    parked = pausing("parked", range(600, 620), at=8)
    bench.park(parked)
    bench.queue(request("again", [*range(LENGTH), 7]))
    assert bench.step() == ["parked"]


def test_alone_the_stream_waits_and_not_the_request() -> None:
    bench = forgotten()
    again = request("again", [*range(LENGTH), 7, 8])
    bench.queue(again)
    bench.take()
    assert bench.step() == ["again"]
    assert again.prefix_len == LENGTH
    ran = kinds(bench.take())
    assert ran.index(Load) < ran.index(Await)


def test_who_computes_faster_does_not_wait() -> None:
    bench = forgotten()
    bench.keep_busy()
    bench.clock.token_seconds = 1e-9
    again = request("again", [*range(LENGTH), 7, 8])
    bench.queue(again)
    assert bench.step() == ["again"]
    assert again.prefix_len == 0


def test_no_more_is_restored_than_sglang_may_use() -> None:
    """Logprobs of a prompt need its passes."""
    bench = forgotten()
    bench.keep_busy()
    again = request("again", [*range(LENGTH), 7, 8], return_logprob=True)
    again.logprob_start_len = 0
    bench.queue(again)
    bench.take()
    assert bench.step() == ["again"]
    assert Load not in kinds(bench.take())


@pytest.mark.parametrize("field", ["extra_key", "cache_salt"])
def test_adapters_and_salts_keep_requests_apart(field: str) -> None:
    bench = forgotten()
    bench.keep_busy()
    bench.queue(request("other", [*range(LENGTH), 7], **{field: "another"}))
    bench.take()
    assert bench.step() == ["other"]
    assert Load not in kinds(bench.take())


def test_a_request_is_aborted_while_it_waits() -> None:
    bench = forgotten()
    bench.keep_busy()
    again = bench.wait_for_restore()
    bench.scheduler.abort_request(AbortReq(rid="again"))
    assert again not in bench.scheduler.waiting_queue
    assert bench.cache.front_door.waiting == 0
    bench.clock.now += 1000
    bench.step()
    assert Await in kinds(bench.take())
    bench.assert_conserved()
    late = request("late", [*range(LENGTH), 9])
    bench.queue(late)
    assert bench.step() == ["late"] and late.prefix_len == LENGTH


def test_a_flush_while_a_load_is_under_way_awaits_it() -> None:
    bench = forgotten()
    busy = bench.keep_busy()
    bench.wait_for_restore()
    with pytest.raises(RuntimeError, match="busy"):
        bench.cache.reset()
    bench.scheduler.abort_request(AbortReq(rid="again"))
    bench.take()
    bench.core.finish(bench.cache.name(busy), (), 0)
    del bench.cache._requests[bench.cache.name(busy)]
    waited: list[str] = []
    assert bench.cache._host is not None
    bench.cache._host.wait = lambda: waited.append(  # type: ignore[method-assign]
        " ".join(kind.__name__ for kind in kinds(bench.ran))
    )
    bench.cache.reset()
    assert waited == ["Await"], "the device is done before the pools may go"
    assert all(level.cached == 0 for level in bench.core.levels().values())


def test_what_is_restored_makes_way_for_a_decode() -> None:
    bench = forgotten()
    busy = bench.keep_busy()
    bench.wait_for_restore()
    wanted = most_pages(bench.core) + 1
    assert bench.allocator.check_decode_capacity(num_tokens=wanted * PAGE)
    assert bench.cache.grow(busy, 12 + wanted * PAGE)
    assert Await in kinds(bench.take())
    assert not bench.allocator.check_decode_capacity(num_tokens=100 * PAGE)


def test_what_is_restored_makes_way_for_who_comes_first() -> None:
    bench = forgotten()
    bench.keep_busy()
    bench.wait_for_restore()
    tokens = (most_pages(bench.core) + 1) * PAGE
    first = request("first", range(500, 500 + tokens))
    bench.scheduler.waiting_queue.insert(0, first)
    assert bench.step() == ["first"]
    assert Await in kinds(bench.take())
    bench.assert_conserved()


def test_a_retracted_request_resumes_from_the_host() -> None:
    bench = HostBench()
    one = request("one", range(LENGTH))
    bench.queue(one)
    assert bench.step() == ["one"]
    one.output_ids.append(7)
    release_req(
        req=one,
        remaing_req_count=0,
        req_to_token_pool=bench.rows,
        token_to_kv_pool_allocator=bench.allocator,
        tree_cache=bench.cache,
        hisparse_coordinator=None,
    )
    one.reset_for_retract()
    bench.scheduler.last_batch = None
    bench.forget()
    bench.keep_busy()
    bench.queue(one)
    assert bench.step() == [], "it waits"
    bench.clock.now += 1000
    assert bench.step() == ["one"]
    assert one.prefix_len == LENGTH


def test_a_parked_request_does_not_wait() -> None:
    bench = HostBench(pages=40, slots=9)
    bench.serve("one", 0)
    one = pausing("paused", [*range(LENGTH), *range(70, 90)], at=40)
    bench.park(one)
    assert not bench.cache.must_wait_for_restore(one)
    retract_parked(bench.scheduler)
    bench.assert_conserved()


# ---------------------------------------------------------------- time and streams


def test_the_time_is_fine_while_somebody_waits() -> None:
    bench = forgotten()
    bench.keep_busy()
    bench.step()
    assert not bench.clock.is_fine
    bench.wait_for_restore()
    assert bench.clock.is_fine
    bench.scheduler.abort_request(AbortReq(rid="again"))
    bench.step()
    assert bench.clock.is_fine, "its restore runs"
    bench.clock.now += 1000
    bench.step()
    assert not bench.clock.is_fine


def test_what_ranks_agree_on_is_what_the_core_gets() -> None:
    bench = HostBench()
    bench.clock.token_seconds = 0.125
    bench.step()
    assert bench.core.rates is not None
    assert bench.core.rates.prefill_seconds_per_token == 0.125
    assert bench.core.promises.pace.now == 100.0


def test_passes_are_measured_by_their_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = HostBench()
    moments = iter(range(100))
    monkeypatch.setattr(
        host_steps.PassTimer, "_now", lambda self: Moment(next(moments))
    )
    assert bench.clock.measured() is None
    bench.serve("one", 0)
    assert LENGTH < CPU_PASS_TOKENS, "so it says what a token takes at most"
    assert bench.clock.measured() == pytest.approx(1.0 / LENGTH)


class Moment:
    """Seconds."""

    def __init__(self, seconds: int) -> None:
        self.seconds = seconds

    def query(self) -> bool:
        return True

    def elapsed_time(self, later: Moment) -> float:
        return 1e3 * (later.seconds - self.seconds)


def test_behind_a_pass_its_stream_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = host_steps.HostSteps(
        HostBench().core, HostBench().clock, torch.device("cpu")
    )
    with steps.behind_the_last():
        steps.wait()  # there is none
    done: list[str] = []
    stream = SimpleNamespace(synchronize=lambda: done.append("waited"))

    @contextmanager
    def current(of: Any) -> Iterator[None]:
        assert of is stream
        done.append("in")
        yield
        done.append("out")

    steps._device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    monkeypatch.setattr(torch.cuda, "stream", current)
    monkeypatch.setattr(steps, "_timer", SimpleNamespace(begin=lambda: None))
    steps.begins()
    with steps.behind_the_last():
        done.append("run")
    steps.wait()
    assert done == ["in", "run", "out", "waited"]
