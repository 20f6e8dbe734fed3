# SPDX-License-Identifier: Apache-2.0
"""A share of the hits is computed again: equal ones are in order, zeroed states not."""

from __future__ import annotations

import json
import random
import re
import time
from pathlib import Path

import pytest

from tests.engines.conftest import StartServer
from tests.engines.messages import Ask
from tests.engines.server import Server
from tests.engines.traffic import next_turns, system_prompt

pytestmark = pytest.mark.engine

CHATS = 4
OPTIONS = {"verify_fraction": 1.0}
PATIENCE_S = 120.0


def serve_two_turns(server: Server) -> tuple[int, dict[str, float]]:
    """Have chats of two turns, and all hits checked.

    Returns:
        How many of the turns hit, and the metrics when all were checked.
    """
    first = [
        Ask(tuple(system_prompt(random.Random(n), 200).encode()), 8)
        for n in range(CHATS)
    ]
    answers = server.ask_all(first, 2)
    again = server.ask_all(next_turns(first, answers, seed=2), 2)
    assert [a.error for a in (*answers, *again)] == [None] * 2 * CHATS
    hits = sum(answer.cached_tokens > 0 for answer in (*answers, *again))
    begun = time.monotonic()
    while server.metrics()["hit_checks"] < hits:
        assert time.monotonic() - begun < PATIENCE_S, server.metrics()
        time.sleep(0.2)
    return hits, server.metrics()


def test_hits_are_checked_when_nothing_else_runs(start_server: StartServer) -> None:
    with start_server("checked", options=OPTIONS) as server:
        hits, metrics = serve_two_turns(server)
        assert hits >= CHATS
        assert metrics["hit_checks"] == hits and metrics["hit_checks_failed"] == 0
        # Checks count nowhere, and leave nothing.
        whole = metrics["queried_tokens"]
        assert metrics["hit_tokens"] < whole
        assert metrics["resumed_queried_tokens"] == 0
        assert metrics["kv{used}"] == metrics["state{used}"] == 0
        server.ask((5, 6, 7), 4)
        assert server.metrics()["queried_tokens"] == whole + 3
        assert "gave other log probabilities" not in server.log_text()


def test_damaged_states_are_found(start_server: StartServer) -> None:
    with start_server("damaged", options=OPTIONS, fault="zero_snapshots") as server:
        hits, metrics = serve_two_turns(server)
        assert metrics["hit_checks"] == hits
        # A zeroed state is below the bound now and then; which ones depends on the CPU.
        assert metrics["hit_checks_failed"] >= hits / 3
        said = re.findall(
            r"a hit of (\d+) of (\d+) tokens gave other .*; (\S+) has the tokens",
            server.log_text(),
        )
        assert len(said) == metrics["hit_checks_failed"]
        for hit, length, path in said:
            found = json.loads(Path(path).read_text())
            Path(path).unlink()
            assert found["hit"] == int(hit) and len(found["tokens"]) == int(length)
            assert found["nats"] > 0.75
