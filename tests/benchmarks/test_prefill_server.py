# SPDX-License-Identifier: Apache-2.0
"""A prefill server's chats, after prompts of which nothing was used again."""

from __future__ import annotations

import random

import pytest

from benchmarks.crowded_cache import make_cache
from benchmarks.no_model.bookkeeper import Bookkeeper
from benchmarks.prefill_decode.traffic import CHATS, GPU, workloads
from benchmarks.prefill_server import MODEL, prefilled, table
from hybrid_plugin.core.policy import reuse
from hybrid_plugin.core.policy.costs import PASS_TOKENS

ROUNDS = 3
CACHE = 12 << 30
LEAST = 0.5
"""Of the prompts' tokens; an unlimited cache restores 0.7."""
MOST_STEPS = 30
"""Stock vLLM takes as many."""


def chats(pass_tokens: float = PASS_TOKENS) -> list[tuple[float, int]]:
    """Of each round, the share that is restored, and steps.

    Args:
        pass_tokens: what admissions take a pass that prefills to cost.
    """
    cache = make_cache(MODEL, CACHE, elastic=True, waits=True, longest=GPU.longest + 1)
    cache.concurrency.pass_tokens = pass_tokens
    engine, found = Bookkeeper(cache), []
    for number in range(ROUNDS):
        for name, workload in workloads(GPU).items():
            rng, steps = random.Random(number), engine.steps
            replies = engine.drive(workload(prefilled(engine.ask), rng))
            if name == CHATS:
                cached = sum(reply.cached_tokens for reply in replies)
                prompts = sum(reply.prompt_tokens for reply in replies)
                found.append((cached / prompts, engine.steps - steps))
    return found


def test_chats_are_kept_although_prompts_before_them_never_came_back() -> None:
    assert min(restored for restored, _ in chats()) > LEAST


def test_prompts_do_not_wait_for_each_other_until_each_has_a_pass_of_its_own() -> None:
    assert max(steps for _, steps in chats()) <= MOST_STEPS
    assert max(steps for _, steps in chats(pass_tokens=0)) > 2 * MOST_STEPS


def test_uses_that_may_begin_late_are_what_keeps_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Control: without those laws most chats are evicted before they go on."""
    monkeypatch.setattr(reuse, "_LAWS", reuse._POWER_LAWS)
    assert chats()[0][0] < LEAST


def test_a_line_has_the_rounds_of_both_sides() -> None:
    row = {"cache_gib": 8, "workload": CHATS, "round": 0, "steps": 3}
    rows = [
        {**row, "side": "a", "restored": 0.5},
        {**row, "side": "b", "restored": 1.0},
    ]
    assert table(rows).splitlines()[-1] == "| 8 | chats | 50.0 | 3 | 100.0 | 3 |"
