# SPDX-License-Identifier: Apache-2.0
"""What the doctor says of models with windows, as SGLang resolves its arguments."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang")

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
    (folder / "config.json").write_text(json.dumps(config))
    clean = {k: v for k, v in os.environ.items() if not k.startswith("HYBRID_")}
    done = subprocess.run(
        [sys.executable, "-c", FORESEE, str(folder), "--skip-tokenizer-init", *flags],
        env=clean | {"SGLANG_PLATFORM": "hybrid_cpu"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()[-1]


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
