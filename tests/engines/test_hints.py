# SPDX-License-Identifier: Apache-2.0
"""What a request says of what it leaves: positions to keep, and when it goes on.

Snapshots are taken there, and at the ends of system messages, before a second request
shows that they pay.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from tests.engines.conftest import StartServer
from tests.engines.drivers import Driver
from tests.engines.messages import Ask
from tests.engines.server import Server
from tests.engines.traffic import encode, system_prompt

pytestmark = pytest.mark.engine

START, END = 257, 258
"""Around messages, in the bundled model's chat template."""
LENGTH = 150
SLOTS = 8
POOLS = (300, SLOTS + 1)
"""Few slots, so that snapshots make way for others."""


@pytest.fixture(scope="module")
def server(start_server: StartServer) -> Iterator[Server]:
    """The ends of system messages are kept, if that can save 64 tokens."""
    options = {"system_snapshot_min_tokens": 64}
    with start_server("hints", options=options, pools=POOLS) as running:
        yield running


def chat(system: str, question: str) -> tuple[int, ...]:
    """As the template renders it."""
    messages = (("system", system), ("user", question))
    tokens: list[int] = []
    for role, content in messages:
        tokens += [START, *encode(f"{role}\n{content}"), END, *encode("\n")]
    return (*tokens, START, *encode("assistant\n"))


def test_second_chat_hits_the_system_message(server: Server, driver: Driver) -> None:
    system = system_prompt(random.Random(1), LENGTH)
    end = len("_system\n") + LENGTH + len("_")
    first = server.ask(chat(system, "Who is there?"), 4)
    second = server.ask(chat(system, "And what for?"), 4)
    assert (first.error, second.error, first.cached_tokens) == (None, None, 0)
    assert second.cached_tokens == end // driver.page_size * driver.page_size


def test_short_system_messages_are_hit_by_the_third_chat(server: Server) -> None:
    """They get no snapshot of their own; what all prompts get may do earlier."""
    system = system_prompt(random.Random(2), 50)
    cached = [
        server.ask(chat(system, question), 4, salt="short").cached_tokens
        for question in ("Who is there?", "And what for?", "Since when?")
    ]
    assert cached[0] == 0 and cached[2] > 0


def test_a_request_names_a_position(server: Server, driver: Driver) -> None:
    """And one that names none leaves nothing for the second."""
    for seed, keep in ((3, (64,)), (4, ())):  # too short for a guess to repay
        shared = encode(system_prompt(random.Random(seed), 70))
        first = Ask(shared + encode("First?"), 4, snapshot_at=keep, salt=str(seed))
        assert server.ask_all([first], 1)[0].error is None
        second = server.ask(shared + encode("Second?"), 4, salt=str(seed))
        kept = keep[0] if keep else 0
        assert second.cached_tokens == kept // driver.page_size * driver.page_size


def test_a_position_that_is_none_costs_no_answer(server: Server) -> None:
    prompt = encode(system_prompt(random.Random(5), LENGTH))
    for keep in ((-1,), (1 << 40,)):
        answer = server.ask_all([Ask(prompt, 4, snapshot_at=keep)], 1)[0]
        assert answer.error is None and len(answer.tokens) == 4
    assert "hybrid-plugin ignores a hint" in server.log_text()


def go_on(server: Server, seed: int, ttl: float | None, between: int = 0) -> int:
    """A second turn, after requests that nobody continues; returns what it restores."""
    prompt, salt = encode(system_prompt(random.Random(seed), 70)), f"{seed}"
    first = server.ask_all([Ask(prompt, 4, ttl=ttl, salt=salt)], 1)[0]
    for number in range(between):
        other = encode(system_prompt(random.Random(1000 * seed + number), 70))
        assert server.ask(other, 4, salt=f"{seed}-{number}").error is None
    again = server.ask(prompt + first.tokens + encode("Go on."), 4, salt=salt)
    assert first.error is again.error is None
    return again.cached_tokens


def test_a_turn_that_nobody_continues_leaves_nothing(server: Server) -> None:
    assert go_on(server, 6, None) > 0
    assert go_on(server, 7, 0) == 0


def test_a_ttl_outlives_traffic_that_evicts_the_same_without(server: Server) -> None:
    before = server.metrics()
    assert go_on(server, 8, None, 8 * SLOTS) == 0
    assert go_on(server, 9, 600, 8 * SLOTS) > 0
    after = server.metrics()
    assert after["promised_hits"] - before["promised_hits"] == 1
    assert after["promises_evicted"] == before["promises_evicted"]


def test_a_ttl_that_is_none_costs_no_answer(server: Server) -> None:
    prompt = encode(system_prompt(random.Random(10), LENGTH))
    for ttl in (-1, 1e12):
        answer = server.ask_all([Ask(prompt, 4, ttl=ttl)], 1)[0]
        assert answer.error is None and len(answer.tokens) == 4
