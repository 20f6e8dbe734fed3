# SPDX-License-Identifier: Apache-2.0
"""Passes written down in engines' processes, without an engine; costs from them."""

from __future__ import annotations

import asyncio
import gc
import json
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import pass_cost
from benchmarks.passes import compiled, log, sglang_scheduler, vllm_worker
from benchmarks.passes.costs import Costs, Timed, fit, medians
from benchmarks.passes.engines import Running
from benchmarks.passes.log import Log, Pass, busy_seconds, isolated, read
from benchmarks.passes.probes import Probe
from benchmarks.prefix_workloads import Reply

# ----------------------------------------------------------------------------- log


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "passes"
    assert read(path, 0.0) == []
    passes = [Pass(n, n + 0.25, n + 0.5, 10 * n, n, 3) for n in range(1, 5)]
    written = Log(path)
    for one in passes:
        written.append(one)
    assert read(path, 0.0) == passes
    assert read(path, 2.0, 4.0) == passes[1:3]
    with path.open("ab") as file:  # a record that is being written
        file.write(b"xyz")
    assert read(path, 0.0) == passes


def test_a_log_without_a_place_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(log.VARIABLE, raising=False)
    with pytest.raises(KeyError):
        Log()


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0.01, 1)), min_size=1))
def test_busy_seconds_never_count_a_moment_twice(
    passes: list[tuple[float, float]],
) -> None:
    done, found = 0.0, []
    for early, took in passes:  # each ends `took` after the one before
        found.append(Pass(max(0.0, done - early), 0.0, done + took, 1, 1, 0))
        done += took
    assert sum(busy_seconds(found)) == pytest.approx(done)


def test_passes_that_overlap_are_not_isolated() -> None:
    spans = [(0, 1), (1, 2), (3, 5), (4, 6), (7, 9), (8, 8.5), (10, 11)]
    passes = [Pass(a, a, b, n, 1, 0) for n, (a, b) in enumerate(spans)]
    assert [one.prefill_tokens for one in isolated(passes)] == [0, 1, 6]
    assert isolated([]) == [] and isolated(passes[:1]) == passes[:1]


def test_the_slowest_passes_are_told_with_what_they_held() -> None:
    ends = [1.0, 1.1, 3.1, 3.2, 3.3, 3.4, 3.9]
    passes = [Pass(end - 0.05, end - 0.04, end, n, 1, 2) for n, end in enumerate(ends)]
    early = Pass(1.2, 1.25, 3.1, 2, 1, 2)  # it waited for nobody
    found = log.slowest([*passes[:2], early, *passes[3:]])
    assert len(found) == log.SLOWEST
    assert (found[0]["prefill_tokens"], found[0]["ms"]) == (2, 1900.0)
    assert found[0]["launch_ms"] == 50.0
    assert log.slowest([]) == []


def test_kernels_made_ready_in_a_span_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    knobs = pytest.importorskip("triton.knobs")
    monkeypatch.setenv(log.VARIABLE, str(tmp_path / "passes"))
    monkeypatch.setattr(knobs.compilation, "listener", None)
    assert compiled.read(tmp_path / "passes", 0.0, float("inf"))["compiled"] == {}
    compiled.watch()
    for name, hit in (("scan", False), ("scan", False), ("scan", True)):
        knobs.compilation.listener(
            src=SimpleNamespace(name=name),
            metadata={},
            metadata_group={},
            times=SimpleNamespace(total=250_000),
            cache_hit=hit,
        )
    found = compiled.read(tmp_path / "passes", 0.0, float("inf"))
    assert found == {
        "seconds": 0.75,
        "compiled": {"scan": 2},
        "loaded": {"scan": 1},
    }
    assert compiled.read(tmp_path / "passes", 0.0, 1.0)["compiled"] == {}


# ---------------------------------------------------------------------------- vLLM


class Output:
    """A result that is fetched later."""

    def get_output(self) -> str:
        return "fetched"


class Worker:
    """As far as passes are counted."""

    def __init__(self, answers: Sequence[Any]) -> None:
        self.answers = list(answers)

    def execute_model(self, scheduled: Any) -> Any:
        return self.answers.pop(0)

    def sample_tokens(self, grammar: Any) -> Any:
        return self.answers.pop(0)


def scheduled(
    tokens: dict[str, int],
    generated: dict[str, int] | None = None,
    resumed: tuple[str, ...] = (),
) -> SimpleNamespace:
    """A step; requests without a number of generated tokens are new."""
    generated = generated or {}
    cached = SimpleNamespace(
        req_ids=list(generated),
        num_output_tokens=list(generated.values()),
        resumed_req_ids=set(resumed),
    )
    return SimpleNamespace(num_scheduled_tokens=tokens, scheduled_cached_reqs=cached)


STEP = scheduled(
    {"new": 30, "goes on": 20, "back": 15, "answers": 1},
    {"goes on": 0, "back": 4, "answers": 9},
    resumed=("back",),
)


def test_prefills_and_decodes_of_vllm_are_told_apart() -> None:
    assert vllm_worker.contents(STEP) == (65, 3, 1)
    assert vllm_worker.contents(scheduled({})) == (0, 0, 0)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where passes are written."""
    monkeypatch.setenv(log.VARIABLE, str(tmp_path / "passes"))
    return tmp_path / "passes"


def counted(answers: Sequence[Any]) -> Any:
    """A worker whose passes are counted."""
    made = type("Counted", (Worker, vllm_worker.CountedWorker), {})(answers)
    made.count_passes()
    return made


def test_a_pass_of_vllm_is_written_when_its_result_is_fetched(path: Path) -> None:
    output = Output()
    worker = counted([None, output])
    assert worker.execute_model(STEP) is None
    launched = worker.sample_tokens(None)
    assert launched is output and read(path, 0.0) == []
    assert launched.get_output() == "fetched"
    (one,) = read(path, 0.0)
    assert (one.prefill_tokens, one.prefills, one.decodes) == (65, 3, 1)
    assert one.began <= one.launched <= one.done


def test_results_that_are_there_at_once_are_written_at_once(path: Path) -> None:
    worker = counted([None, "result", "whole"])
    worker.execute_model(STEP)
    assert worker.sample_tokens(None) == "result" and len(read(path, 0.0)) == 1
    assert worker.execute_model(STEP) == "whole" and len(read(path, 0.0)) == 2


def test_a_step_without_tokens_is_no_pass(path: Path) -> None:
    worker = counted(["nothing"])
    assert worker.execute_model(scheduled({})) == "nothing"
    assert read(path, 0.0) == []


def test_passes_that_fly_together_keep_their_contents(path: Path) -> None:
    first, second = Output(), Output()
    worker = counted([None, first, None, second])
    for step in (STEP, scheduled({"answers": 1}, {"answers": 3})):
        worker.execute_model(step)
        worker.sample_tokens(None)
    first.get_output()
    second.get_output()
    assert [one.prefills for one in read(path, 0.0)] == [3, 0]


def test_a_fetched_result_is_freed_at_once(path: Path) -> None:
    output = Output()
    gone = weakref.ref(output)
    worker = counted([None, output])
    worker.execute_model(STEP)
    worker.sample_tokens(None).get_output()
    gc.disable()
    try:
        del output
        assert gone() is None  # its tensors would stay on the device
    finally:
        gc.enable()


# -------------------------------------------------------------------------- SGLang


class Mode:
    """SGLang's `ForwardMode`."""

    def __init__(self, name: str) -> None:
        self.name = name

    def is_decode(self) -> bool:
        return self.name == "decode"

    def is_extend(self) -> bool:
        return self.name in ("extend", "mixed")

    def is_mixed(self) -> bool:
        return self.name == "mixed"


def batch(mode: str, requests: int, tokens: int = 0, decodes: int = 0) -> Any:
    """SGLang's `ScheduleBatch`."""
    return SimpleNamespace(
        forward_mode=Mode(mode),
        reqs=[None] * requests,
        extend_num_tokens=tokens,
        decoding_reqs=[None] * decodes or None,
    )


def test_prefills_and_decodes_of_sglang_are_told_apart() -> None:
    contents = sglang_scheduler.contents
    assert contents(batch("decode", 5)) == (0, 0, 5)
    assert contents(batch("extend", 2, tokens=70)) == (70, 2, 0)
    assert contents(batch("mixed", 5, tokens=73, decodes=3)) == (70, 2, 3)
    assert contents(batch("idle", 0)) == (0, 0, 0)


def test_passes_of_sglang_are_written_in_the_order_of_results(path: Path) -> None:
    class Scheduler:
        def run_batch(self, batch: Any) -> str:
            return "launched"

        def process_batch_result(self, batch: Any, result: str) -> str:
            return "handled"

    sglang_scheduler.count_passes(Scheduler, Log())
    scheduler = Scheduler()
    steps = [batch("extend", 1, tokens=9), batch("idle", 0), batch("decode", 2)]
    assert [scheduler.run_batch(step) for step in steps] == ["launched"] * 3
    assert read(path, 0.0) == []
    for step in steps:
        assert scheduler.process_batch_result(step, "launched") == "handled"
    found = [(one.prefill_tokens, one.decodes) for one in read(path, 0.0)]
    assert found == [(9, 0), (0, 2)]


# -------------------------------------------------------------------------- probes


class Engine:
    """Answers at once, one pass for each token; `width` sequences at a time at most."""

    def __init__(self, path: Path, width: int) -> None:
        self._log = Log(path)
        self._width = width
        self._generating = 0
        self.running = Running(self, self.ask, {}, path)

    async def ask(self, prompt: Sequence[int], max_tokens: int) -> Reply:
        await asyncio.sleep(0.001)
        self._write(len(prompt), 1, 0)
        self._generating += 1
        for _ in range(max_tokens - 1):
            await asyncio.sleep(0.001)
            self._write(0, 0, min(self._generating, self._width))
        self._generating -= 1
        return Reply((7,) * max_tokens, len(prompt), 0, 0.0)

    def _write(self, tokens: int, prefills: int, decodes: int) -> None:
        now = time.monotonic()
        self._log.append(Pass(now, now, time.monotonic(), tokens, prefills, decodes))


def test_probes_collect_the_kinds_that_they_send(tmp_path: Path) -> None:
    probe = Probe(Engine(tmp_path / "passes", width=99).running, 0)

    async def send() -> None:
        await probe.prefills([8, 32], 1, 3)
        await probe.decodes([4], 12)
        await probe.prefills_beside([16], 5, 300)

    asyncio.run(send())
    kinds = {
        (one.prefill_tokens, one.prefills, one.decodes, one.beside): count
        for one, count in medians(probe.passes).items()
    }
    assert kinds[8, 1, 0, 0] == kinds[32, 1, 0, 0] == 3
    assert kinds[0, 0, 4, 0] >= 8 and kinds[0, 0, 5, 5] > 0 and kinds[16, 1, 0, 5] > 0
    assert not any(n for kind, n in kinds.items() if kind[2] in (1, 2, 3))


def test_sequences_that_never_generate_at_once_are_refused(tmp_path: Path) -> None:
    probe = Probe(Engine(tmp_path / "passes", width=3).running, 0)
    with pytest.raises(RuntimeError, match="longer ones"):
        asyncio.run(probe.prefills_beside([16], 5, 4))


# --------------------------------------------------------------------------- costs


def prefill(tokens: int, seconds: float, **kind: int) -> Timed:
    """A pass of one sequence, unless said otherwise."""
    values = {"prefills": 1, "decodes": 0, "beside": 0} | kind
    return Timed(tokens, **values, launch=seconds / 2, seconds=seconds)


STEPS = [prefill(0, s, prefills=0, decodes=n) for n, s in ((1, 0.01), (8, 0.02))]


def test_a_floor_and_a_slope_give_the_costs() -> None:
    # The host needs 20 ms whatever it launches, the device 50 us a token.
    alone = [prefill(n, max(0.02, 50e-6 * n)) for n in (1, 64, 512, 1024, 2048, 4096)]
    noise = [prefill(4096, 9.0, beside=30), prefill(4096, 9.0, prefills=4)]
    costs = fit([*alone, *noise, *STEPS])
    assert costs.smallest_pass == 0.02
    assert costs.token == pytest.approx(50e-6)
    assert costs.pass_tokens == pytest.approx(400)
    assert costs.step_tokens == pytest.approx(300)
    assert costs.move_tokens(2.0) == pytest.approx(40)


def test_medians_are_of_one_kind() -> None:
    found = medians([prefill(8, s) for s in (1, 9, 2)] + [prefill(8, 7, beside=3)])
    assert {(one.beside, one.seconds): n for one, n in found.items()} == {
        (0, 2): 3,
        (3, 7): 1,
    }


@pytest.mark.parametrize(
    "passes",
    [
        STEPS,
        [prefill(1, 1.0), prefill(9, 2.0)],
        [prefill(1, 1.0), prefill(9, 1.0), *STEPS],
    ],
)
def test_too_little_for_costs_is_said(passes: list[Timed]) -> None:
    with pytest.raises(ValueError):
        fit(passes)
    assert "No costs: " in pass_cost.report(passes, {"device": "none"}, None)


def test_the_report_has_costs_as_the_core_names_them(tmp_path: Path) -> None:
    moves = tmp_path / "moves.json"
    move = {"MiB": 24, "to states ms": 0.5, "to pages ms": 1.0}
    moves.write_text(json.dumps({"blocks": [{"moves": [move]}, {"moves": []}]}))
    passes = [prefill(1, 0.01), prefill(1000, 0.11), *STEPS]
    text = pass_cost.report(passes, {"device": "a"}, moves)
    assert "PASS_TOKENS = 100" in text and "STEP_TOKENS = 150" in text
    assert "MOVE_TOKENS = 10 (24 MiB)" in text
    assert "| 1000 | 1 | 0 | 0 | 1 | 55.00 | 110.00 |" in text
    assert Costs(1, 0.5, 2).pass_tokens == 2
