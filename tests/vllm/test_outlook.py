# SPDX-License-Identifier: Apache-2.0
"""What the doctor says of models that vLLM has no class for, with ours or without."""

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
    "ZambaForCausalLM": {
        "model_type": "zamba",
        "num_hidden_layers": 3,
        "attn_layer_period": 3,
        "attn_layer_offset": 1,
        "attention_head_dim": 64,
        "num_key_value_heads": 4,
        "n_mamba_heads": 2,
    },
}
"""Hybrid models of transformers that we have no class for, either."""
BAMBA: dict[str, Any] = {
    "model_type": "bamba",
    "num_hidden_layers": 3,
    "attn_layer_indices": [1],
    "mamba_n_heads": 4,
    "mamba_d_head": 64,
    "mamba_n_groups": 1,
    "mamba_d_state": 64,
}


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


def test_one_of_our_own_classes_is_laid_out(tmp_path: Path) -> None:
    found = foreseen(tmp_path, "BambaForCausalLM", BAMBA)
    assert (found.prospect, found.reason, found.note) == (Prospect.SERVED, "", "")
    assert found.layout is not None
    assert sum(len(group.layers) for group in found.layout.attention) == 1
    (states,) = found.layout.states
    assert len(states.layers) == 2
    channels = 4 * 64 + 2 * 64
    assert states.state_bytes >= 2 * (4 * 64 * 64 + 3 * channels)


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
