# SPDX-License-Identifier: Apache-2.0
"""SGLang's KV of 8 bits: restored turns are answered as those that are computed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang")

from tests.engines import slow_decay
from tests.engines.conftest import StartServer
from tests.engines.drivers.sglang import ON_GPU
from tests.engines.messages import Answer, Ask
from tests.engines.server import Server
from tests.engines.traffic import encode

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(ON_GPU, reason="SGLang's norms take no float32 on a GPU"),
]

TOKENS, CHATS = 12, 4
AGAIN = encode(" And what came of it?")
PROMPTS = tuple(
    encode(f"{number}. What was said about it " * 9)[:230] for number in range(CHATS)
)
"""Of more than two passes each."""
ROUNDING = 1e-4
"""Nats between two ways to compute the same; KV of 8 bits is further from others."""


def ask_all(server: Server, prompts: Sequence[tuple[int, ...]]) -> list[Answer]:
    """One at a time: what a batch rounds is another matter."""
    answers = server.ask_all([Ask(prompt, TOKENS, logprobs=1) for prompt in prompts], 1)
    assert all(answer.error is None for answer in answers)
    return answers


def tokens(answers: Sequence[Answer]) -> list[tuple[int, ...]]:
    """Of each answer."""
    return [answer.tokens for answer in answers]


def furthest(these: Sequence[Answer], those: Sequence[Answer]) -> float:
    """By how many nats the first tokens' logprobs differ, at most."""
    firsts = [
        (one.logprobs[0].get(one.tokens[0]), other.logprobs[0].get(one.tokens[0]))
        for one, other in zip(these, those, strict=True)
    ]
    return max(abs(a - b) for a, b in firsts if a is not None and b is not None)


def test_restored_turns_are_those_of_stock_sglang(
    start_server: StartServer, tmp_path: Path
) -> None:
    model = slow_decay.write_nemotron_h(tmp_path / "model")
    setup: dict[str, Any] = {"model": model, "dtype": "float32"}
    small = {"flags": ("--kv-cache-dtype=fp8_e4m3",)}
    with start_server("small", **setup, **small) as server:
        first = ask_all(server, PROMPTS)
        turns = [
            (*prompt, *answer.tokens, *AGAIN)
            for prompt, answer in zip(PROMPTS, first, strict=True)
        ]
        second = ask_all(server, turns)
        for turn, answer in zip(turns, second, strict=True):
            end = len(turn) - len(AGAIN)
            assert end - 1 <= answer.cached_tokens <= end
        stats = server.metrics()
        assert stats["kv{used}"] == stats["state{used}"] == 0
    stock = setup | {"plugin": False, "prefix_cache": False}
    with start_server("stock", **stock, **small) as server:
        assert tokens(first) == tokens(ask_all(server, PROMPTS))
        computed = ask_all(server, turns)
    assert tokens(second) == tokens(computed)
    assert furthest(second, computed) < ROUNDING
    with start_server("wide", **stock) as server:
        assert furthest(second, ask_all(server, turns)) > 5 * ROUNDING
