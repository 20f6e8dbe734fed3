# SPDX-License-Identifier: Apache-2.0
"""Two ranks share out the KV of each sequence, and restore all of it.

The cache is looked at, and broken, from within the engine's process; see
`context_parallel_phases`, which says of each engine what is wrong.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.engines.context_parallel_phases import SERVED
from tests.engines.phases import run_phases

pytest.importorskip("vllm")

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(
        torch.cuda.device_count() < 2,
        reason="needs two GPUs: vLLM's attention on CPUs does not share out KV",
    ),
]


@pytest.mark.parametrize("name", SERVED)
def test_answers_behind_hits_are_those_without_a_cache(
    name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Chats of three turns, branches, preemption, and what is broken on purpose."""
    folder = tmp_path_factory.mktemp("models")
    found: dict[str, Any] = run_phases(
        "context_parallel_phases", (str(folder), name)
    ).found[name]
    assert found["wrong"] == []
