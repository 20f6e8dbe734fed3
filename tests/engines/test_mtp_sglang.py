# SPDX-License-Identifier: Apache-2.0
"""SGLang with the bundled model's MTP head, whose KV is in the elastic pools' pages."""

from __future__ import annotations

import pytest

from hybrid_plugin.tools.demo.compare import NEAR_TIE
from tests.engines.conftest import StartServer
from tests.engines.drivers.driver import MODEL
from tests.engines.drivers.sglang import ON_GPU
from tests.engines.greedy import gaps
from tests.engines.messages import Ask

pytest.importorskip("sglang")
pytestmark = pytest.mark.engine

FLAGS = (
    "--speculative-algorithm=NEXTN",
    "--speculative-num-steps=2",
    "--speculative-eagle-topk=1",
    "--speculative-num-draft-tokens=3",
)
PROMPTS = (
    "Return a list of the names in the module. ",
    "The code for amber is 1234. ",
    'def read(self, size=-1):\n    """Read and return up to size bytes',
    "This exception is raised when ",
)
TOKENS = 48
BUDGET = (256 if ON_GPU else 32) << 20
LEAST_LENGTH = 1.6
"""Tokens a verification; a head whose weights are not the trained ones has 1.0."""


def test_answers_are_greedy_and_drafts_accepted_in_elastic_pools(
    start_server: StartServer,
) -> None:
    """Second turns restore the first ones, the head's KV too: drafts stay as good."""
    options = {"elastic": True, "gpu_memory_budget": BUDGET}
    lengths = []
    with start_server("mtp", options=options, flags=FLAGS) as server:
        asks = [Ask(tuple(text.encode()), TOKENS) for text in PROMPTS]
        turns: list[tuple[int, ...]] = []
        answers, before = [], 0.0
        for _ in range(2):
            found = server.ask_all(asks[-len(PROMPTS) :], 4)
            assert not any(answer.error for answer in found)
            answers += found
            verified = server.counter("sglang:spec_verify_calls_total")
            generated = sum(len(answer.tokens) - 1 for answer in found)
            lengths.append(generated / (verified - before))
            before = verified
            if not turns:
                turns = [
                    (*ask.prompt, *answer.tokens)
                    for ask, answer in zip(asks, found, strict=True)
                ]
                asks += [Ask((*turn, *b" And then: "), TOKENS) for turn in turns]
        levels = server.metrics()
    worst = max(gaps(MODEL, asks, answers))
    print(f"{lengths} tokens a verification, worst {worst:.3f} nats")
    assert worst <= NEAR_TIE
    assert min(lengths) >= LEAST_LENGTH
    for turn, answer in zip(turns, answers[len(PROMPTS) :], strict=True):
        assert answer.cached_tokens >= len(turn) - 1
    assert levels["kv{used}"] == levels["state{used}"] == levels["scratch{used}"] == 0
