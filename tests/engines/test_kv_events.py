# SPDX-License-Identifier: Apache-2.0
"""Routers that listen to a server's KV cache events know what it can restore."""

from __future__ import annotations

import random
from contextlib import closing
from pathlib import Path

import pytest

from tests.engines.conftest import StartServer
from tests.engines.drivers import Driver
from tests.engines.router import Router
from tests.engines.traffic import encode, system_prompt

pytestmark = pytest.mark.engine

PAGE_SIZE = 32
"""One that every engine takes here."""
POOLS = (61, 7)
"""So few that pages and states are evicted."""
REQUESTS = 40


def test_events_say_what_can_be_restored(
    start_server: StartServer, driver: Driver, tmp_path: Path
) -> None:
    """Chats that go on, shared prompts, and evictions of pages and states."""
    endpoint = f"ipc://{tmp_path}/events"
    rng = random.Random(5)
    systems = [encode(system_prompt(rng, n)) for n in (40, 150)]
    chats: list[tuple[int, ...]] = []
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
        for _ in range(REQUESTS):
            goes_on = bool(chats) and rng.random() < 0.6
            history = (
                chats.pop(rng.randrange(len(chats))) if goes_on else rng.choice(systems)
            )
            prompt = history + encode(system_prompt(rng, rng.randint(1, 20)))
            if len(prompt) > 700:
                continue
            predicted = router.deepest(prompt, PAGE_SIZE)
            answer = server.ask(prompt, rng.randint(1, 30))
            assert answer.error is None
            chats.append(prompt + answer.tokens)
            router.listen()
            hit = answer.cached_tokens // PAGE_SIZE * PAGE_SIZE
            assert hit <= predicted
            # Its last token was never computed.
            if goes_on and answer.cached_tokens == len(history) - 1:
                assert hit == predicted
                exact += 1
            over += hit < predicted
        announced = router.announced_pages
        metrics = server.metrics()
        server.reset_prefix_cache()
        server.ask(encode("something else, and longer than a page is here"), 4)
        router.listen()
    assert exact > REQUESTS // 8
    if router.knows_states:
        # A prompt may still part from a chat within the page of that one's state.
        assert exact > 2 * over
    assert metrics["snapshots_evicted"] > 0
    assert 0 < announced == metrics["announced_pages"] < POOLS[0]
    assert router.cleared == 1
    assert router.announced_pages == 1
