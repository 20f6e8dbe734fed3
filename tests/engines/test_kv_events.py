# SPDX-License-Identifier: Apache-2.0
"""Routers that listen to a server's KV cache events know what it can restore."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.engines import dynamo_indexer
from tests.engines.conftest import StartServer
from tests.engines.drivers import Driver
from tests.engines.dynamo_indexer import DynamoIndexer
from tests.engines.router import Router
from tests.engines.server import Server
from tests.engines.traffic import encode, system_prompt

pytestmark = pytest.mark.engine

PAGE_SIZE = 32
"""One that every engine takes here."""
POOLS = (61, 7)
"""So few that pages and states are evicted."""
REQUESTS = 40


@dataclass
class Chats:
    """Chats that go on, or begin with one of two system prompts."""

    rng: random.Random = field(default_factory=lambda: random.Random(5))
    running: list[tuple[int, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.systems = [encode(system_prompt(self.rng, n)) for n in (40, 150)]

    def prompts(self) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
        """A prompt, the chat that it continues or nothing, and tokens to answer."""
        rng = self.rng
        for _ in range(REQUESTS):
            goes_on = bool(self.running) and rng.random() < 0.6
            if goes_on:
                history = self.running.pop(rng.randrange(len(self.running)))
            else:
                history = rng.choice(self.systems)
            prompt = history + encode(system_prompt(rng, rng.randint(1, 20)))
            if len(prompt) <= 700:
                yield prompt, history if goes_on else (), rng.randint(1, 30)


def hear(router: Router, driver: Driver, server: Server) -> None:
    """Take all events of what was answered."""
    driver.publish(server.url)
    router.listen()


def test_events_say_what_can_be_restored(
    start_server: StartServer, driver: Driver, tmp_path: Path
) -> None:
    """Chats that go on, shared prompts, and evictions of pages and states."""
    endpoint = f"ipc://{tmp_path}/events"
    chats = Chats()
    exact = over = 0
    with (
        closing(Router(endpoint, driver.kv_event_batch())) as router,
        start_server(
            "events",
            options={"page_size": PAGE_SIZE},
            pools=POOLS,
            flags=driver.kv_events(endpoint),
        ) as server,
    ):
        for prompt, history, length in chats.prompts():
            predicted = router.deepest(prompt, PAGE_SIZE)
            answer = server.ask(prompt, length)
            assert answer.error is None
            chats.running.append(prompt + answer.tokens)
            hear(router, driver, server)
            hit = answer.cached_tokens // PAGE_SIZE * PAGE_SIZE
            assert hit <= predicted
            # Its last token was never computed.
            if history and answer.cached_tokens == len(history) - 1:
                assert hit == predicted
                exact += 1
            over += hit < predicted
        announced = router.announced_pages
        metrics = server.metrics()
        server.reset_prefix_cache()
        server.ask(encode("something else, and longer than a page is here"), 4)
        hear(router, driver, server)
    assert exact > REQUESTS // 8
    if router.knows_states:
        # A prompt may still part from a chat within the page of that one's state.
        assert exact > 2 * over
    assert metrics["snapshots_evicted"] > 0
    assert 0 < announced == metrics["announced_pages"] < POOLS[0]
    assert router.cleared == 1
    assert router.announced_pages == 1


def wait_until_it_hears(
    indexer: DynamoIndexer, driver: Driver, server: Server, router: Router
) -> None:
    """What is published before it has subscribed, it never hears; it begins empty."""
    prompt = encode(system_prompt(random.Random(1), 40))
    for _ in range(10):
        assert server.ask(prompt, 8).error is None
        hear(router, driver, server)
        heard = indexer.score(prompt)
        server.reset_prefix_cache()
        if heard:
            return
    raise TimeoutError("the indexer hears nothing")


@pytest.mark.skipif(
    dynamo_indexer.PYTHON is None, reason="HYBRID_DYNAMO_PYTHON is not set"
)
def test_dynamo_scores_what_can_be_restored(
    start_server: StartServer, driver: Driver, tmp_path: Path
) -> None:
    """Its index knows no states: what parts halfway from a chat it takes for cached."""
    endpoint = f"ipc://{tmp_path}/events"
    chats = Chats()
    exact = over = turns = 0
    with (
        closing(Router(endpoint, driver.kv_event_batch())) as router,
        closing(DynamoIndexer(endpoint, PAGE_SIZE, tmp_path / "log")) as indexer,
        start_server(
            "dynamo",
            options={"page_size": PAGE_SIZE},
            pools=POOLS,
            flags=driver.kv_events(endpoint),
        ) as server,
    ):
        wait_until_it_hears(indexer, driver, server, router)
        for prompt, history, length in chats.prompts():
            score = indexer.score(prompt)
            answer = server.ask(prompt, length)
            assert answer.error is None
            chats.running.append(prompt + answer.tokens)
            hear(router, driver, server)
            hit = answer.cached_tokens // PAGE_SIZE * PAGE_SIZE
            assert hit <= score, "what is cached is not announced"
            over += hit < score
            if history and answer.cached_tokens == len(history) - 1:
                turns += 1
                exact += hit == score
        server.reset_prefix_cache()
        server.ask(encode("something else, and longer than a page is here"), 4)
        hear(router, driver, server)
        assert not any(map(indexer.score, chats.running))
    print(f"{exact} of {turns} turns scored as restored, {over} of all scored higher")
    assert exact == turns > REQUESTS // 8
