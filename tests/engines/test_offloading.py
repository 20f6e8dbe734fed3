# SPDX-License-Identifier: Apache-2.0
"""The engine's own flags for KV in host memory, in a command that is left as it is."""

from __future__ import annotations

import random

import pytest

from tests.engines.conftest import StartServer
from tests.engines.drivers import Driver
from tests.engines.messages import Answer, Ask
from tests.engines.server import Server
from tests.engines.traffic import encode, next_turns, system_prompt

pytestmark = pytest.mark.engine

CHATS, LENGTH = 12, 8


def two_turns(server: Server) -> tuple[list[Answer], list[Answer]]:
    """Have more chats than the device holds, one by one, and go on with each."""
    first = [
        Ask(encode(system_prompt(random.Random(n), 400)), LENGTH) for n in range(CHATS)
    ]
    answers = server.ask_all(first, 1)
    again = server.ask_all(next_turns(first, answers, seed=2), 1)
    assert [a.error for a in (*answers, *again)] == [None] * 2 * CHATS
    return answers, again


def test_what_the_device_evicts_comes_back_from_there(
    start_server: StartServer, driver: Driver
) -> None:
    """What comes back is right by the tests of `host_memory`."""
    options = {"elastic": True, "gpu_memory_budget": driver.elastic_budget}
    with start_server("without", options=options) as server:
        _, forgotten = two_turns(server)
    with start_server("offloads", options=options, flags=driver.offloading) as server:
        _, found = two_turns(server)
        stats = server.metrics()
        assert "says, states included" in server.log_text()
    assert stats["host_stores"] > 0 and stats["host_loads"] > 0
    assert stats["host_hit_tokens"] > CHATS / 2 * 300
    assert all(answer.cached_tokens > 300 for answer in found)
    assert sum(answer.cached_tokens < 300 for answer in forgotten) > CHATS / 2
