# SPDX-License-Identifier: Apache-2.0
"""Expert parallelism in SGLang: ranks with different experts, and one cache."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

pytest.importorskip("sglang")

import torch

from tests.engines import slow_decay
from tests.engines.conftest import StartServer
from tests.engines.drivers.sglang import ON_GPU
from tests.engines.messages import Ask

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(
        ON_GPU and torch.cuda.device_count() < 2, reason="needs two GPUs"
    ),
]

LENGTHS = (150, 97, 230)
"""Of first prompts; some are longer than a step."""
ANSWER = 12


def test_answers_with_divided_experts_are_those_of_one_rank(
    start_server: StartServer, tmp_path: Path
) -> None:
    """Of a second turn too, that goes on from restored states.

    Two of four experts are on each rank, and a token has two: some have both on one.
    """
    model = slow_decay.write_qwen3_next(tmp_path / "qwen3-next")
    rng = random.Random(1)
    first = [
        Ask(tuple(rng.randrange(3, 250) for _ in range(length)), ANSWER)
        for length in LENGTHS
    ]
    with start_server(
        "experts",
        model=model,
        dtype="float32",
        flags=("--tp-size=2", "--ep-size=2"),
        environment={"SGLANG_CPU_OMP_THREADS_BIND": "0|1"},
    ) as server:
        answers = server.ask_all(first, len(first))
        second = [
            Ask((*ask.prompt, *answer.tokens, *range(10, 30)), ANSWER)
            for ask, answer in zip(first, answers, strict=True)
        ]
        again = server.ask_all(second, len(second))
    with start_server(
        "stock", plugin=False, prefix_cache=False, model=model, dtype="float32"
    ) as stock:
        right = stock.ask_all([*first, *second], 1)
    assert [a.tokens for a in [*answers, *again]] == [a.tokens for a in right]
    assert len({answer.tokens for answer in right}) == len(right)
    known = [
        len(ask.prompt) + len(answer.tokens) - 1
        for ask, answer in zip(first, answers, strict=True)
    ]
    assert [answer.cached_tokens for answer in again] == known
