# SPDX-License-Identifier: Apache-2.0
"""Memory moves between the pools of a real SGLang, and nobody notices."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.engines import slow_decay
from tests.engines.conftest import StartServer
from tests.engines.elastic_phases import ANSWER, phases
from tests.engines.messages import Ask
from tests.engines.server import Server
from tests.engines.test_pressure import burst, wait_until_idle
from tests.engines.watch import read, watch_environment

pytest.importorskip("sglang")
pytestmark = pytest.mark.engine

BUDGET = 8 << 20
ELASTIC = {"elastic": True, "gpu_memory_budget": BUDGET}
STATES, KV, STATES_AGAIN, KV_AGAIN = range(4)

Answers = list[list[tuple[int, ...]]]


@dataclass
class Seen:
    """What a server with elastic pools did."""

    answers: Answers
    memory: list[dict[str, int]]
    """After each phase."""
    metrics: list[dict[str, float]]
    idle: dict[str, float] = field(default_factory=dict)
    """Metrics after a burst with aborts."""
    flushed: dict[str, float] = field(default_factory=dict)
    at_last: dict[str, int] = field(default_factory=dict)
    log: str = ""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In float32, so that equal computation gives equal tokens."""
    return slow_decay.write_nemotron_h(tmp_path_factory.mktemp("model") / "nemotron-h")


@pytest.fixture(scope="module", params=[True, False], ids=["packed", "layer-major"])
def packed(request: pytest.FixtureRequest) -> bool:
    """Whether the layers of a page may lie side by side."""
    return bool(request.param)


@pytest.fixture(scope="module")
def moving(
    model: Path,
    start_server: StartServer,
    tmp_path_factory: pytest.TempPathFactory,
    packed: bool,
) -> Seen:
    """All phases, then pressure, on one server with pools over one budget."""
    report = tmp_path_factory.mktemp("watch") / "report.json"
    with start_server(
        "elastic",
        model=model,
        dtype="float32",
        options=ELASTIC,
        max_running=64,
        environment=watch_environment(report, packed=packed),
    ) as server:
        seen = Seen([], [], [])
        for prompts in phases().values():
            seen.answers.append(ask(server, prompts))
            seen.memory.append(read(report))
            seen.metrics.append(server.metrics())
        answers = server.ask_all(burst(0)[:32], concurrency=32)
        assert [a.error for a in answers if a.error] == []
        seen.idle = wait_until_idle(server)
        assert server.is_alive()
        server.reset_prefix_cache()
        seen.flushed = wait_until_idle(server)
        assert server.is_alive()
        seen.at_last, seen.log = read(report), server.log_text()
    return seen


@pytest.fixture(scope="module")
def expected(model: Path, start_server: StartServer) -> Answers:
    """What the plugin answers with pools that stay as they are."""
    with start_server("static", model=model, dtype="float32", max_running=64) as server:
        return [ask(server, prompts) for prompts in phases().values()]


def ask(server: Server, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    asks = [Ask(tuple(prompt), ANSWER) for prompt in prompts]
    answers = server.ask_all(asks, concurrency=len(asks))
    assert [a.error for a in answers if a.error] == []
    return [a.tokens for a in answers]


def test_memory_goes_where_it_is_wanted(moving: Seen) -> None:
    memory = moving.memory
    for wants_states, wants_kv in ((STATES, KV), (STATES_AGAIN, KV_AGAIN)):
        less, more = memory[wants_states], memory[wants_kv]
        assert more["resident_kv"] > 2 * less["resident_kv"]
        assert less["resident_state"] > 2 * more["resident_state"]
    assert moving.at_last["grown_kv"] > 10 and moving.at_last["grown_state"] > 10


def test_pages_lie_as_wanted(moving: Seen, packed: bool) -> None:
    assert f"its layers lie {'side by side' if packed else 'apart'}" in moving.log


def test_the_budget_is_held(moving: Seen) -> None:
    last = moving.at_last
    assert last["budget"] <= BUDGET
    assert BUDGET // 2 < last["most_mapped"] <= last["budget"]
    assert last["most_resident"] <= last["most_mapped"]


def test_resident_memory_follows_what_is_mapped(moving: Seen) -> None:
    for memory in moving.memory:
        for pool in ("kv", "state"):
            assert memory[f"resident_{pool}"] <= memory[f"mapped_{pool}"]
        resident = memory["resident_kv"] + memory["resident_state"]
        assert 0.75 * memory["mapped"] < resident


def test_answers_are_those_of_pools_that_stay(moving: Seen, expected: Answers) -> None:
    assert moving.answers == expected


def test_metrics_tell_what_is_mapped_and_moved(moving: Seen) -> None:
    for memory, metrics in zip(moving.memory, moving.metrics, strict=True):
        assert metrics["mapped_bytes{kv}"] == memory["mapped_kv"]
        assert metrics["mapped_bytes{state}"] == memory["mapped_state"]
    assert moving.idle["moves"] > 50
    assert moving.idle["moved_bytes"] > BUDGET
    assert moving.idle["move_seconds"] > 0


def test_the_log_tells_of_large_moves(moving: Seen) -> None:
    assert moving.log.count("Cache memory moved between the pools") >= 2


def test_nothing_leaks_under_pressure(moving: Seen) -> None:
    for levels in (moving.idle, moving.flushed):
        assert levels["kv{used}"] == levels["state{used}"] == 0
    assert moving.idle["pages_evicted"] > 0
    assert moving.flushed["kv{cached}"] == moving.flushed["state{cached}"] == 0
