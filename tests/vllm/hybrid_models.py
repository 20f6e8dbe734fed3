# SPDX-License-Identifier: Apache-2.0
"""Shrunken config.json files of the hybrid architectures that vLLM knows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

COMMON: dict[str, Any] = {
    "vocab_size": 264,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 258,
    "pad_token_id": 256,
}
_MAMBA2: dict[str, Any] = {
    "ssm_state_size": 64,
    "mamba_num_heads": 4,
    "mamba_head_dim": 64,
    "n_groups": 2,
    "conv_kernel": 4,
    "expand": 2,
    "chunk_size": 64,
}

NEMOTRON_H: dict[str, Any] = {
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "M-M*-",
    "num_hidden_layers": 5,
    "mamba_n_groups": 2,
    **_MAMBA2,
}

STEPPED_ASIDE: dict[str, tuple[dict[str, Any], str]] = {
    "NemotronHForCausalLM": (
        NEMOTRON_H | {"sliding_window": 64},
        "all attention layers have a sliding window of 64 tokens",
    ),
}
"""Models with something that has no pool, and what the plugin says."""


def write(folder: Path, architecture: str, config: dict[str, Any]) -> Path:
    """Write a folder as vLLM takes it, without weights; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"architectures": [architecture], **COMMON, **config})
    (folder / "config.json").write_text(text)
    return folder
