# SPDX-License-Identifier: Apache-2.0
"""What the doctor says about models that vLLM has no implementation of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from hybrid_plugin.engine.outlook import Outlook, Prospect
from hybrid_plugin.vllm import outlook
from tests.vllm.hybrid_models import SERVED, write

NEMOTRON = "NemotronHForCausalLM"
FLAGS = ("--skip-tokenizer-init", "--max-model-len=512", "--enforce-eager")

WITHOUT: dict[str, dict[str, Any]] = {
    "BambaForCausalLM": {
        "model_type": "bamba",
        "num_hidden_layers": 3,
        "attn_layer_indices": [1],
        "mamba_n_heads": 4,
        "mamba_d_head": 64,
        "mamba_n_groups": 1,
        "mamba_d_state": 64,
    },
}
"""Hybrid models of transformers."""


def foreseen(folder: Path, architecture: str, config: dict[str, Any]) -> Outlook:
    return outlook.foresee(str(write(folder, architecture, config)), FLAGS, 1 << 30)


@pytest.mark.parametrize("architecture", WITHOUT)
def test_hybrid_model_without_an_implementation_fails(
    architecture: str, tmp_path: Path
) -> None:
    found = foreseen(tmp_path, architecture, WITHOUT[architecture])
    assert found.prospect is Prospect.FAILS
    assert architecture in found.reason
    assert "no state layers" not in found.reason


def test_what_drafts_take_is_said(tmp_path: Path) -> None:
    drafts = '{"method": "ngram", "num_speculative_tokens": 3}'
    model = str(write(tmp_path, NEMOTRON, SERVED[NEMOTRON]))
    found = outlook.foresee(model, (*FLAGS, "--speculative-config", drafts), 1 << 30)
    assert found.prospect is Prospect.SERVED and found.layout is not None
    assert found.note == (
        "a sequence that verifies drafts borrows 3 more state slots, and decodes "
        "without drafts where there are none"
    )
    without = outlook.foresee(model, FLAGS, 1 << 30)
    assert without.note == "" and without.layout is not None
    wider, plain = found.layout.states[0], without.layout.states[0]
    assert wider.state_bytes > plain.state_bytes, "windows hold the drafts' inputs"
