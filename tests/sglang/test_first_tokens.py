# SPDX-License-Identifier: Apache-2.0
"""First tokens go out before the rest of another prompt is launched."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

from sglang.srt.environ import envs
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_context
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from hybrid_plugin.sglang import patches
from tests.sglang.fakes import Batch, Bench, pausing, request

AT = 8
"""Where the prompt pauses."""


@pytest.fixture(autouse=True)
def configured() -> Iterator[None]:
    with get_context().override_server_args():
        yield


@pytest.fixture
def hooked(monkeypatch: pytest.MonkeyPatch) -> Any:
    """SGLang's question whether to handle results first, under our hook."""
    hooks: dict[str, Any] = {}

    def hook(target: str, kind: str, function: Any) -> None:
        assert kind == "AFTER"
        hooks[target.rpartition(".")[2]] = function

    monkeypatch.setattr(patches, "_hook", hook)
    patches._answer_before_going_on()
    after = hooks["is_disable_overlap_for_batch"]

    def ask(scheduler: Any, batch: Any, last_batch: Any) -> bool:
        scheduler.result_queue = [last_batch] if last_batch is not None else []
        if not hasattr(scheduler, "require_mlp_sync"):
            scheduler.require_mlp_sync = False
        result = Scheduler.is_disable_overlap_for_batch(scheduler, batch, last_batch)
        return bool(after(result, scheduler, batch, last_batch=last_batch))

    return ask


class Pass(Bench):
    """A bench that asks, as SGLang's loop does, before it launches a batch."""

    def __init__(self, ask: Any) -> None:
        super().__init__()
        self.ask = ask
        self.answers: list[bool] = []
        self.ends: list[Any] = []
        """Requests that the results of the last batch end."""
        self.mode = ForwardMode.EXTEND

    def _launch(self, reqs: list[Any]) -> Batch:
        batch: Any = Batch(reqs, self.rows)
        batch.spec_algorithm = SpeculativeAlgorithm.NONE
        batch.is_extend_in_batch = True
        batch.forward_mode = self.mode
        first = self.ask(self.scheduler, batch, self.scheduler.last_batch)
        self.answers.append(first)
        if first:
            for req in self.ends:
                self.finish(req)
            self.ends = []
        return super()._launch(reqs)


@pytest.fixture
def bench(hooked: Any) -> Pass:
    return Pass(hooked)


def test_first_tokens_go_out_before_the_rest_of_a_paused_prompt(bench: Pass) -> None:
    short = request("short", range(100, 110))
    bench.queue(pausing("paused", range(20), at=AT), short)
    assert bench.step() == ["paused", "short"]
    bench.ends = [short]
    assert bench.step() == ["paused"]
    assert bench.answers == [False, True]
    assert short.finished() and not bench.ends
    bench.finish(bench.scheduler.last_batch.reqs[0])  # type: ignore[union-attr]
    bench.scheduler.last_batch = None
    bench.assert_idle()


@pytest.mark.parametrize("flag", [False, True])
def test_a_pass_that_also_decodes_is_launched_first(bench: Pass, flag: bool) -> None:
    """Who ends with the last results has a token in it, and a copy would precede it."""
    short = request("short", range(100, 110))
    bench.queue(pausing("paused", range(20), at=AT), short)
    assert bench.step() == ["paused", "short"]
    with envs.SGLANG_DISABLE_CONSECUTIVE_PREFILL_OVERLAP.override(flag):
        bench.mode = ForwardMode.MIXED
        assert bench.step() == ["paused"]
        assert bench.answers[-1] is False
        bench.scheduler.require_mlp_sync = True  # ranks must agree, whoever decodes
        batch: Any = Batch([], bench.rows)
        batch.forward_mode, batch.is_extend_in_batch = ForwardMode.MIXED, True
        batch.spec_algorithm = SpeculativeAlgorithm.NONE
        assert bench.ask(bench.scheduler, batch, batch) is flag


def test_pauses_alone_owe_nothing(bench: Pass) -> None:
    bench.queue(pausing("a", range(20), at=AT), pausing("b", range(50, 80), at=AT))
    assert bench.step() == ["a", "b"]
    assert bench.step() == ["a", "b"]
    assert bench.answers == [False, False]


def test_between_prompts_without_a_pause_sglang_s_flag_decides(bench: Pass) -> None:
    bench.queue(request("first", range(10)))
    bench.step()
    bench.queue(request("second", range(50, 60)))
    bench.step()
    assert bench.answers == [False, False]
    with envs.SGLANG_DISABLE_CONSECUTIVE_PREFILL_OVERLAP.override(True):
        bench.queue(request("third", range(80, 90)))
        bench.step()
    assert bench.answers == [False, False, True]


def test_a_rest_that_follows_no_prefill_is_overlapped(bench: Pass) -> None:
    bench.queue(pausing("paused", range(20), at=AT), request("short", range(40, 50)))
    bench.step()
    bench.scheduler.last_batch.forward_mode = ForwardMode.DECODE  # type: ignore[union-attr]
    bench.step()
    assert bench.answers == [False, False]


def test_it_is_forgotten_with_the_launch(bench: Pass, hooked: Any) -> None:
    bench.queue(pausing("paused", range(20), at=AT), request("short", range(40, 50)))
    bench.step()
    bench.step()
    assert bench.answers == [False, True]
    bench.queue(request("late", range(60, 70)))
    bench.step()
    assert bench.answers == [False, True, False]
    last = bench.scheduler.last_batch
    assert hooked(bench.scheduler, None, last) is False


def test_ranks_that_must_agree_are_left_to_sglang(bench: Pass) -> None:
    bench.scheduler.require_mlp_sync = True  # type: ignore[attr-defined]
    bench.queue(pausing("paused", range(20), at=AT), request("short", range(40, 50)))
    for _ in range(2):
        last = bench.scheduler.last_batch
        if last is not None:
            last.is_extend_in_batch = True  # type: ignore[attr-defined]
        bench.step()
    assert bench.answers == [False, False]


def test_without_our_cache_nothing_changes(hooked: Any) -> None:
    scheduler = SimpleNamespace(tree_cache=object(), require_mlp_sync=False)
    batch: Any = SimpleNamespace(
        forward_mode=ForwardMode.EXTEND,
        reqs=[1],
        spec_algorithm=SpeculativeAlgorithm.NONE,
    )
    assert hooked(scheduler, batch, batch) is False
    with envs.SGLANG_DISABLE_CONSECUTIVE_PREFILL_OVERLAP.override(True):
        assert hooked(scheduler, batch, batch) is True
