# SPDX-License-Identifier: Apache-2.0
"""Requests whose prefix the device forgot, and the host has."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm.v1.core.sched.scheduler import Scheduler

from hybrid_plugin.config import ConfigError
from hybrid_plugin.core.commands import Await, Copy, Load, Pool, Store
from hybrid_plugin.vllm import worker as workers
from hybrid_plugin.vllm.manager import HybridKVCacheManager
from hybrid_plugin.vllm.reports import Report
from hybrid_plugin.vllm.scheduler import PREFILL_TOKENS, HybridScheduler
from tests.vllm.fakes import admit, compute, manager, nothing_kept, pools, request
from tests.vllm.test_planning import config_of, planned

LENGTH = 64
"""Tokens of a prompt: four pages."""


class Clock:
    """A time that stands still until it is told to go on."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def with_host(**arguments: Any) -> tuple[HybridKVCacheManager, Clock]:
    """Pools for two prompts and host memory for many; a token takes a second."""
    clock = Clock()
    sizes = {"pages": 11, "slots": 5} | arguments
    of = manager(host=1 << 20, clock=clock, **sizes)
    of.new_measurements(Report(0.0, 1.0, 1e3))
    return of, clock


def serve(of: HybridKVCacheManager, name: str, first: int) -> list[Any]:
    """Compute a prompt, and end; returns the commands, with those after the end."""
    one = request(name, LENGTH, first)
    _, hit, _ = of.get_computed_blocks(one)
    assert admit(of, one, LENGTH - hit) is not None
    commands: list[Any] = of.drain_commands()
    compute(of, one, LENGTH)
    of.free(one)
    return commands + of.drain_commands()


def forget(of: HybridKVCacheManager, others: int = 4) -> None:
    """Have others take the place of what is cached on the device."""
    for index in range(others):
        serve(of, f"other-{index}", 10_000 * (index + 1))


def running(of: HybridKVCacheManager) -> Any:
    """A request that computes, so that nobody awaits a restore for want of work."""
    one = request("running", 20, 90_000)
    assert admit(of, one, 20) is not None
    of.drain_commands()
    return one


def kinds(commands: list[Any]) -> list[type]:
    return [type(one) for one in commands]


def test_what_is_cached_is_stored() -> None:
    of, _ = with_host()
    stored = [one for one in serve(of, "one", 0) if isinstance(one, Store)]
    assert {(one.pool, len(one.sources)) for one in stored} == {("kv", 4), ("state", 1)}
    assert of.cache.host is not None
    assert of.cache.host.stats.stores == 1


def test_without_host_memory_nobody_waits_and_nothing_is_stored() -> None:
    of = manager(pages=11, slots=5)
    commands = serve(of, "one", 0)
    forget(of)
    assert not any(isinstance(one, Store) for one in commands)
    assert not of.must_wait(request("again", LENGTH + 1))
    assert nothing_kept(of)


def test_a_request_waits_until_its_prefix_should_be_there() -> None:
    of, clock = with_host()
    serve(of, "one", 0)
    forget(of)
    busy = running(of)
    again = request("again", LENGTH + 1)
    assert of.must_wait(again)
    loads = of.drain_commands()
    assert {one.pool for one in loads if isinstance(one, Load)} == {"kv", "state"}
    assert Await not in kinds(loads)
    due = of.cache.lower_tiers.restores_due
    assert due is not None and due > clock.now
    clock.now = due - 0.01
    of.step_begins()
    assert of.must_wait(again) and not of.drain_commands()
    clock.now = due
    of.step_begins()
    assert not of.must_wait(again)
    blocks, hit, _ = of.get_computed_blocks(again)
    assert hit == LENGTH
    assert of.allocate_slots(again, 1, hit, blocks) is not None
    commands = of.drain_commands()
    assert kinds(commands)[0] is Await, "before anything reads what was loaded"
    assert any(isinstance(c, Copy) and c.pool == Pool.STATE for c in commands)
    for one, length in ((again, LENGTH + 1), (busy, 20)):
        compute(of, one, length)
        of.free(one)
    assert nothing_kept(of)
    assert of.cache.host is not None
    assert of.cache.host.stats.hit_tokens == LENGTH


def test_others_with_the_prefix_wait_for_the_same_restore() -> None:
    of, _ = with_host()
    serve(of, "one", 0)
    forget(of)
    running(of)
    assert of.must_wait(request("a", LENGTH + 1)) and of.drain_commands()
    assert of.must_wait(request("b", LENGTH + 9))
    assert of.drain_commands() == []


def test_restores_begin_for_as_many_requests_as_can_run() -> None:
    """And nobody overtakes those that wait for theirs."""
    of, clock = with_host(pages=24, slots=9, max_running=3)
    for index in range(3):
        serve(of, f"one-{index}", 1000 * index)
    forget(of, 12)
    running(of)
    waiting = [request(f"again-{i}", LENGTH + 1, 1000 * i) for i in range(3)]
    cold = request("cold", 20, 80_000)
    of.step_begins()
    assert [of.must_wait(one) for one in waiting] == [True, True, False]
    for one in (waiting[2], cold):
        assert not of.must_wait(one), "vLLM need not look behind it"
        assert admit(of, one, 20) is None
    restored = [c.pool for c in of.drain_commands() if isinstance(c, Load)]
    assert restored.count(Pool.STATE) == 2, "one of three places is taken"
    clock.now += 1000
    of.step_begins()
    for index, one in enumerate(waiting[:2]):
        assert not of.must_wait(one)
        blocks, hit, _ = of.get_computed_blocks(one)
        assert hit == LENGTH, index
        assert of.allocate_slots(one, 1, hit, blocks) is not None
    assert of.cache.live == 3


def test_nobody_overtakes_a_request_that_waits_for_host_memory() -> None:
    of, clock = with_host(pages=40, slots=9)
    serve(of, "one", 0)
    forget(of, 12)
    busy = running(of)
    again, cold = request("again", LENGTH + 1), request("cold", 20, 80_000)
    of.step_begins()
    assert not of.must_wait(cold), "nobody is before it"
    assert of.must_wait(again)
    of.step_begins()
    assert of.must_wait(again)
    assert not of.must_wait(cold) and admit(of, cold, 20) is None
    clock.now += 1000
    of.step_begins()
    assert not of.must_wait(again) and not of.must_wait(cold)
    of.free(busy)


def test_what_came_for_one_behind_is_kept_until_its_turn() -> None:
    """One that was preempted goes before it, and its restore begins later."""
    of, clock = with_host(pages=40, slots=9)
    for index in range(2):
        serve(of, f"one-{index}", 1000 * index)
    forget(of, 12)
    running(of)
    first, later = (request(f"again-{i}", LENGTH + 1, 1000 * i) for i in range(2))
    of.step_begins()
    assert of.must_wait(later)
    assert of.must_wait(first)
    of.drain_commands()
    due = of.cache.lower_tiers.restores_due
    assert due is not None
    clock.now = due
    of.step_begins()
    assert of.must_wait(first) and of.must_wait(later)
    assert of.drain_commands() == [], "the one that is due is not over"


def test_alone_the_stream_waits_and_not_the_request() -> None:
    of, _ = with_host()
    serve(of, "one", 0)
    forget(of)
    again = request("again", LENGTH + 1)
    assert not of.must_wait(again)
    assert kinds(of.drain_commands())[-1] is Await
    assert of.get_computed_blocks(again)[1] == LENGTH


def test_who_computes_faster_does_not_wait() -> None:
    of, _ = with_host()
    serve(of, "one", 0)
    forget(of)
    running(of)
    of.new_measurements(Report(0.0, 1e-9, 1e3))
    assert not of.must_wait(request("again", LENGTH + 1))
    assert of.drain_commands() == []


def test_a_request_that_must_not_be_served_from_the_cache() -> None:
    of, _ = with_host()
    serve(of, "one", 0)
    forget(of)
    running(of)
    adapter = SimpleNamespace(
        lora_name="tuned", lora_path="/p", lora_int_id=1, load_inplace=False
    )
    fields: dict[str, Any]
    for fields in (
        {"skip_reading_prefix_cache": True},
        {"cache_salt": "another"},
        {"lora_request": adapter},
    ):
        assert not of.must_wait(request("again", LENGTH + 1, **fields)), fields
        of.front_door.forget("again")


def test_an_admission_that_found_no_room_is_restored_later() -> None:
    """Its look-up was repeated with what vLLM counts as its hit, which was nothing."""
    of, _ = with_host()
    serve(of, "one", 0)
    forget(of)
    busy = running(of)
    again = request("again", LENGTH + 1)
    blocks, hit, _ = of.get_computed_blocks(again)
    assert hit == 0
    serve(of, "another", 70_000)
    assert of.allocate_slots(again, 11 * 16, hit, blocks) is None
    assert of.must_wait(again)
    of.free(busy)


def test_a_request_is_aborted_while_it_waits() -> None:
    of, clock = with_host()
    serve(of, "one", 0)
    forget(of)
    busy = running(of)
    again = request("again", LENGTH + 1)
    assert of.must_wait(again)
    of.free(again)
    compute(of, busy, 20)
    of.free(busy)
    clock.now += 1000
    of.step_begins()
    assert nothing_kept(of)
    commands = of.drain_commands()
    assert kinds(commands).count(Await) == 1


def test_a_flush_while_a_request_waits_forgets_what_it_waits_for() -> None:
    of, _ = with_host()
    serve(of, "one", 0)
    forget(of)
    busy = running(of)
    again = request("again", LENGTH + 1)
    assert of.must_wait(again)
    assert not of.reset_prefix_cache(), "one computes"
    of.free(busy)
    assert of.reset_prefix_cache()
    assert all(level.cached == 0 for level in of.cache.levels().values())
    of.step_begins()
    assert not of.must_wait(again)
    assert of.get_computed_blocks(again)[1] == 0


def test_a_preempted_request_resumes_from_the_host() -> None:
    of, _ = with_host()
    one = request("one", LENGTH, over=False)
    admit(of, one, LENGTH)
    of.drain_commands()
    compute(of, one, LENGTH)
    of.free(one)
    one.num_computed_tokens, one.num_preemptions = 0, 1
    one.all_token_ids.append(7)
    forget(of)
    assert not of.must_wait(one), "nothing else runs"
    assert of.get_computed_blocks(one)[1] == LENGTH


# ------------------------------------------------------------ scheduler, worker


def test_the_scheduler_lets_time_pass_and_counts_tokens_of_prompts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of, clock = with_host()
    scheduler: Any = HybridScheduler.__new__(HybridScheduler)
    scheduler.kv_cache_manager, scheduler.waiting = of, []
    scheduler.num_spec_tokens = 0
    one, two = request("one", 40), request("two", 20, 500)
    scheduler.requests = {"one": one, "two": two}
    admit(of, two, 20)
    compute(of, two, 20)

    def schedule(self: Any) -> Any:
        admit(of, one, 40)
        one.num_computed_tokens = 40
        return SimpleNamespace(num_scheduled_tokens={"one": 40, "two": 1})

    monkeypatch.setattr(Scheduler, "schedule", schedule)
    clock.now = 321.0
    output = scheduler.schedule()
    assert getattr(output, PREFILL_TOKENS) == 40
    assert of.cache.promises.pace.now == 321.0


def test_reports_reach_the_rates() -> None:
    of, _ = with_host()
    of.new_measurements(Report(2.5, 0.25, None))
    rates = of.cache.rates
    assert rates is not None
    assert of.cache.broker.stats.device_seconds == 2.5
    assert rates.prefill_seconds_per_token == 0.25
    assert rates.load_bytes_per_second == 1e3, "what was measured stays"
    of.new_measurements(Report(graph_passes=3))
    assert of.cache.stats.graph_passes == 3


# -------------------------------------------------------------------- planning


def test_ranks_plan_equal_rows() -> None:
    found = planned(config_of(host_memory="1MiB"), 1 << 20, 1 << 20)
    assert found.host is not None and found.plan.host is found.host
    assert found.host.budget <= 1 << 20
    assert planned(config_of(), 1 << 20).host is None


@pytest.mark.parametrize(
    ("size", "sentence"), [(4000, r"^host_memory is too little: .*; raise it\.$")]
)
def test_host_memory_that_cannot_be_used(size: int, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        planned(config_of(host_memory=size), 1 << 20)


def test_a_worker_refuses_memory_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one: Any = workers.RunsCommands.__new__(workers.RunsCommands)
    one._stepped_aside = None
    one.vllm_config = config_of(host_memory="4GiB")
    one.vllm_config.parallel_config = SimpleNamespace(local_world_size=2)
    monkeypatch.setattr(workers.host_memory, "free_bytes", lambda: 7 << 30)
    with pytest.raises(ConfigError, match=r"^hybrid-plugin: host_memory of 4\.00 GiB"):
        one.determine_available_memory()


class Worker:
    """vLLM's, as far as it says what memory there is."""

    vllm_config: Any
    finds: int | None = None
    """Bytes that it takes over from an earlier start."""

    def determine_available_memory(self) -> int:
        if self.finds is not None:
            self.vllm_config.cache_config.kv_cache_memory_bytes = self.finds
        return 1 << 30


class HostedWorker(workers.RunsCommands, Worker):
    """What the plugin makes of it."""


@pytest.mark.parametrize("earlier", [None, 1 << 30])
@pytest.mark.parametrize("own", [None, 1 << 30])
def test_what_copies_pass_through_is_taken_from_measured_memory(
    own: int | None, earlier: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the user says how much the cache has, it has that."""
    one: Any = HostedWorker.__new__(HostedWorker)
    one.finds = earlier
    one._stepped_aside = None
    one.vllm_config = config_of(host_memory="1GiB", elastic=False)
    one.vllm_config.parallel_config = SimpleNamespace(local_world_size=1)
    one.vllm_config.cache_config.kv_cache_memory_bytes = own
    one.device = torch.device("cuda")
    monkeypatch.setattr(workers.host_memory, "free_bytes", lambda: 7 << 30)
    monkeypatch.setattr(workers.elastic, "is_wanted", lambda config: False)
    taken = (1 << 30) - one.determine_available_memory()
    assert taken == (0 if own else workers.rings_for(one.device).bytes)


def test_ranks_that_schedule_for_themselves_have_no_common_time() -> None:
    config = config_of(host_memory="1MiB")
    config.parallel_config = SimpleNamespace(
        distributed_executor_backend="external_launcher", world_size=2
    )
    with pytest.raises(ConfigError, match="host_memory needs one time for all ranks"):
        HybridScheduler(config, pools())
