# SPDX-License-Identifier: Apache-2.0
"""Servers share what they cache by a Mooncake Store: the real library, over TCP.

One server answers first turns and ends; another one answers the second turns.  Memory
of the store is lent by this process, so what is there outlives both.
"""

from __future__ import annotations

import random
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mooncake.store", exc_type=ImportError)

import mooncake

from hybrid_plugin.tiers.store.mooncake import MooncakeObjects
from tests.engines import slow_decay, web
from tests.engines.conftest import StartServer
from tests.engines.greedy import gaps
from tests.engines.messages import Answer, Ask
from tests.engines.server import Server, free_port
from tests.engines.traffic import next_turns

pytestmark = pytest.mark.engine

CHATS, ANSWER = 8, 12
ROUNDING = 5e-3
"""Nats that two implementations in float32 may differ by."""
LENT = 256 << 20


@dataclass
class Pool:
    """A master, and this process as the member that lends memory."""

    address: str
    master: subprocess.Popen[bytes]
    member: MooncakeObjects

    def forget(self) -> None:
        """Have the store lose everything."""
        self.member._store.remove_all(True)


@contextmanager
def pool(log: Path) -> Iterator[Pool]:
    port = free_port()
    program = Path(mooncake.__path__[0]) / "mooncake_master"
    command = [
        str(program),
        f"--rpc_port={port}",
        f"--metrics_port={free_port()}",
        "--enable_http_metadata_server=false",
    ]
    with log.open("wb") as out:
        master = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    try:
        time.sleep(2)
        address = f"127.0.0.1:{port}"
        member = MooncakeObjects(address, "127.0.0.1", "P2PHANDSHAKE", LENT)
        try:
            yield Pool(address, master, member)
        finally:
            member.close()
    finally:
        master.kill()
        master.wait()


def options(address: str) -> dict[str, Any]:
    return {"host_memory": "64MiB", "store": {"master": address}}


def random_prompt(rng: random.Random, length: int) -> tuple[int, ...]:
    return tuple(rng.randrange(3, 250) for _ in range(length))


def stored(server: Server, wanted: int) -> float:
    """Prefixes that a server has written, once they are as many as they should be.

    Directories are written when ranks have said that bundles are.
    """
    found = 0.0
    for _ in range(60):
        found = server.metrics().get("store_stores", 0.0)
        if found >= wanted:
            break
        time.sleep(0.25)
    time.sleep(1)
    return found


def test_a_server_resumes_what_another_one_left(
    start_server: StartServer, tmp_path: Path
) -> None:
    model = slow_decay.write_nemotron_h(tmp_path / "model")
    rng = random.Random(3)
    first = [Ask(random_prompt(rng, 200 + 37 * n), ANSWER) for n in range(CHATS)]
    setup: dict[str, Any] = {"model": model, "dtype": "float32"}
    setup["fault"] = "patient_with_stores"
    asked: list[Ask] = []
    said: list[Answer] = []

    def ask(server: Server, asks: list[Ask]) -> list[Answer]:
        answers = server.ask_all(asks, 2)
        asked.extend(asks)
        said.extend(answers)
        return answers

    with pool(tmp_path / "master.log") as shared:
        setup["options"] = options(shared.address)
        with start_server("first", **setup) as server:
            answers = ask(server, first)
            assert stored(server, CHATS) >= CHATS
        second = next_turns(first, answers, 4)
        half = CHATS // 2
        with start_server("second", **setup) as server:
            restored = ask(server, second[:half])
            of_store = server.metrics()
            shared.forget()
            computed = ask(server, second[half:])
            without = server.metrics()
            shared.master.kill()
            third = next_turns(second, [*restored, *computed], 5)
            ask(server, [third[0], Ask(random_prompt(rng, 300), ANSWER)])
            web.get(f"{server.url}/health", timeout=60).raise_for_status()
    assert not any(answer.error for answer in said)
    worst = max(gaps(model, asked, said))
    print(f"worst {worst:.4f} nats; restored {[a.cached_tokens for a in restored]}")
    assert worst <= ROUNDING
    pairs = zip(first[:half], answers[:half], restored, strict=True)
    for turn, answer, one in pairs:
        whole = len(turn.prompt) + len(answer.tokens)
        assert whole - 2 <= one.cached_tokens <= whole
    assert of_store["store_hit_tokens"] == sum(one.cached_tokens for one in restored)
    assert of_store["store_loads"] == half
    assert without["store_hit_tokens"] == of_store["store_hit_tokens"]
    assert all(answer.cached_tokens == 0 for answer in computed)
