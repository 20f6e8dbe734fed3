# SPDX-License-Identifier: Apache-2.0
"""Chats in a cache of canonical content: what the next turn finds of an answer."""

from __future__ import annotations

import pytest

from hybrid_plugin.core.cache import HybridCache
from hybrid_plugin.core.memory.pools import PagePool, SlotPool
from hybrid_plugin.core.policy.costs import PASS_TOKENS
from hybrid_plugin.core.policy.eviction import ExpectedSaving
from hybrid_plugin.core.policy.snapshot_positions import SnapshotPolicy

from .support import serve, span

PAGE, CHUNK = 16, 64
PROMPT = span(0, 300)


def chat_cache() -> HybridCache:
    return HybridCache(
        PagePool(400),
        SlotPool(20),
        PAGE,
        SnapshotPolicy(PAGE, grid=CHUNK, canonical=True),
        eviction=ExpectedSaving(
            token_bytes=4096, slot_bytes=1 << 20, pass_tokens=PASS_TOKENS
        ),
    )


@pytest.mark.parametrize("answer", [50, 100, 700])
def test_an_answer_sent_as_a_prompt_is_there_for_the_next_turn(answer: int) -> None:
    turn = PROMPT + span(1000, 1000 + answer)
    question = span(5000, 5040)
    cache = chat_cache()
    assert serve(cache, "first", PROMPT, turn[len(PROMPT) :]).hit == 0
    assert serve(cache, "at once", turn + question).hit == 256  # as the prompt ends

    cache = chat_cache()
    serve(cache, "first", PROMPT, turn[len(PROMPT) :])
    serve(cache, "again", turn, (7,))
    last = (len(turn) - 1) // CHUNK * CHUNK
    assert serve(cache, "later", turn + question).hit == last > 256
