# SPDX-License-Identifier: Apache-2.0
"""Few slots: all of them run sequences, and snapshots make way by their worth.

One server for both: which snapshot goes first has nothing to do with how many
sequences run.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.engines.conftest import StartServer
from tests.engines.messages import Ask
from tests.engines.server import Server
from tests.engines.traffic import encode

pytestmark = pytest.mark.engine

SLOTS = 8
OPTIONS = {"page_size": 32}
POOLS = (200, SLOTS + 1)


@pytest.fixture(scope="module")
def server(start_server: StartServer) -> Iterator[Server]:
    with start_server("slots", options=OPTIONS, pools=POOLS) as running:
        yield running


def test_as_many_sequences_run_as_there_are_slots(server: Server) -> None:
    """Two waves, so that snapshots of the first must make room for the second."""
    asks = [Ask(encode(f"{n}: count to a hundred."), 64) for n in range(2 * SLOTS)]
    done = threading.Event()
    with ThreadPoolExecutor(1) as pool:

        def most_in_use() -> float:
            most = 0.0
            while not done.is_set():
                most = max(most, server.metrics().get("state{used}", 0.0))
            return most

        watch = pool.submit(most_in_use)
        answers = server.ask_all(asks[:SLOTS], SLOTS)
        answers += server.ask_all(asks[SLOTS:], SLOTS)
        done.set()
    metrics = server.metrics()
    assert [a.error for a in answers] == [None] * len(asks)
    assert watch.result() == SLOTS
    assert metrics["preemptions"] == 0
    assert metrics["state{cached}"] > 0


def test_chats_go_on_while_snapshots_make_way(server: Server) -> None:
    """Each next turn hits, while slots are so few that other snapshots must go."""
    evicted = server.metrics()["snapshots_evicted"]
    cached = []
    for chat in range(SLOTS + 2):
        prompt = encode(f"{chat}: tell me all about the number {chat}. " * 6)
        (first,) = server.ask_all([Ask(prompt, 8)], 1)
        goes_on = prompt + first.tokens + encode("Go on.")
        (again,) = server.ask_all([Ask(goes_on, 8)], 1)
        assert (first.error, again.error) == (None, None)
        cached.append(again.cached_tokens)
    assert all(cached)
    assert server.metrics()["snapshots_evicted"] > evicted
