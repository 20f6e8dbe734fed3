# SPDX-License-Identifier: Apache-2.0
"""Published configurations that transformers does not take as they are."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

PUBLISHED = {
    "architectures": ["xLSTMForCausalLM"],
    "model_type": "xlstm",
    "hidden_size": 512,
    "num_heads": 8,
    "num_hidden_layers": 3,
    "chunkwise_kernel": "chunkwise--triton_xl_chunk",
    "sequence_kernel": "native_sequence__triton",
    "step_kernel": "triton",
}
"""As in NX-AI/xLSTM-7b, but for the sizes."""
READ = """
import sys
from transformers import AutoConfig, AutoModelForCausalLM
from hybrid_models.own_configs import register_configs
for _ in range(2):
    register_configs()
config = AutoConfig.from_pretrained(sys.argv[1])
print(config.num_heads, config.num_hidden_layers, config.hidden_size)
print(type(AutoModelForCausalLM.from_config(config)).__name__)
"""


def test_kernels_of_a_checkpoints_authors_are_passed_over(tmp_path: Path) -> None:
    """Registered in a process of its own: transformers' own class stays in this one."""
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED))
    found = subprocess.run(
        [sys.executable, "-c", READ, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-2000:]
    assert found.stdout.split() == ["8", "3", "512", "xLSTMForCausalLM"]
