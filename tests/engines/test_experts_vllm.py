# SPDX-License-Identifier: Apache-2.0
"""Expert parallelism in vLLM: ranks with different experts, and one cache.

On a CPU a rank of vLLM, with the plugin and without, takes the numbers of all experts
for its own, and dies of a segmentation fault: there they are mended for this test.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

pytest.importorskip("vllm")

import torch

from tests.engines.conftest import StartServer
from tests.engines.drivers.vllm import ON_GPU
from tests.engines.messages import Ask
from tests.engines.model_findings import ROUNDING
from tests.engines.model_workload import gap
from tests.models.kinds import find

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(
        ON_GPU and torch.cuda.device_count() < 2, reason="needs two GPUs"
    ),
]

LENGTHS = (150, 97, 230)
"""Of first prompts; some are longer than a step."""
ANSWER = 12


def test_answers_with_divided_experts_are_those_of_the_reference(
    start_server: StartServer, tmp_path: Path
) -> None:
    """Of a second turn too, that goes on from restored states.

    Two of four experts are on each rank, and a token has two: some have both on one.
    """
    kind = find("minimax_text_01")
    model = kind.write(tmp_path / "minimax")
    rng = random.Random(1)
    first = [
        Ask(tuple(rng.randrange(3, 250) for _ in range(length)), ANSWER)
        for length in LENGTHS
    ]
    with start_server(
        "experts",
        model=model,
        dtype="float32",
        flags=("--tensor-parallel-size=2", "--enable-expert-parallel"),
        fault=None if ON_GPU else "experts_by_rank",
    ) as server:
        answers = server.ask_all(first, len(first))
        second = [
            Ask((*ask.prompt, *answer.tokens, *range(10, 30)), ANSWER)
            for ask, answer in zip(first, answers, strict=True)
        ]
        again = server.ask_all(second, len(second))
        assert "Local/global number of experts: 2/4" in server.log_text()
    reference = kind.reference(model)
    for ask, answer in zip([*first, *second], [*answers, *again], strict=True):
        assert answer.error is None and len(answer.tokens) == ANSWER
        assert gap(reference, list(ask.prompt), list(answer.tokens)) < ROUNDING
    known = [length + ANSWER - 1 for length in LENGTHS]
    assert [answer.cached_tokens for answer in again] == known
