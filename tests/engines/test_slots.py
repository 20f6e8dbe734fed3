# SPDX-License-Identifier: Apache-2.0
"""Few slots: all of them run sequences, and snapshots make way by their worth.

One server for both: which snapshot goes first has nothing to do with how many
sequences run.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hybrid_plugin.cli import main
from tests.engines.conftest import StartServer
from tests.engines.faults import counting_live
from tests.engines.messages import Ask
from tests.engines.server import Server
from tests.engines.traffic import encode

pytestmark = pytest.mark.engine

SLOTS = 8
OPTIONS = {"page_size": 32}
POOLS = (200, SLOTS + 1)


@pytest.fixture(scope="module")
def most(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gets the number of sequences that ran at once."""
    return tmp_path_factory.mktemp("live") / "most"


@pytest.fixture(scope="module")
def server(
    start_server: StartServer, quick_model: dict[str, Any], most: Path
) -> Iterator[Server]:
    with start_server(
        "slots",
        options=OPTIONS,
        pools=POOLS,
        environment=counting_live(most),
        **quick_model,
    ) as running:
        yield running


def test_as_many_sequences_run_as_there_are_slots(server: Server, most: Path) -> None:
    """Two waves, so that snapshots of the first must make room for the second."""
    asks = [Ask(encode(f"{n}: count to a hundred."), 64) for n in range(2 * SLOTS)]
    answers = server.ask_all(asks[:SLOTS], SLOTS)
    answers += server.ask_all(asks[SLOTS:], SLOTS)
    metrics = server.metrics()
    assert [a.error for a in answers] == [None] * len(asks)
    assert most.read_text() == str(SLOTS)
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


def test_top_shows_what_the_server_did(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["top", "--once", "--url", server.url]) == 0
    shown = capsys.readouterr().out.splitlines()
    words = [line.split()[0] for line in shown if line]
    assert {"restored", "computed", "kv", "state", "snapshots"} <= set(words)
    pool = next(line for line in shown if line.startswith("state"))
    used, cached, free = (int(n) for n in pool.split()[1:4])
    assert used == 0 and cached > 0 and cached + free == SLOTS
