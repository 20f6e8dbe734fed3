# SPDX-License-Identifier: Apache-2.0
"""Requests of our own that check hits in vLLM, and what comes of them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from vllm import SamplingParams
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from hybrid_plugin.core.stats import CacheStats
from hybrid_plugin.vllm.hit_checks import HitChecking
from hybrid_plugin.vllm.scheduler import HybridScheduler

SAME, OTHER = {7: -0.1, 8: -2.5}, {3: -0.1, 4: -2.5}


def client(**fields: Any) -> Request:
    parameters = SamplingParams(max_tokens=9, temperature=0.7)
    return Request("client", [*range(90)], parameters, None, **fields)


def output(request: Request, top: dict[int, float], hit: int) -> Any:
    return SimpleNamespace(
        request_id=request.request_id,
        new_logprobs=SimpleNamespace(
            logprob_token_ids=np.array([list(top)]),
            logprobs=np.array([list(top.values())]),
        ),
        prefill_stats=SimpleNamespace(num_cached_tokens=hit),
    )


@pytest.fixture
def checking() -> HitChecking:
    return HitChecking(1.0, CacheStats())


def judged(checking: HitChecking, *outputs: Any) -> list[str]:
    """Whose outputs are left when ours were taken."""
    step: Any = SimpleNamespace(
        outputs=[*outputs, SimpleNamespace(request_id="client")]
    )
    checking.take({0: step})
    return [one.request_id for one in step.outputs]


def test_both_runs_ask_for_one_token_behind_the_same_prompt(
    checking: HitChecking,
) -> None:
    checking.admitted(client(cache_salt="tea"), 64)
    restored, computed = checking.begin()
    for request in (restored, computed):
        assert checking.owns(request.request_id) and not checking.owns("client")
        assert request.prompt_token_ids == [*range(90)]
        assert (request.max_tokens, request.cache_salt) == (1, "tea")
        assert request.sampling_params.temperature == 0.0
    assert not restored.skip_reading_prefix_cache
    assert computed.skip_reading_prefix_cache
    assert checking.limit(restored.request_id) == 64


def test_outputs_of_ours_go_to_no_client(checking: HitChecking) -> None:
    checking.admitted(client(), 64)
    restored, computed = checking.begin()
    assert judged(checking, output(restored, SAME, 64)) == ["client"]
    assert judged(checking, output(computed, SAME, 0)) == ["client"]
    stats = checking._checks._stats
    assert (stats.hit_checks, stats.hit_checks_failed) == (1, 0)
    assert not checking.owns(restored.request_id)


def test_a_difference_is_logged(
    checking: HitChecking, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    log = SimpleNamespace(error=lambda text, *args: said.append(text % args))
    monkeypatch.setattr("hybrid_plugin.vllm.hit_checks.logger", log)
    checking.admitted(client(), 64)
    restored, computed = checking.begin()
    judged(checking, output(restored, OTHER, 64), output(computed, SAME, 0))
    assert checking._checks._stats.hit_checks_failed == 1
    (line,) = said
    assert line.startswith("hybrid-plugin: a hit of 64 of 90 tokens gave other log")
    Path(line.split()[-4]).unlink()


def test_an_aborted_run_says_nothing(checking: HitChecking) -> None:
    checking.admitted(client(), 64)
    restored, computed = checking.begin()
    aborted = output(restored, SAME, 64)
    aborted.new_logprobs = None
    judged(checking, aborted, output(computed, OTHER, 0))
    assert checking._checks._stats.hit_checks == 0
    checking.admitted(client(), 64)
    assert checking.is_waiting


def test_what_tokens_do_not_say_is_not_checked(checking: HitChecking) -> None:
    seen = client()
    seen.mm_features = [SimpleNamespace()]  # type: ignore[list-item]
    again = client()
    again.num_preemptions = 1
    for request in (seen, again):
        checking.admitted(request, 64)
        assert not checking.is_waiting


def test_a_run_that_is_aborted_ends_its_check(checking: HitChecking) -> None:
    """No output tells of it."""
    for _ in range(2):
        checking.admitted(client(), 64)
        for run in checking.begin():
            checking.aborted(run.request_id)
            assert not checking.owns(run.request_id)
    checking.aborted("a client's")
    checking.admitted(client(), 64)
    assert checking.is_waiting


def test_checks_begin_when_nothing_else_is_there(
    checking: HitChecking, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not while the engine is paused, which is over when there is no work left."""
    scheduler: Any = HybridScheduler.__new__(HybridScheduler)
    manager = SimpleNamespace(hit_checking=checking, has_work=False, must_settle=False)
    scheduler.kv_cache_manager = manager
    scheduler.requests, scheduler._pause_state = {}, PauseState.UNPAUSED
    monkeypatch.setattr(Scheduler, "has_requests", lambda self: bool(self.requests))
    monkeypatch.setattr(
        Scheduler,
        "add_request",
        lambda self, request: self.requests.setdefault(request.request_id, request),
    )
    assert not scheduler.has_requests()
    checking.admitted(client(), 64)
    for state in (PauseState.PAUSED_ALL, PauseState.PAUSED_NEW):
        scheduler._pause_state = state
        assert not scheduler.has_requests()
    scheduler._pause_state = PauseState.UNPAUSED
    scheduler.requests = {"another": None}
    assert not scheduler._checks_hits
    scheduler.requests = {}
    assert scheduler.has_requests() and scheduler._checks_hits
    scheduler._begin_check()
    assert len(scheduler.requests) == 2
    checking.admitted(client(), 64)
    scheduler.requests = {}
    assert not scheduler._checks_hits, "one at a time"
