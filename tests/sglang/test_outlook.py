# SPDX-License-Identifier: Apache-2.0
"""What the doctor says of models with windows, as SGLang resolves its arguments."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang")

from tests.engines import draft_heads
from tests.engines.drivers.driver import MODEL
from tests.engines.drivers.sglang import IMPORTS
from tests.engines.messages import Launch
from tests.engines.warm_start import completed

LAGUNA = {
    "architectures": ["LagunaForCausalLM"],
    "model_type": "laguna",
    "hidden_size": 64,
    "head_dim": 32,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "mlp_layer_types": ["dense", "dense"],
    "sliding_window": 64,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
}
FORESEE = """
import sys
from hybrid_plugin.sglang.outlook import foresee
found = foresee(sys.argv[1], sys.argv[2:], 1 << 30)
print(found.prospect.value, "|", found.reason, "|", found.note)
"""


def foresee(folder: Path, config: dict[str, Any], *flags: str) -> str:
    return run(FORESEE, folder, config, *flags)[-1]


def run(code: str, folder: Path, config: dict[str, Any], *flags: str) -> list[str]:
    """The lines that code prints, which is given a model and a server's flags."""
    (folder / "config.json").write_text(json.dumps(config))
    return printed(code, str(folder), "--skip-tokenizer-init", *flags)


def printed(code: str, *arguments: str) -> list[str]:
    """The lines that code prints in a process of its own."""
    command = [sys.executable, "-c", code, *arguments]
    done = completed(Launch(command, {"SGLANG_PLATFORM": "hybrid_cpu"}, IMPORTS))
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ((), "served |  | SGLang divides the memory itself, by --swa-full-tokens"),
        (("--disable-hybrid-swa-memory",), "left alone | the model has no state"),
    ],
    ids=["a window pool", "one pool"],
)
def test_windows_are_served_where_sglang_gives_them_a_pool(
    flags: tuple[str, ...], expected: str, tmp_path: Path
) -> None:
    assert foresee(tmp_path, LAGUNA, *flags).startswith(expected)


WITHOUT_BINDINGS = """
import sys
from hybrid_plugin.engine import driver_bindings, host_memory
from hybrid_plugin.sglang.outlook import foresee
check, checked = host_memory.check_packages, []

def on_a_gpu(options, device):
    checked.append(device)
    check(options, "cuda")

host_memory.check_packages = on_a_gpu
driver_bindings.are_installed = lambda: False
found = foresee(sys.argv[1], sys.argv[2:], 1 << 30)
print(found.prospect.value, found.reason, set(checked), sep=" | ")
"""


def test_what_host_memory_lacks_is_said_before_the_start(tmp_path: Path) -> None:
    """As on a GPU whose environment has no cuda-bindings."""
    options = '--hybrid-config={"host_memory": "1GiB"}'
    found = run(WITHOUT_BINDINGS, tmp_path, LAGUNA, options)[-1]
    prospect, reason, checked = found.split(" | ")
    assert prospect == "refused" and checked == "{'cpu'}"
    assert "host_memory needs the package cuda-bindings, " in reason


NEMOTRON = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "M*-",
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "ssm_state_size": 16,
    "mamba_num_heads": 4,
    "mamba_head_dim": 32,
    "n_groups": 2,
    "mamba_n_groups": 2,
    "conv_kernel": 4,
    "chunk_size": 64,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
}
SIZES = """
import json, sys
from hybrid_plugin.sglang.outlook import foresee
for flags in ([], ["--tp-size=2"], ["--kv-cache-dtype=fp8_e4m3"], ["--no-such-flag"]):
    found = foresee(sys.argv[1], [*sys.argv[2:], *flags], 1 << 30)
    layout = found.layout
    sizes = layout and (layout.page_bytes, layout.slot_bytes)
    print(found.prospect.value, json.dumps(sizes), found.reason, sep=" | ")
"""


def test_sizes_are_those_of_a_rank_and_of_its_kind_of_kv(tmp_path: Path) -> None:
    found = [
        line.split(" | ") for line in run(SIZES, tmp_path, NEMOTRON) if "|" in line
    ]
    sizes = [json.loads(size) for _, size, _ in found]
    (page, slot), (page_of_two, slot_of_two), *others = sizes
    assert page_of_two == page // 2 and slot // 2 <= slot_of_two < slot
    assert others == [[page // 2, slot], None]
    assert found[-1] == [
        "fails",
        "null",
        "SGLang does not take these flags; see above.",
    ]


QWEN3_5 = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "hidden_size": 64,
    "head_dim": 32,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 8,
    "layer_types": [*["linear_attention"] * 3, "full_attention"] * 2,
    "full_attention_interval": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
    },
}
IN_STAGES = """
import json, os, sys
from hybrid_plugin.sglang.outlook import foresee
for stages, partition in ((1, None), (2, None), (2, "6,2"), (2, "4,4")):
    os.environ.pop("SGLANG_PP_LAYER_PARTITION", None)
    if partition:
        os.environ["SGLANG_PP_LAYER_PARTITION"] = partition
    found = foresee(sys.argv[1], [*sys.argv[2:], f"--pp-size={stages}"], 1 << 30)
    layout = found.layout
    print("FOUND", json.dumps((layout.page_bytes, layout.slot_bytes,
          sum(len(group.layers) for group in layout.states),
          found.shared is not None)))
"""


LONGER = NEMOTRON | {"hybrid_override_pattern": "M*" * 4, "num_hidden_layers": 8}


@pytest.mark.parametrize("config", [QWEN3_5, LONGER], ids=["Qwen3.5", "Nemotron-H"])
def test_sizes_are_those_of_the_largest_stage(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    """Of a class that divides its memory; Nemotron-H has all of it everywhere."""
    lines = run(IN_STAGES, tmp_path, config)
    whole, halves, uneven, even = [
        json.loads(line.removeprefix("FOUND "))
        for line in lines
        if line.startswith("FOUND ")
    ]
    assert halves == even
    if config is QWEN3_5:
        assert whole[2] == 6 and halves[2] == 3 and uneven[2] == 5
        assert halves[0] == whole[0] // 2
        assert uneven[0] == halves[0], "one attention layer on either stage"
        assert halves[3] and not uneven[3], "pools are elastic where stages are alike"
    else:
        assert halves == uneven == whole


MAMBA2 = {
    "architectures": ["Mamba2ForCausalLM"],
    "model_type": "mamba2",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_heads": 4,
    "head_dim": 64,
    "n_groups": 1,
    "state_size": 16,
    "conv_kernel": 4,
    "expand": 2,
    "vocab_size": 512,
    "rms_norm": True,
    "dtype": "float32",
}
FORESEE_SIZES = """
import sys
from hybrid_plugin.sglang.outlook import foresee
found = foresee(sys.argv[1], sys.argv[2:], 1 << 30)
print(found.prospect.value, found.layout.has_states_alone, found.layout.page_bytes,
      found.layout.slot_bytes, found.sizes.slots, found.shared)
"""


def test_states_alone_are_served_from_one_pool(tmp_path: Path) -> None:
    slot = 3 * 4 * (3 * (256 + 2 * 16) + 4 * 64 * 16)
    slots = (1 << 30) // slot
    flags = ("--dtype=float32", "--context-length=512")
    found = run(FORESEE_SIZES, tmp_path, MAMBA2, *flags)[-1]
    assert found == f"served True 0 {slot} {slots} None"


WITH_DRAFTS = """
import json, sys
from hybrid_plugin.sglang.outlook import foresee
model, drafter, *flags = sys.argv[1:]
eagle = ["--speculative-algorithm=EAGLE", "--speculative-num-steps=3",
         "--speculative-eagle-topk=1", "--speculative-num-draft-tokens=4"]
block = ["--speculative-algorithm=DFLASH", "--speculative-num-draft-tokens=4",
         f"--speculative-draft-model-path={drafter}"]
for drafts in ([], eagle, block):
    layout = foresee(model, [*flags, *drafts], 1 << 30).layout
    print("FOUND", json.dumps((layout.page_bytes, layout.slot_bytes)))
"""


def test_what_proposes_drafts_has_kv_in_pages(tmp_path: Path) -> None:
    """As much as one of the bundled model's two attention layers, in either of these.

    Slots have no part of it: a head's layer keeps no state, whatever the target's do.
    """
    drafter = draft_heads.write_block_drafter(tmp_path / "drafts", MODEL, (0, 2))
    arguments = (str(MODEL), str(drafter), "--skip-tokenizer-init", "--page-size=16")
    lines = printed(WITH_DRAFTS, *arguments)
    sizes = [json.loads(line[6:]) for line in lines if line.startswith("FOUND")]
    (page, slot), *others = sizes
    assert others == [[3 * page // 2, slot]] * 2
