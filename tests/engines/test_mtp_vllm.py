# SPDX-License-Identifier: Apache-2.0
"""vLLM with the bundled model's MTP head: drafts that are really accepted or not."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import pytest

from hybrid_plugin.tools.demo.compare import NEAR_TIE
from hybrid_plugin.tools.demo.metrics import Metrics
from tests.engines.conftest import StartServer
from tests.engines.drivers import Driver
from tests.engines.drivers.driver import MODEL
from tests.engines.greedy import gaps
from tests.engines.messages import Ask

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


@pytest.mark.parametrize(
    ("plugin", "options"),
    [
        (False, {}),
        (True, {}),
        (True, {"kernels": "ours"}),
        (True, {"draft_states": "replay"}),
    ],
    ids=["stock", "plugin", "our kernels", "replay"],
)
def test_answers_are_greedy_and_drafts_accepted(
    start_server: StartServer,
    driver: Driver,
    plugin: bool,
    options: Mapping[str, object],
) -> None:
    """Stock without its prefix cache; with the plugin, second turns restore the first.

    Of an answer's last token there is a state only where it was an accepted draft.
    """
    first = asks_of([text.encode() for text in PROMPTS])
    with start_server(
        "mtp", plugin=plugin, prefix_cache=plugin, options=options, flags=FLAGS
    ) as server:
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
    if plugin:
        for turn, answer in zip(turns, again, strict=True):
            assert answer.cached_tokens >= len(turn) - 1
