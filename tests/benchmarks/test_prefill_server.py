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

ROUNDS = 3
CACHE = 12 << 30
LEAST = 0.6
"""Of the prompts' tokens; an unlimited cache restores 0.7, stock vLLM 0.6."""


def restored() -> list[float]:
    """By the chats of each round."""
    cache = make_cache(MODEL, CACHE, elastic=True, waits=True, longest=GPU.longest + 1)
    engine, found = Bookkeeper(cache), []
    for number in range(ROUNDS):
        for name, workload in workloads(GPU).items():
            rng = random.Random(number)
            replies = engine.drive(workload(prefilled(engine.ask), rng))
            if name == CHATS:
                cached = sum(reply.cached_tokens for reply in replies)
                found.append(cached / sum(reply.prompt_tokens for reply in replies))
    return found


def test_chats_are_kept_although_prompts_before_them_never_came_back() -> None:
    assert min(restored()) > LEAST


def test_uses_that_may_begin_late_are_what_keeps_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Control: without those laws most chats are evicted before they go on."""
    monkeypatch.setattr(reuse, "_LAWS", reuse._POWER_LAWS)
    assert restored()[0] < LEAST


def test_a_line_has_the_rounds_of_both_sides() -> None:
    row = {"cache_gib": 8, "workload": CHATS, "round": 0}
    rows = [
        {**row, "side": "a", "restored": 0.5},
        {**row, "side": "b", "restored": 1.0},
    ]
    assert table(rows).splitlines()[-1] == "| 8 | chats | 50.0 | 100.0 |"
