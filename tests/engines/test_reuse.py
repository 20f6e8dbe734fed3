# SPDX-License-Identifier: Apache-2.0
"""What is reused, seen from the API: chats, shared prompts, salts, metrics."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from hybrid_plugin.core.policy.costs import PASS_TOKENS
from tests.engines.conftest import StartServer
from tests.engines.drivers import Driver
from tests.engines.messages import Ask
from tests.engines.server import Server
from tests.engines.traffic import encode, system_prompt

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def server(start_server: StartServer) -> Iterator[Server]:
    """The plugin with its defaults, started as users start it."""
    with start_server("reuse", cold=True) as running:
        yield running


def test_next_turn_reuses_prompt_and_answer(server: Server, driver: Driver) -> None:
    """Six turns; each reuses all that was computed before it."""
    history = encode(system_prompt(random.Random(1), 75))
    for turn in range(6):
        prompt = history + encode(f" Question {turn}: who is there? ")
        answer = server.ask(prompt, 20)
        assert answer.error is None
        if turn:
            # The last token of an answer is sampled, not yet computed.
            assert len(history) - answer.cached_tokens <= driver.page_size
            assert answer.cached_tokens >= len(history) - 1
        history = prompt + answer.tokens


def test_third_request_with_a_short_system_prompt_hits(
    server: Server, driver: Driver
) -> None:
    """The second reveals the branch, if a guess did not: it repays a pass."""
    system = encode("Speak like a pirate. " + system_prompt(random.Random(2), 44))
    endings = [encode(f"{letter}: tell me about it.") for letter in "ABCDEFGH"]
    cached = [server.ask(system + end, 8).cached_tokens for end in endings]
    assert cached[0] == 0
    assert all(tokens >= driver.page_size for tokens in cached[2:])


def test_branches_in_the_middle_are_found(server: Server, driver: Driver) -> None:
    """A tree of prompts: trunk, two limbs, leaves."""
    trunk = encode(system_prompt(random.Random(3), 100))
    limbs = [trunk + encode(f"<{limb}>" * 30) for limb in "xy"]
    for limb in limbs:
        for leaf in range(3):
            answer = server.ask(limb + encode(f"{leaf} leaf {leaf}"), 4)
    page = driver.page_size
    assert answer.cached_tokens >= len(limbs[1]) // page * page - page


def test_salt_separates(server: Server) -> None:
    prompt = encode(system_prompt(random.Random(4), 200))
    endings = [encode(ending) for ending in ("one", "two", "three")]
    alice = [server.ask(prompt + end, 4, salt="alice") for end in endings]
    bob = server.ask(prompt + endings[-1], 4, salt="bob")
    # Where the first one's guess is this near, one more snapshot does not repay a pass.
    assert alice[-1].cached_tokens >= 200 - PASS_TOKENS // 2
    assert bob.cached_tokens == 0


def test_prompt_logprobs_bypass_the_cache(server: Server) -> None:
    """They need every prompt position computed."""
    prompt = encode(system_prompt(random.Random(5), 100))
    for ending in "!.":  # the second reveals the branch
        server.ask(prompt + encode(ending), 4)
    assert server.ask(prompt + encode("?"), 4).cached_tokens > 0
    assert server.cached_with_prompt_logprobs(prompt + encode("?")) == 0


def test_counters_agree_with_the_answers(server: Server) -> None:
    before = server.metrics()
    system = encode(system_prompt(random.Random(6), 64))
    answers = [server.ask(system + encode(f"{n} " * 9), 6) for n in range(10)]
    after = server.metrics()
    hits = sum(a.cached_tokens for a in answers)
    assert hits > 0
    assert after["hit_tokens"] - before["hit_tokens"] == hits
    queried = sum(a.prompt_tokens for a in answers)
    assert after["queried_tokens"] - before["queried_tokens"] == queried
    assert after["snapshots_taken"] > before["snapshots_taken"]
    assert after["kv{used}"] == after["state{used}"] == 0
    assert after["kv{cached}"] > 0 and after["state{cached}"] > 0


def test_reset_forgets_everything(server: Server) -> None:
    prompt = encode(system_prompt(random.Random(7), 90))
    for ending in "?.":  # the second reveals the branch
        server.ask(prompt + encode(ending), 4)
    assert server.ask(prompt + encode("!!"), 4).cached_tokens > 0
    server.reset_prefix_cache()
    assert server.ask(prompt + encode("!!"), 4).cached_tokens == 0


def test_requests_that_arrive_together_compute_their_beginning_once(
    server: Server, driver: Driver
) -> None:
    """One leads, and the others wait for what it computes."""
    requests, shared = 6, encode(system_prompt(random.Random(1), 700))
    asks = [
        Ask(shared + encode(f"{i}: who is there?"), 8, salt="together")
        for i in range(requests)
    ]
    before = server.metrics()
    answers = server.ask_at_once(asks)
    after = server.metrics()
    # How long an answer is may differ: machines round bfloat16 differently.
    assert all(answer.error is None and answer.tokens for answer in answers)
    first, *others = sorted(answer.cached_tokens for answer in answers)
    whole = len(shared) // driver.page_size * driver.page_size
    assert first == 0
    # Each goes on where less than `in_batch_prefix_min_tokens` is left to share.
    assert all(whole - 256 < cached <= whole for cached in others)
    waits = "in_batch_prefix_waits"
    assert after[waits] - before[waits] == requests - 1
