# SPDX-License-Identifier: Apache-2.0
"""Files behind host memory: a scheduler's part and a worker's, without an engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheLayout
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT

from hybrid_plugin.config import ConfigError, DiskOptions
from hybrid_plugin.core.commands import Discard, Fetch, Pool, Write
from hybrid_plugin.device.executor import Executor
from hybrid_plugin.engine.rank_files import RanksOnDisk, files_of
from hybrid_plugin.engine.rank_tiers import RankTiers
from hybrid_plugin.tiers.agreement import Outcome
from hybrid_plugin.tiers.identity import Identity
from hybrid_plugin.tiers.rates import DiskRates
from hybrid_plugin.tiers.shelf import SUFFIX
from hybrid_plugin.vllm import reports, worker_tiers
from hybrid_plugin.vllm import scheduler as schedulers
from hybrid_plugin.vllm import worker as workers
from hybrid_plugin.vllm.pool_memory import PoolMemory
from hybrid_plugin.vllm.reports import Report
from hybrid_plugin.vllm.scheduler import HybridScheduler
from hybrid_plugin.vllm.worker_tiers import Ranks
from tests.vllm.fakes import admit, compute, manager, nothing_kept, pools, request

HOST = 1 << 20
LENGTH = 64
"""Tokens of a prompt: four pages."""
PATIENCE = 20.0
"""Seconds after which a test gives a disk up."""
IDENTITY = Identity("weights", "config", ("a0 full attention", "s0 state"), "float32")


class Engine:
    """A manager and one rank, both real, and steps without a model between them."""

    def __init__(self, folder: Path) -> None:
        self.disk = DiskOptions(str(folder), 1 << 30)
        self.is_told = True
        """Whether reports say that weights were updated."""
        self.manager = manager(
            clock=lambda: 100.0,
            host=HOST,
            pages=11,
            slots=5,
            host_memory=HOST,
            disk={"path": str(folder), "size": 1 << 30},
        )
        config = pools(11, 5, HOST)
        memory = PoolMemory()
        memory.allocate(config, torch.device("cpu"), KVCacheLayout.LBNHC)
        backend = SimpleNamespace(get_name=lambda: "FLASH_ATTN")
        layer = SimpleNamespace(get_attn_backend=lambda: backend)
        layouts = memory.layouts(config, {"a0": layer})
        assert config.host is not None
        memory.executor.attach_host(config.host)
        self.executor: Executor = memory.executor
        host = memory.executor.host
        assert host is not None
        own = files_of(host, self.disk, IDENTITY, layouts)
        self.files = RankTiers(self.executor, lambda own: own, files=own)
        self.ranks = RanksOnDisk(IDENTITY, {IDENTITY.rank_name: layouts}, 1e9)

    def open(self) -> None:
        """The worker's first answer."""
        (self.disk.folder / IDENTITY.rank_name).mkdir(parents=True, exist_ok=True)
        self.manager.take_report(Report(0.0, 1.0, 1e9, disk=self.ranks))

    def step(self) -> list[Any]:
        """A step's commands, on the rank, and its report; nothing is computed."""
        commands = self.manager.drain_commands()
        self.executor.run(commands)
        outcomes = tuple(self.files.settle())
        updates = self.files.updates if self.is_told else 0
        self.manager.take_report(
            Report(0.0, 1.0, 1e9, weight_updates=updates, outcomes=outcomes)
        )
        return commands

    def finish(self) -> list[Any]:
        """Steps for as long as they are of use."""
        commands, end = [], time.monotonic() + PATIENCE
        while self.manager.has_work:
            assert time.monotonic() < end, "the disk goes on"
            commands += self.step()
            time.sleep(0.001)
        return commands

    def serve(self, name: str, first: int) -> int:
        """Compute a prompt as a model does; returns what was restored."""
        of, one = self.manager, request(name, LENGTH + 1, first)
        while of.must_wait(one):
            self.step()
        _, hit, _ = of.get_computed_blocks(one)
        assert admit(of, one, LENGTH + 1 - hit) is not None
        self.step()
        sequence = of.cache.sequence(name)
        for page, token in enumerate(range(0, LENGTH, 16)):
            if token >= hit:
                self.page(sequence.pages[page]).fill_(first + token + 1)
        if not hit:
            self.slot(sequence.slot).fill_(first + LENGTH)
        compute(of, one, LENGTH)
        self.step()
        compute(of, one, LENGTH + 1)
        of.free(one)
        return hit

    def page(self, index: int) -> torch.Tensor:
        (part,) = self.executor._arenas[Pool.KV].parts
        return part[index].view(torch.float32)

    def slot(self, index: int) -> torch.Tensor:
        (part,) = self.executor._arenas[Pool.STATE].parts
        return part[index].view(torch.float32)

    def names(self) -> list[Path]:
        """Files of bundles."""
        return sorted(self.disk.folder.rglob("*" + SUFFIX))

    def close(self) -> None:
        self.files.close()
        self.manager.close()
        assert self.executor.host is not None
        self.executor.host.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    """Starts engines on one folder; those that are open are closed."""
    made: list[Engine] = []

    def start(*, is_open: bool = True) -> Engine:
        if made:
            made.pop().close()
        made.append(Engine(tmp_path / "bundles"))
        if is_open:
            made[-1].open()
        return made[-1]

    yield start
    made[-1].close()


def test_an_engine_that_is_started_again_has_what_was_written(
    start: Callable[..., Engine],
) -> None:
    engine = start()
    assert engine.serve("one", 1000) == 0
    engine.finish()
    (tier,) = engine.manager.cache.lower_tiers.outer
    assert len(engine.names()) == tier.stats.stores > 0
    assert nothing_kept(engine.manager)
    engine = start()
    again = request("again", LENGTH + 1, 1000)
    assert engine.manager.must_wait(again)
    assert any(isinstance(one, Fetch) for one in engine.step())
    while engine.manager.must_wait(again):
        engine.step()
    _, hit, _ = engine.manager.get_computed_blocks(again)
    assert hit == LENGTH
    assert admit(engine.manager, again, 1) is not None
    engine.step()
    sequence = engine.manager.cache.sequence("again")
    values = [{*engine.page(page).tolist()} for page in sequence.pages[:4]]
    assert values == [{1001}, {1017}, {1033}, {1049}]
    assert {*engine.slot(sequence.slot)[:15].tolist()} == {1000 + LENGTH}
    compute(engine.manager, again, LENGTH + 1)
    engine.manager.free(again)
    engine.finish()
    assert nothing_kept(engine.manager)
    (tier,) = engine.manager.cache.lower_tiers.outer
    assert tier.stats.hit_tokens == LENGTH and tier.stats.loads == 1


def test_nobody_runs_before_the_files_are_open(start: Callable[..., Engine]) -> None:
    engine = start(is_open=False)
    one = request("one", LENGTH)
    assert engine.manager.is_opening and engine.manager.has_work
    assert engine.manager.must_wait(one)
    engine.open()
    assert not engine.manager.must_wait(one)
    assert not engine.manager.has_work


def test_without_a_disk_nobody_waits_for_one() -> None:
    of = manager(pages=11, slots=5, host=HOST)
    assert not of.is_opening and not of.has_work
    assert of.reset_prefix_cache() and not of.has_work
    assert not of.must_wait(request("one", LENGTH))


def test_others_overtake_a_request_that_waits_for_files(
    start: Callable[..., Engine],
) -> None:
    engine = start()
    engine.serve("one", 1000)
    engine.finish()
    engine = start()
    engine.manager.step_begins()
    assert engine.manager.must_wait(request("again", LENGTH + 1, 1000))
    assert not engine.manager.must_wait(request("cold", 20, 80_000))
    engine.finish()


def test_a_flush_removes_files_though_nobody_comes(
    start: Callable[..., Engine],
) -> None:
    engine = start()
    engine.serve("one", 1000)
    engine.finish()
    assert engine.names()
    assert engine.manager.reset_prefix_cache()
    assert engine.manager.has_work
    assert any(isinstance(one, Discard) for one in engine.finish())
    engine.files.close()
    assert engine.names() == []


def test_what_other_weights_leave_is_never_found(start: Callable[..., Engine]) -> None:
    engine = start()
    engine.serve("one", 1000)
    engine.finish()
    old = engine.names()
    engine.files.weights_changed()
    assert engine.serve("two", 5000) == 0
    engine.finish()
    (tier,) = engine.manager.cache.lower_tiers.outer
    before = tier.stats.stores
    engine.serve("three", 9000)
    engine.finish()
    assert tier.stats.stores > before, "under another name"
    assert set(engine.names()) > set(old)
    engine = start()
    for first, hit in ((1000, LENGTH), (5000, 0), (9000, 0)):
        assert engine.serve(f"again {first}", first) == hit
    engine.finish()


def test_what_is_ordered_under_the_old_name_is_refused(
    start: Callable[..., Engine],
) -> None:
    """Between an update and its report: nothing of new weights gets the old name."""
    engine = start()
    engine.serve("one", 1000)
    engine.finish()
    old = engine.names()
    engine.files.weights_changed()
    engine.is_told = False
    engine.serve("two", 5000)
    commands = engine.finish()
    assert any(isinstance(one, Write) for one in commands)
    (tier,) = engine.manager.cache.lower_tiers.outer
    assert tier.stats.store_failures.total() > 0
    assert engine.names() == old


def test_a_folder_serves_one_engine_at_a_time(start: Callable[..., Engine]) -> None:
    engine = start()
    other = Engine(engine.disk.folder)
    with pytest.raises(ConfigError, match="in use by another process"):
        other.open()
    other.close()


# ------------------------------------------------------------ vLLM's own classes


def test_the_engine_goes_on_for_files(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler: Any = HybridScheduler.__new__(HybridScheduler)
    scheduler.kv_cache_manager = SimpleNamespace(has_work=False, hit_checking=None)
    scheduler._pause_state = PauseState.UNPAUSED
    for busy, work in ((False, False), (True, False), (False, True)):
        monkeypatch.setattr(Scheduler, "has_requests", lambda self, busy=busy: busy)
        scheduler.kv_cache_manager.has_work = work
        assert scheduler.has_requests() is (busy or work)


def test_the_folder_is_free_when_the_scheduler_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended = []
    scheduler: Any = HybridScheduler.__new__(HybridScheduler)
    scheduler.kv_cache_manager = SimpleNamespace(close=lambda: ended.append("files"))
    monkeypatch.setattr(Scheduler, "shutdown", lambda self: ended.append("vLLM"))
    scheduler.shutdown()
    assert ended == ["files", "vLLM"]


class Stock:
    """What of vLLM's worker ours calls."""

    output: Any = EMPTY_MODEL_RUNNER_OUTPUT

    def execute_model(self, scheduler_output: Any) -> Any:
        return self.output

    def sample_tokens(self, grammar_output: Any) -> Any:
        return EMPTY_MODEL_RUNNER_OUTPUT


class Worker(workers.RunsCommands, Stock):
    """One that is ready to serve."""


NO_REQUESTS = SimpleNamespace(hybrid_commands=[], total_num_scheduled_tokens=0)
"""A step of which files alone are to hear."""


def outcome(ticket: int) -> Outcome:
    return Outcome(ticket, None, 1, 1.0)


def ready(outcomes: list[Outcome]) -> Any:
    one: Any = Worker.__new__(Worker)
    moves = SimpleNamespace(seconds=0.0)
    one._pools = SimpleNamespace(
        executor=SimpleNamespace(run=lambda commands: None, moves=moves, host=None)
    )
    one._passes, one._load_rate, one._stepped_aside = None, None, None
    one._reported, one._outcomes = Report(), []
    one._ranks = Ranks(disk=RanksOnDisk(IDENTITY, {}, 1.0))
    one._tiers = SimpleNamespace(settle=lambda: list(outcomes), updates=0)
    one._layers = SimpleNamespace(replayed=0)
    return one


def test_a_step_without_requests_reports_what_files_did() -> None:
    outcomes = [outcome(1)]
    one, step = (
        ready(outcomes),
        SimpleNamespace(hybrid_commands=[], total_num_scheduled_tokens=0),
    )
    report = reports.read(one.execute_model(step))
    assert report is not None
    assert report.outcomes == (outcome(1),) and report.disk is not None
    outcomes[:] = []
    assert reports.read(one.execute_model(step)) is None, "there is no news"
    outcomes[:] = [outcome(2)]
    report = reports.read(one.execute_model(step))
    assert report is not None
    assert (report.outcomes, report.disk) == ((outcome(2),), None)


def test_news_wait_for_an_output() -> None:
    outcomes = [outcome(1)]
    one, step = (
        ready(outcomes),
        SimpleNamespace(hybrid_commands=[], total_num_scheduled_tokens=0),
    )
    one.output = None  # vLLM samples apart
    assert one.execute_model(step) is None
    outcomes[:] = [outcome(2)]
    one.output = EMPTY_MODEL_RUNNER_OUTPUT
    report = reports.read(one.execute_model(step))
    assert report is not None and report.outcomes == (outcome(1), outcome(2))


def test_passes_that_warm_up_take_no_news() -> None:
    """vLLM's second model runner makes such of its own, and drops their outputs."""
    one, step = ready([]), SimpleNamespace(total_num_scheduled_tokens=9)
    one.output = None
    assert one.execute_model(step) is None
    assert reports.read(one.sample_tokens(None)) is None
    one.execute_model(SimpleNamespace(hybrid_commands=[], total_num_scheduled_tokens=9))
    report = reports.read(one.sample_tokens(None))
    assert report is not None and report.disk is not None


def test_ranks_learn_of_each_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of two ranks, the slower one's rates count."""
    engine = Engine(tmp_path / "bundles")
    group = SimpleNamespace(rank_in_group=1, world_size=2, cpu_group="group")
    other = ("rank-0-of-2", "layouts of 0", DiskRates(5.0, 1.0))

    def gather(found: list[Any], own: Any, group: str) -> None:
        assert group == "group"
        found[:] = [other, own]

    def reduce(numbers: torch.Tensor, operation: Any, group: str) -> None:
        numbers.copy_(torch.maximum(numbers, torch.tensor([1, 9])))

    identity = Identity("w", "c", ("l",), "k", tensor_rank=1, tensor_ranks=2)
    monkeypatch.setattr(worker_tiers, "get_tp_group", lambda: group)
    monkeypatch.setattr(worker_tiers, "identity_of", lambda *_: identity)
    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    monkeypatch.setattr(torch.distributed, "all_reduce", reduce)
    nothing: Any = None
    own = engine.ranks.layouts[IDENTITY.rank_name]
    options: Any = SimpleNamespace(disk=engine.disk, peers=None, store=None)
    files, all_ranks = worker_tiers.attach(
        engine.executor, nothing, nothing, options, own
    )
    ranks = all_ranks.disk
    assert ranks is not None and all_ranks.peers is None
    assert (engine.disk.folder / "rank-1-of-2").is_dir()
    assert ranks.identity is identity and ranks.read_bytes_per_second == 1.0
    assert ranks.layouts == {"rank-0-of-2": "layouts of 0", "rank-1-of-2": own}
    assert worker_tiers._greatest([3, 4]) == [3, 9]
    files.close()
    engine.close()


@pytest.mark.parametrize(
    ("running", "scheduled", "work", "due", "sleeps"),
    [
        ([], 0, True, None, True),
        (["one"], 0, True, None, False),
        ([], 5, True, None, False),
        ([], 0, False, None, False),
        ([], 0, True, 3.0, False),
    ],
)
def test_time_passes_only_where_files_are_all_that_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
    running: list[str],
    scheduled: int,
    work: bool,
    due: float | None,
    sleeps: bool,
) -> None:
    one: Any = HybridScheduler.__new__(HybridScheduler)
    taken: list[Report] = []
    one.kv_cache_manager = SimpleNamespace(
        has_work=work,
        cache=SimpleNamespace(lower_tiers=SimpleNamespace(restores_due=due)),
        take_report=taken.append,
        hit_checking=None,
    )
    one.running, one.num_spec_tokens = running, 0
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setattr(Scheduler, "update_from_output", lambda *_: "updated")
    step: Any = SimpleNamespace(total_num_scheduled_tokens=scheduled)
    assert one.update_from_output(step, EMPTY_MODEL_RUNNER_OUTPUT) == "updated"
    assert slept == [schedulers.IDLE_SECONDS] * sleeps
    told = reports.attach(EMPTY_MODEL_RUNNER_OUTPUT, Report(outcomes=(outcome(1),)))
    assert one.update_from_output(step, told) == "updated"
    assert len(slept) == sleeps and len(taken) == 1, "there is something to go on with"


def test_a_pause_does_not_wait_for_what_is_written(
    start: Callable[..., Engine],
) -> None:
    """What ends it may forget all of that: an update of weights does."""
    engine = start()
    for number in range(3):
        engine.serve(f"r{number}", 1000 * number)
    assert engine.manager.has_work
    scheduler: Any = HybridScheduler.__new__(HybridScheduler)
    scheduler.kv_cache_manager = engine.manager
    scheduler.requests, scheduler.running, scheduler.waiting = {}, [], []
    scheduler.finished_req_ids, scheduler.kv_holding_waiting = set(), []
    scheduler.connector = scheduler.ec_connector = None
    scheduler.num_waiting_for_streaming_input = 0
    works = {}
    for state in PauseState:
        scheduler._pause_state = state
        works[state] = scheduler.has_requests()
    assert works == {state: state is PauseState.UNPAUSED for state in PauseState}
    assert engine.manager.reset_prefix_cache()
    assert scheduler.has_requests(), "workers are told of it"
    engine.finish()
    scheduler._pause_state = PauseState.PAUSED_ALL
    assert not scheduler.has_requests()
