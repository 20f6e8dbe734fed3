# SPDX-License-Identifier: Apache-2.0
"""Weights that change in a vLLM that serves, and memory that it gives back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from hybrid_plugin.vllm import worker as workers
from hybrid_plugin.vllm.patches import watch_weights
from hybrid_plugin.vllm.reports import Report
from hybrid_plugin.vllm.scheduler import COMMANDS, FLUSHED
from hybrid_plugin.vllm.worker_tiers import Ranks
from tests.vllm.fakes import manager


class Model:
    """As much of a model as trainers call."""

    weights = 1

    def load_weights(self, weights: int) -> str:
        """Load them; says what was."""
        self.weights = weights
        return "loaded"


class Stock:
    """What of vLLM's worker ours calls."""

    def execute_model(self, scheduler_output: Any) -> None:
        self.done.append("pass")

    def apply_model(self, fn: Any) -> Any:
        return fn(self.model)

    def reload_weights(self) -> None:
        self.model.load_weights(9)

    def sleep(self, level: int = 1) -> None:
        self.done.append(f"sleep {level}")

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.done.append("wake up")

    def discard(self, tags: tuple[str, ...]) -> None:
        self.done.append("discard")


class Worker(workers.RunsCommands, Stock):
    """One that is ready to serve."""


@pytest.fixture
def worker() -> Any:
    one: Any = Worker.__new__(Worker)
    one.done = []
    one.model = Model()

    def note(what: str) -> None:
        one.done.append(what)

    one._pools = SimpleNamespace(
        executor=SimpleNamespace(
            run=lambda commands: None, moves=SimpleNamespace(seconds=0.0)
        ),
        release=lambda: note("release"),
        restore=lambda: note("restore"),
    )
    one._layers = SimpleNamespace(refresh=lambda: note(f"rates {one.model.weights}"))
    one._tiers = SimpleNamespace(
        settle=list, updates=0, weights_changed=lambda: note("other files")
    )
    one._passes, one._load_rate, one._stepped_aside = None, None, None
    one._reported, one._outcomes, one._ranks = Report(), [], Ranks()
    watch_weights(one.model, one._weights_written)
    return one


def step(worker: Any, tokens: int, *, flushed: bool = False) -> list[str]:
    """What a step does."""
    worker.done.clear()
    output = SimpleNamespace(total_num_scheduled_tokens=tokens)
    setattr(output, COMMANDS, [])
    if flushed:
        setattr(output, FLUSHED, True)
    worker.execute_model(output)
    done, worker.done = worker.done, []
    return done


def test_weights_that_an_extension_loads_are_noticed(worker: Any) -> None:
    """Rates are computed again before the next pass: until then more may be loaded."""
    assert step(worker, 5) == ["pass"]
    assert worker.model.load_weights(7) == "loaded"
    assert worker.done == ["other files"]
    assert step(worker, 0) == ["pass"], "they may be incomplete"
    assert step(worker, 5) == ["rates 7", "pass"]
    assert step(worker, 5) == ["pass"]


def test_a_function_on_the_model_may_write_weights(worker: Any) -> None:
    assert worker.apply_model(lambda model: setattr(model, "weights", 3)) is None
    assert worker.done == ["other files"]
    assert step(worker, 5) == ["rates 3", "pass"]


def test_weights_are_taken_anew_behind_a_flush(worker: Any) -> None:
    """Whoever wrote them: that is how an engine is told."""
    worker.model.weights = 4
    assert step(worker, 0, flushed=True) == ["pass"]
    assert step(worker, 5) == ["rates 4", "pass"]


def test_reloaded_weights_are_taken_at_once(worker: Any) -> None:
    worker.reload_weights()
    assert worker.done[-2:] == ["rates 9", "other files"]


def test_a_worker_that_stepped_aside_leaves_all_to_vllm(worker: Any) -> None:
    worker._stepped_aside = "it does not serve this."
    worker.apply_model(lambda model: None)
    worker.sleep(2)
    worker.wake_up()
    worker.discard(("kv_cache",))
    assert worker.done == ["sleep 2", "wake up", "discard"]


def test_workers_hear_of_a_flush_once() -> None:
    of = manager(pages=11, slots=5)
    assert not of.was_flushed
    assert of.reset_prefix_cache() and of.was_flushed
    of.drain_commands()
    assert not of.was_flushed


def test_pools_are_released_while_the_engine_sleeps(worker: Any) -> None:
    worker.sleep(1)
    worker.wake_up(["weights"])
    assert worker.done == ["release", "sleep 1", "wake up"]
    worker.wake_up(["kv_cache"])
    assert worker.done[3:] == ["wake up", "restore"]
    worker.sleep(2)
    worker.wake_up()
    assert worker.done[5:] == ["release", "sleep 2", "wake up", "restore"]
    worker.discard(("weights",))
    worker.discard(("kv_cache",))
    assert worker.done[9:] == ["discard", "discard", "release"]
