# SPDX-License-Identifier: Apache-2.0
"""What published models' config.json say about their layers, and no more."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

QWEN3_NEXT: dict[str, Any] = {
    "model_type": "qwen3_next",
    "dtype": "bfloat16",
    "hidden_size": 2048,
    "vocab_size": 151936,
    "num_hidden_layers": 48,
    "full_attention_interval": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
CODESTRAL_MAMBA: dict[str, Any] = {
    "model_type": "mamba2",
    "dtype": "bfloat16",
    "hidden_size": 4096,
    "vocab_size": 32768,
    "num_hidden_layers": 64,
    "intermediate_size": 8192,
    "num_heads": 128,
    "head_dim": 64,
    "n_groups": 8,
    "state_size": 128,
    "conv_kernel": 4,
    "expand": 2,
}
FALCON_MAMBA: dict[str, Any] = {
    "model_type": "falcon_mamba",
    "dtype": "bfloat16",
    "hidden_size": 4096,
    "vocab_size": 65024,
    "num_hidden_layers": 64,
    "intermediate_size": 8192,
    "state_size": 16,
    "conv_kernel": 4,
    "expand": 2,
}
GEMMA3: dict[str, Any] = {
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text",
        "dtype": "bfloat16",
        "hidden_size": 5376,
        "vocab_size": 262208,
        "intermediate_size": 21504,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "sliding_window": 1024,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 10
        + ["sliding_attention"] * 2,
    },
}
"""52 layers with a window and 10 without."""
NEMOTRON_H: dict[str, Any] = {
    "model_type": "nemotron_h",
    "dtype": "bfloat16",
    "hidden_size": 4480,
    "vocab_size": 131072,
    "hybrid_override_pattern": "M-M-M-MM-M-M-M*-",
    "intermediate_size": 15680,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "mamba_num_heads": 128,
    "mamba_head_dim": 80,
    "ssm_state_size": 128,
    "n_groups": 8,
    "conv_kernel": 4,
    "mamba_ssm_dtype": "float32",
}
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "hidden_size": 4096,
    "vocab_size": 128256,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
}
GEMMA3N: dict[str, Any] = {
    "model_type": "gemma3n_text",
    "hidden_size": 2048,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "sliding_window": 512,
    "num_kv_shared_layers": 15,
    "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
}
"""The last 15 of 35 layers read the KV of earlier ones."""


def write(folder: Path, config: object) -> Path:
    """Write a config.json; returns its path."""
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path
