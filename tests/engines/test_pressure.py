# SPDX-License-Identifier: Apache-2.0
"""Far more requests than fit: all end, nothing leaks, the server lives on."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest

from tests.engines.conftest import StartServer
from tests.engines.drivers import Driver
from tests.engines.drivers.driver import MAX_MODEL_LEN
from tests.engines.messages import Ask
from tests.engines.server import Server
from tests.engines.traffic import encode, system_prompt

pytestmark = pytest.mark.engine


def burst(seed: int) -> list[Ask]:
    """64 requests of all lengths, a quarter of them dropped half-way."""
    rng = random.Random(seed)
    asks = []
    for _ in range(64):
        text = system_prompt(random.Random(rng.randrange(6)), rng.randint(1, 700))
        abort = rng.randint(1, 20) if rng.random() < 0.25 else None
        asks.append(Ask(encode(text), rng.randint(1, 48), abort))
    return asks


def wait_until_idle(server: Server) -> dict[str, float]:
    """Aborts reach the engine a moment after the client is gone."""
    for _ in range(60):
        levels = server.metrics()
        if levels["kv{used}"] == levels["state{used}"] == 0:
            break
        time.sleep(0.5)
        server.ask(encode("tick"), 1)  # metrics move with steps only
    return server.metrics()


def test_64_requests_into_a_pool_for_two(
    start_server: StartServer, driver: Driver, quick_model: dict[str, Any]
) -> None:
    pages = 2 * MAX_MODEL_LEN // driver.page_size
    pools = (pages + 1, 3)
    with start_server("pressure", pools=pools, max_running=64, **quick_model) as server:
        for asks in (burst(0), burst(1)[:16]):
            answers = server.ask_all(asks, concurrency=64)
            assert [a.error for a in answers if a.error] == []
            assert server.is_alive()
        levels = wait_until_idle(server)
    assert levels["kv{used}"] == 0
    assert levels["state{used}"] == 0
    assert levels["kv{cached}"] + levels["kv{free}"] == pages
    assert levels["state{cached}"] + levels["state{free}"] == 2
    assert levels["snapshots_evicted"] > 0 and levels["pages_evicted"] > 0


def test_64_requests_into_a_budget_for_few(
    start_server: StartServer, driver: Driver, quick_model: dict[str, Any]
) -> None:
    """Pages and slots take their memory from each other, down to the floors."""
    budget = driver.elastic_budget
    options = {"elastic": True, "gpu_memory_budget": budget}
    setup: dict[str, Any] = {"options": options, "max_running": 64, **quick_model}
    with start_server("elastic", **setup) as server:
        for asks in (burst(0), burst(1)[:16]):
            answers = server.ask_all(asks, concurrency=64)
            assert [a.error for a in answers if a.error] == []
            assert server.is_alive()
        levels = wait_until_idle(server)
    assert levels["kv{used}"] == levels["state{used}"] == 0
    assert levels["mapped_bytes{kv}"] + levels["mapped_bytes{state}"] <= budget
    assert levels["moves"] > 0 and levels["moved_bytes"] > 0
    assert levels["snapshots_evicted"] > 0 and levels["pages_evicted"] > 0
