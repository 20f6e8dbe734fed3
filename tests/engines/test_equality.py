# SPDX-License-Identifier: Apache-2.0
"""The plugin changes no answer: mixed traffic against stock vLLM without a cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from tests.engines.compare import Comparison, compare
from tests.engines.conftest import StartServer
from tests.engines.server import Answer, Ask, Server
from tests.engines.traffic import Mix, mixed, next_turns

pytestmark = pytest.mark.engine

PAGE_SIZE = 32  # the least the CPU's attention backend takes
BOUND = 0.75
"""Nats.  The CPU's gated delta net runs in bfloat16 only, whose logits are 0.0625
to 0.125 apart: stock vLLM without a cache, compared with itself at another
concurrency, gives up to 0.375 at a first difference, and stock vLLM with its own
prefix cache up to 0.44."""

SMALL_POOL = {"kv_pages": 40, "state_slots": 12}
"""Pages for few of the eleven sequences it has slots for: some are preempted."""


@dataclass(frozen=True)
class Reference:
    """Requests, and stock vLLM's answers to them without any cache."""

    asks: Sequence[Ask]
    answers: Sequence[Answer]


@pytest.fixture(scope="module")
def reference(start_server: StartServer) -> Reference:
    """First turns and second turns; 300 requests together."""
    first = mixed(Mix(PAGE_SIZE, requests=200))
    whole = [Ask(a.prompt, a.max_tokens, extra={"logprobs": 5}) for a in first]
    with start_server(
        "stock", plugin=False, flags=("--no-enable-prefix-caching",)
    ) as stock:
        answers = stock.ask_all(whole, concurrency=4)
        second = next_turns(whole[:100], answers[:100], seed=1)
        turns = [Ask(a.prompt, a.max_tokens, extra={"logprobs": 5}) for a in second]
        answers += stock.ask_all(turns, concurrency=4)
    return Reference([*first, *second], answers)


def replay(server: Server, reference: Reference) -> tuple[Comparison, list[Answer]]:
    """Send the reference's requests, first turns first, 16 at a time."""
    answers = server.ask_all(reference.asks[:200], concurrency=16)
    answers += server.ask_all(reference.asks[200:], concurrency=16)
    return compare(reference.answers, answers, BOUND), answers


@pytest.mark.parametrize(
    "options",
    ("options", "least_reuse"),
    [
        pytest.param(SMALL_POOL, 0.05, id="smallest page, preemption"),
        pytest.param({"page_size": 64}, 0.4, id="page of 64"),
    ],
)
def test_greedy_answers_equal_stock(
    start_server: StartServer,
    reference: Reference,
    options: dict[str, int],
    least_reuse: float,
) -> None:
    with start_server("plugin", options=options) as server:
        outcome, answers = replay(server, reference)
        metrics = server.metrics()
    assert outcome.wrong == ()
    assert outcome.compared >= 250
    assert outcome.differing <= 0.1 * outcome.compared
    reused = sum(a.cached_tokens for a in answers)
    assert reused > least_reuse * sum(a.prompt_tokens for a in answers)
    if options is SMALL_POOL:
        assert metrics["preemptions"] > 0


def test_answers_change_when_snapshots_are_zeroed(
    start_server: StartServer, reference: Reference
) -> None:
    """Negative control: the comparison does see a wrong state."""
    with start_server("zeroed", options=SMALL_POOL, fault="zero_snapshots") as server:
        outcome, _ = replay(server, reference)
    assert len(outcome.wrong) > 20
