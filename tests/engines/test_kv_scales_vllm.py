# SPDX-License-Identifier: Apache-2.0
"""KV of 8 bits with a scale for each token and head: hits bring the scales, too.

vLLM's attention on CPUs misreads such KV, where the plugin refuses it.  The cache is
looked at, and broken, from within the engine's process; see `kv_scale_phases_vllm`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.engines.kv_scale_phases_vllm import SERVED
from tests.engines.phases import run_phases

pytest.importorskip("vllm")

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="vLLM's CPU build misreads such KV"
    ),
]


@pytest.mark.parametrize("dtype", SERVED)
def test_answers_behind_hits_are_those_without_a_cache(
    dtype: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Chats of three turns, branches, preemption, and what is broken on purpose."""
    folder = tmp_path_factory.mktemp("models")
    found: dict[str, Any] = run_phases(
        "kv_scale_phases_vllm", (str(folder), dtype)
    ).found[dtype]
    assert found["wrong"] == []
