# SPDX-License-Identifier: Apache-2.0
"""What the doctor says of models that vLLM has no class for, with ours or without."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from shutil import copy
from typing import Any

import pytest

pytest.importorskip("vllm")

from hybrid_plugin.config import HybridConfig
from hybrid_plugin.core.memory.layout import CacheLayout
from hybrid_plugin.engine import driver_bindings, host_memory
from hybrid_plugin.engine.outlook import Outlook, Prospect
from hybrid_plugin.vllm import outlook, servable
from tests.engines import draft_heads
from tests.engines.drivers.driver import MODEL
from tests.vllm.hybrid_models import SERVED, STATES_ALONE, write

NEMOTRON = "NemotronHForCausalLM"
FLAGS = ("--skip-tokenizer-init", "--max-model-len=512", "--enforce-eager")

WRITERS: dict[str, Callable[..., Path]] = {
    "eagle": draft_heads.write_eagle,
    "eagle3": draft_heads.write_eagle3,
    "draft_model": draft_heads.write_draft_model,
    "dflash": partial(draft_heads.write_block_drafter, model=MODEL, layers=(0, 2)),
}
WITHOUT: dict[str, dict[str, Any]] = {
    "Glm5NextForConditionalGeneration": {
        "model_type": "glm5_next",
        "text_config": {
            "hidden_size": 128,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "num_hidden_layers": 2,
            "layer_types": ["linear_attention", "indexed_attention"],
            "mlp_layer_types": ["dense", "dense"],
        },
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


KIMI: dict[str, Any] = {
    "model_type": "kimi_linear",
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "linear_attn_config": {
        "kda_layers": [1, 2, 4],
        "full_attn_layers": [3],
        "num_heads": 4,
        "head_dim": 32,
        "short_conv_kernel_size": 4,
    },
    "q_lora_rank": None,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "mla_use_nope": True,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 64,
    "num_experts": 4,
    "num_experts_per_token": 2,
    "num_shared_experts": 1,
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


def test_so_is_what_vllm_has_for_gpus_alone(tmp_path: Path) -> None:
    """Kimi Linear, with keys and values of every head where none are latent."""
    found = foreseen(tmp_path, "KimiLinearForCausalLM", KIMI)
    assert (found.prospect, found.reason, found.note) == (Prospect.SERVED, "", "")
    assert found.layout is not None
    assert [len(group.layers) for group in found.layout.attention] == [1]
    (states,) = found.layout.states
    assert len(states.layers) == 3
    inputs = 3 * (4 * 32) * 3
    assert states.state_bytes == 4 * (4 * 32 * 32) + 2 * inputs


def test_states_alone_are_laid_out(tmp_path: Path) -> None:
    name = "Mamba2ForCausalLM"
    model = str(write(tmp_path, name, STATES_ALONE[name]))
    found = outlook.foresee(model, FLAGS, 1 << 30)
    assert (found.prospect, found.reason, found.note) == (Prospect.SERVED, "", "")
    assert found.layout is not None and found.layout.has_states_alone
    assert found.sizes is not None and found.shared is None
    assert found.sizes.slots == (1 << 30) // found.layout.slot_bytes


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


@pytest.mark.parametrize("method", ["mtp", *WRITERS])
def test_what_proposes_drafts_has_kv_in_pages(method: str, tmp_path: Path) -> None:
    """As much as one of the bundled model's two attention layers, in each of these."""
    drafting: dict[str, Any] = {"method": method, "num_speculative_tokens": 3}
    if method in WRITERS:
        drafting["model"] = str(WRITERS[method](tmp_path / method))
    flags = (*FLAGS, "--speculative-config", json.dumps(drafting))
    found = outlook.foresee(str(MODEL), flags, 1 << 30)
    alone = outlook.foresee(str(MODEL), FLAGS, 1 << 30)
    assert found.layout is not None and alone.layout is not None, found
    assert found.layout.page_bytes == 3 * alone.layout.page_bytes // 2


def layout_of(folder: Path, architecture: str, *flags: str) -> CacheLayout:
    model = str(write(folder, architecture, SERVED[architecture]))
    found = outlook.foresee(model, (*FLAGS, *flags), 1 << 30)
    assert found.prospect is Prospect.SERVED and found.layout is not None, found
    return found.layout


def test_a_rank_of_several_has_its_share_of_heads(tmp_path: Path) -> None:
    alone = layout_of(tmp_path, NEMOTRON)
    rank = layout_of(tmp_path, NEMOTRON, "--tensor-parallel-size=2")
    assert rank.page_bytes * 2 == alone.page_bytes
    assert alone.slot_bytes // 2 <= rank.slot_bytes < alone.slot_bytes
    assert layout_of(tmp_path, NEMOTRON) == alone, "the next model is alone again"


def test_a_stage_of_several_has_its_share_of_layers(tmp_path: Path) -> None:
    alone = layout_of(tmp_path, "Qwen3NextForCausalLM")
    stage = layout_of(tmp_path, "Qwen3NextForCausalLM", "--pipeline-parallel-size=2")
    assert 0 < stage.page_bytes + stage.slot_bytes < alone.page_bytes + alone.slot_bytes
    assert layout_of(tmp_path, "Qwen3NextForCausalLM") == alone


def test_experts_that_are_dealt_out_change_no_layout(tmp_path: Path) -> None:
    ranks = ("--tensor-parallel-size=2",)
    cut = layout_of(tmp_path, "Qwen3NextForCausalLM", *ranks)
    dealt = (*ranks, "--enable-expert-parallel")
    assert layout_of(tmp_path, "Qwen3NextForCausalLM", *dealt) == cut


def test_data_parallel_ranks_are_not_waited_for(tmp_path: Path) -> None:
    """The first configuration that a process sees makes its groups."""
    code = (
        "import sys; from hybrid_plugin.vllm.outlook import foresee\n"
        "found = foresee(sys.argv[1], sys.argv[2:], 1 << 30)\n"
        "print(found.prospect.value, found.layout is not None)"
    )
    model = str(write(tmp_path, NEMOTRON, SERVED[NEMOTRON]))
    done = subprocess.run(
        [sys.executable, "-c", code, model, *FLAGS, "--data-parallel-size=2"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout.splitlines()[-1:] == ["served True"], done.stderr[-3000:]


PARSER = """
from vllm.reasoning import ReasoningParserManager
from vllm.reasoning.identity_reasoning_parser import IdentityReasoningParser
ReasoningParserManager.register_module("of_the_checkpoint")(IdentityReasoningParser)
"""


def test_a_file_that_brings_a_parser_is_loaded(tmp_path: Path) -> None:
    file = tmp_path / "parser.py"
    file.write_text(PARSER)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        copy(MODEL / name, tmp_path)
    model = str(write(tmp_path, NEMOTRON, SERVED[NEMOTRON]))
    flags = ("--max-model-len=512", "--reasoning-parser=of_the_checkpoint")
    found = outlook.foresee(model, flags, 1 << 30)
    assert found.prospect is Prospect.FAILS and "of_the_checkpoint" in found.reason
    plugin = f"--reasoning-parser-plugin={file}"
    found = outlook.foresee(model, (*flags, plugin), 1 << 30)
    assert found.prospect is Prospect.SERVED, found.reason


def test_the_reason_is_that_of_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM names its own worker once the plugin has stepped aside."""
    reason = "it keeps what nobody knows."
    monkeypatch.setattr(servable, "obstacles", lambda _: iter((reason,)))
    found = foreseen(tmp_path, NEMOTRON, SERVED[NEMOTRON])
    assert (found.prospect, found.reason) == (Prospect.REFUSED, reason)


def test_what_host_memory_lacks_is_said_before_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU whose environment has no cuda-bindings."""
    checked: list[str] = []
    check = host_memory.check_packages

    def on_a_gpu(options: HybridConfig, device: str) -> None:
        checked.append(device)
        check(options, "cuda")

    monkeypatch.setattr(host_memory, "check_packages", on_a_gpu)
    monkeypatch.setattr(driver_bindings, "are_installed", lambda: False)
    model = str(write(tmp_path, NEMOTRON, SERVED[NEMOTRON]))
    options = '--additional-config={"hybrid_plugin": {"host_memory": "1GiB"}}'
    found = outlook.foresee(model, (*FLAGS, options), 1 << 30)
    assert found.prospect is Prospect.REFUSED
    assert "host_memory needs the package cuda-bindings, " in found.reason
    assert set(checked) == {"cpu"}
    assert outlook.foresee(model, FLAGS, 1 << 30).prospect is Prospect.SERVED


@pytest.mark.parametrize("flag", ["--tool-call-parser", "--reasoning-parser"])
def test_a_parser_that_vllm_does_not_have_is_named(flag: str, tmp_path: Path) -> None:
    model = str(write(tmp_path, NEMOTRON, SERVED[NEMOTRON]))
    found = outlook.foresee(model, (*FLAGS, flag, "no_such_one"), 1 << 30)
    assert found.prospect is Prospect.FAILS
    assert found.reason == f"{flag} names no_such_one, and vLLM has no such parser."


def test_flags_that_the_server_refuses_at_once_fail(tmp_path: Path) -> None:
    model = str(write(tmp_path, NEMOTRON, SERVED[NEMOTRON]))
    found = outlook.foresee(model, (*FLAGS, "--enable-auto-tool-choice"), 1 << 30)
    assert found.prospect is Prospect.FAILS
    assert "requires --tool-call-parser" in found.reason


def test_words_of_a_failure_have_no_frame(tmp_path: Path) -> None:
    model = str(write(tmp_path, NEMOTRON, SERVED[NEMOTRON]))
    found = outlook.foresee(model, (*FLAGS, "--max-model-len=5000"), 1 << 30)
    assert found.prospect is Prospect.FAILS
    assert found.reason.startswith("User-specified max_model_len (5000)")
    assert "validation error" not in found.reason
