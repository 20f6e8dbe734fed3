# SPDX-License-Identifier: Apache-2.0
"""Data parallelism in vLLM: a cache for each rank, and metrics that are counted once.

By default vLLM serves ranks by as many API server processes, each of which takes
requests for all ranks.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import torch

from hybrid_plugin.tools.prometheus_text import Metrics
from tests.engines import slow_decay
from tests.engines.conftest import DRIVER, StartServer
from tests.engines.drivers import Driver
from tests.engines.messages import Answer, Ask
from tests.engines.server import ANSWER_LIMIT_S, Server
from tests.engines.traffic import encode, next_turns, system_prompt

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(
        DRIVER is None or DRIVER.name != "vllm", reason="the ranks are vLLM's"
    ),
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.device_count() < 2,
        reason="needs two GPUs",
    ),
]

RANKS = 2
CHATS, PROMPT, ANSWER = 6, 150, 12
"""Chats of each rank, and tokens of their first turns."""
HEADER = "X-data-parallel-rank"
"""By which a router chooses the rank."""


@dataclass(frozen=True)
class Served:
    """What the ranks answered, and what was published of it."""

    turns: tuple[list[Ask], ...]
    """Of each rank: first turns, second ones, and the first ones of the other rank."""
    answers: tuple[list[Answer], ...]
    metrics: Metrics
    log: str


def chats(rank: int) -> list[Ask]:
    """First turns, none of which begins as another does."""
    texts = (
        f"{rank}.{number} {system_prompt(random.Random(CHATS * rank + number), PROMPT)}"
        for number in range(CHATS)
    )
    return [Ask(encode(text[:PROMPT]), ANSWER) for text in texts]


async def answered(
    server: Server, driver: Driver, by_rank: Sequence[Sequence[Ask]]
) -> list[list[Answer]]:
    """Answers of all ranks at once; every request has a connection of its own."""

    async def one(rank: int, ask: Ask) -> Answer:
        async with httpx.AsyncClient(
            base_url=server.url,
            verify=False,
            timeout=ANSWER_LIMIT_S,
            headers={HEADER: str(rank)},
        ) as client:
            return await driver.stream(client, ask)

    return [
        await asyncio.gather(*pending)
        for pending in [
            [asyncio.ensure_future(one(rank, ask)) for ask in asks]
            for rank, asks in enumerate(by_rank)
        ]
    ]


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A model without experts: vLLM's CPU build cannot send tokens to those of another
    rank, and ends at the first request, with the plugin and without."""
    folder = tmp_path_factory.mktemp("model") / "nemotron-h"
    return {"model": slow_decay.write_nemotron_h(folder), "dtype": "float32"}


@pytest.fixture(scope="module")
def served(
    start_server: StartServer, driver: Driver, serving: dict[str, Any]
) -> Served:
    """Three rounds: first turns, second ones, and those that the other rank knows."""
    flags = (f"--data-parallel-size={RANKS}", "--enable-log-requests")
    turns: list[list[Ask]] = [[] for _ in range(RANKS)]
    answers: list[list[Answer]] = [[] for _ in range(RANKS)]
    with start_server("ranks", flags=flags, **serving) as server:

        def ask(by_rank: Sequence[Sequence[Ask]]) -> list[list[Answer]]:
            found = asyncio.run(answered(server, driver, by_rank))
            for rank in range(RANKS):
                turns[rank] += by_rank[rank]
                answers[rank] += found[rank]
            return found

        first = [chats(rank) for rank in range(RANKS)]
        told = ask(first)
        ask([next_turns(first[rank], told[rank], rank) for rank in range(RANKS)])
        ask(first[::-1])
        metrics = Metrics(driver.metrics(server.url))
        return Served(tuple(turns), tuple(answers), metrics, server.log_text())


def test_answers_are_those_of_one_rank_without_a_cache(
    start_server: StartServer, served: Served, serving: dict[str, Any]
) -> None:
    asks = [ask for turns in served.turns for ask in turns]
    with start_server("stock", plugin=False, prefix_cache=False, **serving) as server:
        expected = server.ask_all(asks, concurrency=4)
    found = [answer for answers in served.answers for answer in answers]
    assert [answer.error for answer in found] == [None] * len(asks)
    assert [a.tokens for a in found] == [a.tokens for a in expected]
    assert len({answer.tokens for answer in expected}) > len(asks) // 2


@pytest.mark.parametrize("rank", range(RANKS))
def test_each_rank_restores_the_turns_that_it_computed(
    served: Served, rank: int
) -> None:
    cached = [answer.cached_tokens for answer in served.answers[rank]]
    assert cached[:CHATS] == [0] * CHATS
    # The last token of an answer is sampled, not computed.
    assert cached[CHATS : 2 * CHATS] == [
        len(ask.prompt) + len(answer.tokens) - 1
        for ask, answer in zip(
            served.turns[rank][:CHATS], served.answers[rank][:CHATS], strict=True
        )
    ]
    assert cached[2 * CHATS :] == [0] * CHATS, "of the other rank's cache"


@pytest.mark.parametrize("rank", range(RANKS))
def test_metrics_of_a_rank_are_counted_once(served: Served, rank: int) -> None:
    """By whichever API servers its answers went through."""
    taken = [line for line in served.log.splitlines() if "Received request" in line]
    assert all(any(f"ApiServer_{n} " in line for line in taken) for n in range(RANKS))
    engine = {"engine": str(rank)}
    prompts = sum(len(ask.prompt) for ask in served.turns[rank])
    restored = sum(answer.cached_tokens for answer in served.answers[rank])
    total = served.metrics.total
    assert total("hybrid_cache_queried_tokens_total", **engine) == prompts
    assert total("hybrid_cache_hit_tokens_total", **engine) == restored > 0
    assert total("vllm:prefix_cache_queries_total", **engine) == prompts
    computed = total("hybrid_cache_computed_tokens_total", **engine)
    assert computed == prompts - restored
    ends = total("hybrid_cache_turn_ends_exact_total", **engine)
    assert ends == len(served.turns[rank])
    slots = {"pool": "state", **engine}
    assert total("hybrid_cache_slots", kind="used", **slots) == 0
    assert (total("hybrid_cache_slots", kind="cached", **slots) or 0) >= CHATS
