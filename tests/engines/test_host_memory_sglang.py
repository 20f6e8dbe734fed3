# SPDX-License-Identifier: Apache-2.0
"""What the device of a real SGLang evicts comes back from host memory, unnoticed."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from hybrid_plugin.tools.demo.compare import NEAR_TIE
from tests.engines import slow_decay, web
from tests.engines.compare import compare
from tests.engines.conftest import StartServer
from tests.engines.drivers.driver import MODEL
from tests.engines.drivers.sglang import ON_GPU, RETRACTING
from tests.engines.greedy import gaps
from tests.engines.messages import Answer, Ask
from tests.engines.server import Server
from tests.engines.test_mtp_sglang import FLAGS as DRAFTING
from tests.engines.test_mtp_sglang import LEAST_LENGTH, TOKENS
from tests.engines.test_pressure import wait_until_idle
from tests.engines.traffic import encode, next_turns, system_prompt

pytest.importorskip("sglang")
pytestmark = pytest.mark.engine

DTYPE, BOUND = ("bfloat16", NEAR_TIE) if ON_GPU else ("float32", 0.0)
"""Of the models, and nats by which answers may differ: SGLang's norms take no float32
on a GPU."""
NOTHING = NEAR_TIE if ON_GPU else 1e-5
"""Nats by which another token may be likelier: rounding."""
HOST: Mapping[str, Any] = {"host_memory": "96MiB"}
CHATS, ANSWER = 12, 12
POOLS = (76, 7)
"""Pages and slots: three of the chats' prompts, of the twelve."""
SETUPS: Mapping[str, Mapping[str, Any]] = {
    "fixed pools": {"options": {"elastic": False, **HOST}, "pools": POOLS},
    "elastic pools, our kernels, preemption": {
        "options": {
            "elastic": True,
            "gpu_memory_budget": (26 if ON_GPU else 5) << 20,
            "kernels": "ours",
            **HOST,
        },
        "environment": RETRACTING,
    },
}


@dataclass
class Seen:
    """What a server did, turn by turn."""

    answers: list[Answer] = field(default_factory=list)
    levels: dict[str, float] = field(default_factory=dict)
    """Metrics when all was done."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In float32 where it can be: equal computation gives equal tokens then."""
    return slow_decay.write_nemotron_h(tmp_path_factory.mktemp("model") / "nemotron-h")


@pytest.fixture(scope="module")
def reference(model: Path, start_server: StartServer) -> tuple[list[Ask], list[Answer]]:
    """Two turns of each chat, and the answers of the stock engine without a cache."""
    first = first_turns()
    with start_server(
        "stock", plugin=False, prefix_cache=False, dtype=DTYPE, model=model
    ) as stock:
        answers = ask(stock, first)
        second = next_turns(first, answers, seed=2)
        answers += ask(stock, second)
    return [*first, *second], answers


def first_turns() -> list[Ask]:
    """Prompts that begin differently."""
    return [
        Ask(encode(f"{n}. {system_prompt(random.Random(n), 330)} And you?"), ANSWER)
        for n in range(CHATS)
    ]


def ask(server: Server, asks: Sequence[Ask]) -> list[Answer]:
    """In order, three at a time."""
    answers = server.ask_all([replace(one, logprobs=5) for one in asks], 3)
    assert [answer.error for answer in answers if answer.error] == []
    return answers


def play(server: Server, asks: Sequence[Ask]) -> Seen:
    """All turns, the second ones when the device has forgotten the first."""
    seen = Seen(ask(server, asks[:CHATS]))
    seen.answers += ask(server, asks[CHATS:])
    seen.levels = wait_until_idle(server)
    assert server.is_alive()
    return seen


@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS)
def test_second_turns_resume_from_host_memory(
    model: Path,
    start_server: StartServer,
    reference: tuple[list[Ask], list[Answer]],
    setup: Mapping[str, Any],
) -> None:
    asks, expected = reference
    with start_server("host", dtype=DTYPE, model=model, **setup) as server:
        seen = play(server, asks)
        outcome = compare(expected, seen.answers, BOUND)
        server.reset_prefix_cache()
        flushed = wait_until_idle(server)
        again = server.ask(asks[-1].prompt, ANSWER)
    print(outcome, seen.levels)
    assert outcome.wrong == () and outcome.compared == 2 * CHATS
    levels = seen.levels
    restored(seen.answers[CHATS:], levels)
    sources = [answer.cached_from for answer in seen.answers]
    assert sum(of.get("host", 0) for of in sources) == levels["host_hit_tokens"]
    for answer in seen.answers:
        assert sum(answer.cached_from.values()) == answer.cached_tokens
    assert levels["snapshots_evicted"] > CHATS / 2
    assert levels["host_stores"] >= CHATS
    assert levels["host.kv{used}"] == levels["host.state{used}"] == 0
    assert levels["host.kv{cached}"] > 0 and levels["host.state{cached}"] > 0
    assert levels["kv{used}"] == levels["state{used}"] == 0
    if "environment" in setup:
        assert levels["preemptions"] > 0 and levels["interior_snapshots"] > 0
    for pool in ("kv", "state", "host.kv", "host.state"):
        assert flushed[f"{pool}{{cached}}"] == 0
    assert again.cached_tokens == 0, "a flush forgets what is on the host as well"


def test_ranks_agree_on_what_to_restore_and_when(
    model: Path, start_server: StartServer
) -> None:
    """Each decides for itself; did they differ, their collectives would not fit."""
    asks = first_turns()
    with start_server(
        "ranks",
        dtype=DTYPE,
        model=model,
        flags=("--tp-size=2",),
        environment={"SGLANG_CPU_OMP_THREADS_BIND": "0|1"},
        **SETUPS["fixed pools"],
    ) as server:
        answers = ask(server, asks)
        asks += next_turns(asks, answers, seed=2)
        answers += ask(server, asks[CHATS:])
        levels = wait_until_idle(server)
    assert max(gaps(model, asks, answers)) < NOTHING
    restored(answers[CHATS:], levels)


def test_windows_resume_from_host_memory(
    tmp_path: Path, start_server: StartServer
) -> None:
    model = slow_decay.write_laguna(tmp_path)
    asks = first_turns()
    with start_server(
        "windows", dtype=DTYPE, model=model, **SETUPS["fixed pools"]
    ) as server:
        answers = ask(server, asks)
        asks += next_turns(asks, answers, seed=2)
        answers += ask(server, asks[CHATS:])
        levels = wait_until_idle(server)
    assert max(gaps(model, asks, answers)) < NOTHING
    restored(answers[CHATS:], levels)
    assert levels["host.window0{cached}"] > 0


def test_drafts_are_as_good_behind_what_host_memory_brought(
    start_server: StartServer,
) -> None:
    """KV of the draft model lies in the same pages, so it comes along."""
    asks = [replace(one, max_tokens=TOKENS) for one in first_turns()]
    with start_server("drafts", flags=DRAFTING, **SETUPS["fixed pools"]) as server:
        answers = ask(server, asks)
        first = verified(server)
        asks += next_turns(asks, answers, seed=2)
        answers += ask(server, asks[CHATS:])
        second = verified(server) - first
        levels = wait_until_idle(server)
    assert max(gaps(MODEL, asks, answers)) < NEAR_TIE
    restored(answers[CHATS:], levels)
    tokens = [sum(len(a.tokens) - 1 for a in turns) for turns in halves(answers)]
    print(tokens, first, second, levels)
    assert tokens[1] / second > 0.9 * tokens[0] / first > 0.9 * LEAST_LENGTH


def halves(answers: list[Answer]) -> tuple[list[Answer], list[Answer]]:
    """Of the first turns, and of the second ones."""
    return answers[:CHATS], answers[CHATS:]


def verified(server: Server) -> float:
    """Steps that verified drafts so far."""
    return server.counter("sglang:spec_verify_calls_total")


def restored(second: Sequence[Answer], levels: Mapping[str, float]) -> None:
    """Second turns did not compute what the device had forgotten."""
    whole = sum(answer.prompt_tokens for answer in second)
    assert sum(answer.cached_tokens for answer in second) > 0.75 * whole
    assert levels["host_hit_tokens"] > 0.5 * whole
    assert levels["host_loads"] > CHATS / 2


def test_answers_change_when_states_on_the_host_are_zeroed(
    model: Path, start_server: StartServer, reference: tuple[list[Ask], list[Answer]]
) -> None:
    """Negative control: the comparison does see a wrong state that was restored."""
    asks, expected = reference
    with start_server(
        "zeroed",
        dtype=DTYPE,
        model=model,
        fault="zero_restored_states",
        **SETUPS["fixed pools"],
    ) as server:
        seen = play(server, asks)
    outcome = compare(expected, seen.answers, BOUND)
    assert len(outcome.wrong) > CHATS / 2


def test_requests_that_wait_for_a_restore_can_be_dropped(
    model: Path, start_server: StartServer, reference: tuple[list[Ask], list[Answer]]
) -> None:
    """Restores take seconds here: clients go, the cache is flushed, nothing leaks."""
    asks, expected = reference
    setup = SETUPS["fixed pools"]
    with start_server(
        "slow", dtype=DTYPE, model=model, fault="slow_restores", **setup
    ) as server:
        ask(server, asks[:CHATS])
        with running(server, "busy"):
            begun = time.monotonic()
            waited = ask(server, asks[CHATS : CHATS + 1])
            took = time.monotonic() - begun
            with running(server, "dropped", asks[CHATS + 1].prompt):
                time.sleep(0.5)
            with running(server, "dropped too", asks[CHATS + 2].prompt):
                time.sleep(0.5)
        server.reset_prefix_cache()
        flushed = wait_until_idle(server)
        last = ask(server, asks[-2:])
        assert server.is_alive()
    assert took > 1.0, "restores are not slow"
    outcome = compare([expected[CHATS], *expected[-2:]], [*waited, *last], BOUND)
    assert outcome.wrong == () and outcome.compared == 3
    assert waited[0].cached_tokens > 300
    assert all(answer.cached_tokens == 0 for answer in last)
    assert flushed["host_loads"] == 3
    assert flushed["kv{used}"] == flushed["state{used}"] == 0
    assert flushed["host.kv{used}"] == flushed["host.kv{cached}"] == 0


@contextmanager
def running(
    server: Server, name: str, prompt: Sequence[int] = (5, 6, 7)
) -> Iterator[None]:
    """Have a request run, or wait, and abort it."""
    body = {
        "rid": name,
        "input_ids": list(prompt),
        "sampling_params": {
            "max_new_tokens": 500,
            "temperature": 0,
            "ignore_eos": True,
        },
    }
    with ThreadPoolExecutor(1) as pool:
        url = f"{server.url}/generate"
        sent = pool.submit(web.post, url, json=body, timeout=120.0)
        time.sleep(0.3)
        yield
        assert not sent.done(), "it is over before it is aborted"
        web.post(f"{server.url}/abort_request", json={"rid": name})
        about = sent.result().json()["meta_info"]
    assert about["finish_reason"]["type"] == "abort"
    if name != "busy":
        assert about["completion_tokens"] == 0, "it did not wait"
