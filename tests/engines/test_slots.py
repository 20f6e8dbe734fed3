# SPDX-License-Identifier: Apache-2.0
"""N slots, N sequences: no slot is set aside for snapshots that nobody needs."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.engines.conftest import StartServer
from tests.engines.messages import Ask
from tests.engines.traffic import encode

pytestmark = pytest.mark.engine

SLOTS = 8


def test_as_many_sequences_run_as_there_are_slots(start_server: StartServer) -> None:
    """Two waves, so that snapshots of the first must make room for the second."""
    options = {"page_size": 32, "kv_pages": 200, "state_slots": SLOTS + 1}
    asks = [Ask(encode(f"{n}: count to a hundred."), 64) for n in range(2 * SLOTS)]
    with start_server("slots", options=options) as server:
        done = threading.Event()
        with ThreadPoolExecutor(1) as pool:

            def most_in_use() -> float:
                most = 0.0
                while not done.is_set():
                    most = max(most, server.metrics().get("slots{used}", 0.0))
                return most

            watch = pool.submit(most_in_use)
            answers = server.ask_all(asks[:SLOTS], SLOTS)
            answers += server.ask_all(asks[SLOTS:], SLOTS)
            done.set()
        metrics = server.metrics()
    assert [a.error for a in answers] == [None] * len(asks)
    assert watch.result() == SLOTS
    assert metrics["preemptions"] == 0
    assert metrics["slots{cached}"] > 0
