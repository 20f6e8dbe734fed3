# SPDX-License-Identifier: Apache-2.0
"""SGLang's own prefill and decode servers, over NIXL: the first ones cache."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("sglang")
pytest.importorskip("nixl_cu12")

from hybrid_plugin.tools.demo.compare import NEAR_TIE
from tests.engines import slow_decay, web
from tests.engines.conftest import StartServer
from tests.engines.drivers import Driver
from tests.engines.drivers.driver import MODEL
from tests.engines.greedy import gaps
from tests.engines.messages import Answer, Ask
from tests.engines.server import Server, free_port
from tests.engines.test_mtp_sglang import FLAGS, LEAST_LENGTH, PROMPTS, TOKENS
from tests.engines.traffic import encode, system_prompt

pytestmark = pytest.mark.engine

CHATS, SHARED, OWN, LENGTH = 8, 200, 90, 8
SHAPE = ("--page-size=16", "--disaggregation-transfer-backend=nixl")
TCP = {"UCX_TLS": "tcp,self"}
Tokens = list[int]


@dataclass
class Pair:
    """A prefill server and a decode server; the test is their router."""

    prefill: Server
    decode: Server
    bootstrap_port: int
    cached: list[int]
    """Tokens of each prompt that the prefill server had."""

    def __post_init__(self) -> None:
        self._rooms = count(self.bootstrap_port << 16)

    def ask(self, prompt: Tokens, length: int = LENGTH) -> Tokens:
        """Have both serve a prompt; the second one answers."""
        first, second = self._post_to_both(prompt, 300.0, length)
        self.cached.append(first["meta_info"]["cached_tokens"])
        return list(second["output_ids"])

    def hang_up(self, seed: int, seconds: float) -> None:
        """Have both serve a long prompt, and wait no longer than so many seconds."""
        prompt = list(encode(system_prompt(random.Random(100 + seed), 900)))
        with contextlib.suppress(httpx.ReadTimeout):
            self._post_to_both(prompt, seconds)

    def _post_to_both(
        self, prompt: Tokens, patience: float, length: int = LENGTH
    ) -> list[dict[str, Any]]:
        body = asked(prompt, length) | {
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": self.bootstrap_port,
            "bootstrap_room": next(self._rooms),
        }
        with ThreadPoolExecutor(2) as both:
            servers = self.prefill, self.decode
            return list(both.map(lambda one: _post(one, body, patience), servers))


def asked(prompt: Tokens, length: int = LENGTH) -> dict[str, Any]:
    """What a server is sent."""
    sampling = {"max_new_tokens": length, "temperature": 0, "ignore_eos": True}
    return {"input_ids": prompt, "sampling_params": sampling}


def _post(server: Server, body: dict[str, Any], patience: float) -> dict[str, Any]:
    answer = web.post(f"{server.url}/generate", json=body, timeout=patience)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return slow_decay.write_nemotron_h(tmp_path_factory.mktemp("model") / "nemotron-h")


@pytest.fixture(scope="module")
def decode(start_server: StartServer, model: Path) -> Iterator[Server]:
    """With the plugin's flag, which has it step aside; of all prefill servers."""
    flags = (*SHAPE, "--disaggregation-mode=decode")
    with start_server("decode", **setup_of(model), flags=flags) as server:
        yield server


def setup_of(model: Path) -> dict[str, Any]:
    """What all of these servers have in common."""
    return {"model": model, "dtype": "float32", "environment": TCP}


@contextmanager
def served(
    start_server: StartServer,
    decode: Server,
    model: Path,
    flags: Sequence[str] = (),
    **more: Any,
) -> Iterator[Pair]:
    """A prefill server for the decode server."""
    port = free_port()
    sends = (f"--disaggregation-bootstrap-port={port}", "--disaggregation-mode=prefill")
    setup = setup_of(model) | {"flags": (*SHAPE, *sends, *flags)} | more
    with start_server("prefill", **setup) as prefill:
        yield Pair(prefill, decode, port, [])


@pytest.fixture(scope="module")
def pair(start_server: StartServer, decode: Server, model: Path) -> Iterator[Pair]:
    with served(start_server, decode, model) as both:
        yield both


def turns() -> list[Tokens]:
    """Prompts that share a beginning, of more than one pass each."""
    shared = list(encode(system_prompt(random.Random(0), SHARED)))[:SHARED]
    texts = (system_prompt(random.Random(n), OWN) for n in range(1, CHATS + 1))
    return [[*shared, *list(encode(text))[:OWN]] for text in texts]


def go_on(prompts: Sequence[Tokens], answers: Sequence[Tokens]) -> list[Tokens]:
    """The next turns of these chats."""
    return [
        [*prompt, *answer, *encode(f" and {number}?")]
        for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
    ]


def ask_all(
    pair: Pair, prompts: Sequence[Tokens], length: int = LENGTH
) -> list[Tokens]:
    """Four at a time."""
    with ThreadPoolExecutor(4) as clients:
        return list(clients.map(lambda prompt: pair.ask(prompt, length), prompts))


def alone(server: Server, prompt: Tokens) -> Tokens:
    """What a server answers that does both."""
    return list(_post(server, asked(prompt), 300.0)["output_ids"])


def test_prefill_servers_cache_and_answers_are_those_of_one_server(
    pair: Pair, start_server: StartServer, model: Path
) -> None:
    first = turns()
    answers = ask_all(pair, first)
    second = go_on(first, answers)
    pair.cached.clear()
    answers += ask_all(pair, second)
    assert all(cached >= SHARED + OWN for cached in pair.cached), pair.cached
    stats = pair.prefill.metrics()
    assert stats["kv{used}"] == stats["state{used}"] == 0
    assert "decode servers keep no prefixes" in pair.decode.log_text()
    setup = {"model": model, "dtype": "float32", "flags": SHAPE[:1]}
    with start_server("alone", **setup, plugin=False, prefix_cache=False) as server:
        assert answers == [alone(server, prompt) for prompt in (*first, *second)]


def test_who_hangs_up_leaves_nothing(pair: Pair) -> None:
    """Before anything is computed, between two passes, and while the rest is sent."""
    with ThreadPoolExecutor(6) as clients:
        list(clients.map(pair.hang_up, range(1, 7), (0.01, 0.05, 0.1, 0.2, 0.3, 0.5)))
    prompt = turns()[1]
    assert pair.ask(prompt) == pair.ask(prompt)
    for _ in range(40):
        stats = pair.prefill.metrics()
        if stats["kv{used}"] == stats["state{used}"] == 0:
            break
        time.sleep(0.5)
    assert stats["kv{used}"] == stats["state{used}"] == 0
    assert pair.prefill.is_alive() and pair.decode.is_alive()


def test_prefill_servers_restore_from_host_memory(
    pair: Pair, start_server: StartServer, model: Path
) -> None:
    """Their device holds the states of four chats."""
    few = {"pools": (66, 6), "options": {"elastic": False, "host_memory": "64MiB"}}
    with served(start_server, pair.decode, model, **few) as small:
        first = turns()
        answers = ask_all(small, first)
        second = go_on(first, answers)
        small.cached.clear()
        answers += ask_all(small, second)
        assert min(small.cached) >= SHARED + OWN, small.cached
        stats = small.prefill.metrics()
        assert stats["host_loads"] > 0
        assert stats["kv{used}"] == stats["state{used}"] == 0
    assert answers == ask_all(pair, [*first, *second])


def test_a_wrong_state_changes_answers(
    start_server: StartServer, driver: Driver, decode: Server, model: Path
) -> None:
    with served(start_server, decode, model, fault="zero_snapshots") as pair:
        first = turns()[:4]
        answers = ask_all(pair, first)
        wrong = ask_all(pair, second := go_on(first, answers))
        assert all(pair.cached[4:])
        driver.forget(pair.prefill.url)
        assert [pair.ask(prompt) for prompt in second] != wrong


def test_drafts_are_as_good_behind_hits(start_server: StartServer) -> None:
    """Of the bundled model's head, whose KV is cached and sent with the model's."""
    setup = {"dtype": "bfloat16", "flags": (*SHAPE, *FLAGS)}
    decodes = {"flags": (*setup["flags"], "--disaggregation-mode=decode")}
    with (
        start_server("drafts", **setup | decodes, environment=TCP) as decode,
        served(start_server, decode, MODEL, FLAGS, dtype="bfloat16") as pair,
    ):
        prompts = [list(text.encode()) for text in PROMPTS]
        answers = ask_all(pair, prompts, TOKENS)
        turns = [p + a for p, a in zip(prompts, answers, strict=True)]
        verified = decode.counter("sglang:spec_verify_calls_total")
        second = [[*turn, *b" And then: "] for turn in turns]
        answers += ask_all(pair, second, TOKENS)
        verified = decode.counter("sglang:spec_verify_calls_total") - verified
        cached = sorted(pair.cached[len(PROMPTS) :])
        assert cached == sorted([len(prompt) for prompt in prompts])
    asks = [Ask(tuple(prompt), TOKENS) for prompt in (*prompts, *second)]
    assert max(gaps(MODEL, asks, [Answer(tuple(a)) for a in answers])) <= NEAR_TIE
    assert len(PROMPTS) * (TOKENS - 1) / verified >= LEAST_LENGTH
