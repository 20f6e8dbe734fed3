# SPDX-License-Identifier: Apache-2.0
"""SGLang's data parallelism: each replica has a cache and numbers of its own.

On two GPUs it is that of attention: two ranks share the rest of the model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

pytest.importorskip("sglang")

from tests.engines import slow_decay
from tests.engines.conftest import StartServer
from tests.engines.drivers import Driver
from tests.engines.drivers.sglang import NEAR_TIE, ON_GPU, generate
from tests.engines.greedy import gaps
from tests.engines.messages import Answer, Ask
from tests.engines.server import Server
from tests.engines.traffic import encode

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(
        ON_GPU and torch.cuda.device_count() < 2, reason="needs two GPUs"
    ),
]

REPLICAS, TOKENS = 2, 10
CHATS = (2, 3)
"""On each replica; numbers that differ, so that theirs are told apart."""
AGAIN = encode(" And what came of it?")
TIE = NEAR_TIE if ON_GPU else 0.01
"""Nats between two implementations; in float32 on a CPU."""
FLAGS = (f"--dp-size={REPLICAS}",)
if ON_GPU:
    FLAGS = (*FLAGS, f"--tp-size={REPLICAS}", "--enable-dp-attention")
ENVIRONMENT = {} if ON_GPU else {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return slow_decay.write_nemotron_h(tmp_path_factory.mktemp("model") / "nemotron-h")


@pytest.fixture(scope="module")
def server(start_server: StartServer, model: Path) -> Iterator[Server]:
    with start_server(
        "replicas",
        model=model,
        # SGLang's norms take no float32 on a GPU.
        dtype="bfloat16" if ON_GPU else "float32",
        flags=FLAGS,
        environment=ENVIRONMENT,
    ) as running:
        yield running


def ask(server: Server, prompt: Sequence[int], replica: int) -> Answer:
    """Have one replica answer."""
    return generate(server.url, prompt, TOKENS, routed_dp_rank=replica)


def ask_all(
    server: Server, turns: Sequence[tuple[tuple[int, ...], int]]
) -> list[Answer]:
    """Several at a time, on all replicas."""
    with ThreadPoolExecutor(len(turns)) as clients:
        return list(clients.map(lambda turn: ask(server, *turn), turns))


def of_replicas(text: str, name: str) -> dict[str, float]:
    """One of the plugin's numbers, by the replica that says it."""
    found = {}
    for line in text.splitlines():
        if line.startswith(f"hybrid_cache_{name}{{"):
            labels = dict(re.findall(r'(\w+)="([^"]*)"', line))
            found[labels["engine"]] = float(line.rsplit(" ", 1)[1])
    return found


def test_replicas_restore_their_own_chats(
    server: Server, driver: Driver, model: Path
) -> None:
    first = [
        (encode(f"{replica}, {chat}. What was said of it " * 8)[:200], replica)
        for replica in range(REPLICAS)
        for chat in range(CHATS[replica])
    ]
    answers = ask_all(server, first)
    second = [
        ((*prompt, *answer.tokens, *AGAIN), replica)
        for (prompt, replica), answer in zip(first, answers, strict=True)
    ]
    more = ask_all(server, second)
    for (prompt, _), answer in zip(second, more, strict=True):
        turn = len(prompt) - len(AGAIN)
        assert turn - 1 <= answer.cached_tokens <= turn
    elsewhere = ask(server, *(second[0][0], 1))
    assert elsewhere.cached_tokens == 0, "the other replica has nothing of it"
    if not ON_GPU:
        assert elsewhere.tokens == more[0].tokens
    asks = [Ask(prompt, TOKENS) for prompt, _ in (*first, *second, second[0])]
    assert max(gaps(model, asks, [*answers, *more, elsewhere])) <= TIE
    text = driver.metrics(server.url)
    restored = of_replicas(text, "hit_tokens_total")
    for replica in range(REPLICAS):
        mine = [a for (_, r), a in zip(second, more, strict=True) if r == replica]
        assert restored[str(replica)] == sum(answer.cached_tokens for answer in mine)
