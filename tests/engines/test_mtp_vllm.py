# SPDX-License-Identifier: Apache-2.0
"""vLLM with the bundled model's MTP head: drafts that are really accepted or not."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from hybrid_plugin.tools.demo.compare import NEAR_TIE
from hybrid_plugin.tools.prometheus_text import Metrics
from tests.engines.conftest import StartServer
from tests.engines.drivers import Driver
from tests.engines.drivers.driver import MODEL
from tests.engines.faults import counting_live
from tests.engines.greedy import gaps
from tests.engines.messages import Answer, Ask
from tests.engines.server import Server

pytest.importorskip("vllm")
pytestmark = pytest.mark.engine

DRAFTS = 2
FLAGS = (
    "--speculative-config",
    json.dumps({"method": "mtp", "num_speculative_tokens": DRAFTS}),
)
PROMPTS = (
    "Return a list of the names in the module. ",
    "The code for amber is 1234. ",
    'def read(self, size=-1):\n    """Read and return up to size bytes',
    "This exception is raised when ",
)
TOKENS = 48
LEAST_LENGTH = 1.6
"""Tokens a verification; a head whose weights are not the trained ones has 1.0."""


def asks_of(texts: Sequence[Sequence[int]]) -> list[Ask]:
    """One request for each text, with as many tokens in answer as there may be."""
    return [Ask(tuple(text), TOKENS) for text in texts]


def acceptance_length(text: str) -> float:
    """Tokens of a verification, on average, from the text of /metrics."""
    metrics = Metrics(text)
    verifications = metrics.total("vllm:spec_decode_num_drafts_total")
    accepted = metrics.total("vllm:spec_decode_num_accepted_tokens_total")
    assert verifications and accepted is not None
    return 1 + accepted / verifications


@pytest.fixture(scope="module")
def mtp_server(start_server: StartServer) -> Iterator[Server]:
    """With the plugin."""
    with start_server("mtp", flags=FLAGS) as server:
        yield server


def test_stock_accepts_drafts(start_server: StartServer, driver: Driver) -> None:
    """Without its prefix cache; what the plugin is compared with."""
    first = asks_of([text.encode() for text in PROMPTS])
    with start_server("stock", plugin=False, prefix_cache=False, flags=FLAGS) as server:
        answers = server.ask_all(first, 4)
        length = acceptance_length(driver.metrics(server.url))
    assert max(gaps(MODEL, first, answers)) <= NEAR_TIE
    assert length >= LEAST_LENGTH


def test_answers_are_greedy_and_drafts_accepted(
    mtp_server: Server, driver: Driver
) -> None:
    check_answers(mtp_server, driver)


@pytest.mark.parametrize(
    "options",
    [{"kernels": "ours"}, {"draft_states": "replay"}],
    ids=["our kernels", "replay"],
)
def test_the_same_on_our_kernels(
    start_server: StartServer, driver: Driver, options: Mapping[str, str]
) -> None:
    with start_server("ours", flags=FLAGS, options=options) as server:
        check_answers(server, driver)


def check_answers(server: Server, driver: Driver) -> None:
    """Second turns restore the first.

    Of an answer's last token there is a state only where it was an accepted draft.
    """
    first = asks_of([text.encode() for text in PROMPTS])
    answers = server.ask_all(first, 4)
    turns = [
        (*ask.prompt, *answer.tokens)
        for ask, answer in zip(first, answers, strict=True)
    ]
    second = asks_of([(*turn, *b" And then: ") for turn in turns])
    again = server.ask_all(second, 4)
    assert not any(answer.error for answer in [*answers, *again])
    length = acceptance_length(driver.metrics(server.url))
    found = list(gaps(MODEL, [*first, *second], [*answers, *again]))
    print(f"{length:.2f} tokens a verification, worst {max(found):.3f} nats")
    assert max(found) <= NEAR_TIE
    assert length >= LEAST_LENGTH
    for turn, answer in zip(turns, again, strict=True):
        assert answer.cached_tokens >= len(turn) - 1


# ------------------------------------------------------------------ what is restored

SYSTEM = b"You are given a file of a library. " * 10
BRANCHES = (b"Name its classes. ", b"Name its functions. ", b"What does it import? ")


def branching(server: Server) -> tuple[list[Ask], list[Answer], list[int]]:
    """Prompts that part in the middle, and a conversation that branches at turn ends.

    Returns:
        Requests, their answers, and of each how many tokens it did not restore of what
        it had in common with those before it.
    """
    asks: list[Ask] = []
    answers: list[Answer] = []
    lost: list[int] = []

    def ask(known: Sequence[int], text: bytes) -> tuple[int, ...]:
        asks.append(Ask((*known, *text), TOKENS))
        answers.append(server.ask_all(asks[-1:], 1)[0])
        lost.append(len(known) - answers[-1].cached_tokens)
        return (*asks[-1].prompt, *answers[-1].tokens)

    for branch in BRANCHES:
        turn = ask(tuple(SYSTEM), branch)
    second = ask(turn, b" And then: ")
    ask(turn, b" But first: ")  # another branch at the same end
    third = ask(second, b" Go on: ")
    ask(second, b" Stop: ")
    ask(third, b" Again: ")
    return asks, answers, lost


def test_conversations_hit_what_they_hit_without_drafts(
    start_server: StartServer, mtp_server: Server
) -> None:
    """No page is dropped at a hit for the sake of the draft layer's KV."""
    with start_server("plain") as server:
        _, _, without = branching(server)
    asks, answers, lost = branching(mtp_server)
    print(f"not restored: {lost}, without drafts {without}")
    assert max(gaps(MODEL, asks, answers)) <= NEAR_TIE
    # A turn's last token has a state where it was an accepted draft, else not.
    assert all(abs(a - b) <= 1 for a, b in zip(lost, without, strict=True))
    assert all(tokens <= 1 for tokens in lost[len(BRANCHES) :])


# -------------------------------------------------------------------------- pressure

SLOTS = 5
LEAST_WITH_ONE = 1.3
"""Tokens a verification of mostly one draft."""


def test_the_drafter_makes_way(
    start_server: StartServer, driver: Driver, tmp_path: Path
) -> None:
    """With slots for five, five run at once, and the head drafts nothing meanwhile.

    When two run, there are slots for one draft of each.
    """
    texts = [text.encode() + b"%d " % i for i in range(4) for text in PROMPTS]
    most = tmp_path / "most"
    with start_server(
        "pressed",
        pools=(200, SLOTS + 1),
        flags=FLAGS,
        environment=counting_live(most),
    ) as server:
        asks = asks_of(texts)
        answers = server.ask_all(asks, len(asks))
        crowd = server.metrics()
        server.reset_prefix_cache()
        answers += server.ask_all(asks[:4], 2)
        length = acceptance_length(driver.metrics(server.url))
        pair = server.metrics()
    assert not any(answer.error for answer in answers)
    assert max(gaps(MODEL, [*asks, *asks[:4]], answers)) <= NEAR_TIE
    assert most.read_text() == str(SLOTS)
    assert crowd["preemptions"] == 0
    assert pair["turn_ends_exact"] == len(asks) + 4
    assert pair["drafts_lent"] > crowd["drafts_lent"]
    assert length >= LEAST_WITH_ONE
