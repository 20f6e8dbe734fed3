# SPDX-License-Identifier: Apache-2.0
"""Qwen4-Exp on a real vLLM: states, index keys, and tokens that wait for one.

vLLM has its classes for GPUs alone.  The cache is looked at, and broken, from within
the engine's process; see `ring_phases_vllm`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.engines.phases import run_phases

pytest.importorskip("vllm")

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="vLLM has the model for GPUs alone"
    ),
]


def test_answers_and_index_keys_behind_hits_are_those_without_a_cache(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Chats of three turns, branches, preemption, and what is broken on purpose."""
    folder = tmp_path_factory.mktemp("models")
    found: dict[str, Any] = run_phases("ring_phases_vllm", (str(folder),)).found
    assert found["qwen4_exp"]["wrong"] == []
