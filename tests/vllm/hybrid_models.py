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
_GATED_DELTA: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
}

SERVED: dict[str, dict[str, Any]] = {
    "Qwen3NextForCausalLM": {
        "model_type": "qwen3_next",
        **_GATED_DELTA,
        **_EXPERTS,
    },
    "Qwen3_5ForCausalLM": {"model_type": "qwen3_5_text", **_GATED_DELTA},
    "Qwen3_5MoeForCausalLM": {
        "model_type": "qwen3_5_moe_text",
        **_GATED_DELTA,
        **_EXPERTS,
    },
    "NemotronHForCausalLM": {
        "model_type": "nemotron_h",
        "hybrid_override_pattern": "M-M*-",
        "num_hidden_layers": 5,
        "mamba_n_groups": 2,
        **_MAMBA2,
    },
    "FalconH1ForCausalLM": {
        "model_type": "falcon_h1",
        "num_hidden_layers": 2,
        "mamba_d_ssm": 256,
        "mamba_n_heads": 4,
        "mamba_d_head": 64,
        "mamba_n_groups": 1,
        "mamba_d_state": 64,
        "mamba_chunk_size": 64,
    },
    "GraniteMoeHybridForCausalLM": {
        "model_type": "granitemoehybrid",
        "num_hidden_layers": 3,
        "layer_types": ["mamba", "attention", "mamba"],
        "mamba_n_heads": 4,
        "mamba_d_head": 64,
        "mamba_n_groups": 1,
        "mamba_d_state": 64,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "shared_intermediate_size": 256,
        "attention_multiplier": 0.25,
    },
    "Zamba2ForCausalLM": {
        "model_type": "zamba2",
        "num_hidden_layers": 3,
        "layers_block_type": ["mamba", "hybrid", "mamba"],
        "attention_head_dim": 64,
        "num_key_value_heads": 4,
        "num_mem_blocks": 1,
        "mamba_d_state": 64,
        "n_mamba_heads": 4,
        "mamba_ngroups": 1,
    },
}
"""Text models whose layers all have pools."""

_STATES: dict[str, Any] = {
    "num_hidden_layers": 3,
    "state_size": 16,
    "conv_kernel": 4,
    "expand": 2,
    "use_bias": False,
    "use_conv_bias": True,
    "hidden_act": "silu",
    "layer_norm_epsilon": 1e-5,
}

STATES_ALONE: dict[str, dict[str, Any]] = {
    "MambaForCausalLM": {"model_type": "mamba", **_STATES, "time_step_rank": 8},
    "FalconMambaForCausalLM": {
        "model_type": "falcon_mamba",
        **_STATES,
        "time_step_rank": 8,
        "mixer_rms_eps": 1e-6,
    },
    "Mamba2ForCausalLM": {
        "model_type": "mamba2",
        **_STATES,
        "num_heads": 4,
        "head_dim": 64,
        "n_groups": 1,
        "chunk_size": 64,
    },
}
"""The same of models without attention layers."""

_WINDOW: dict[str, Any] = {
    "num_hidden_layers": 4,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}

WINDOWS: dict[str, dict[str, Any]] = {
    "Gemma3ForCausalLM": {
        "model_type": "gemma3_text",
        "query_pre_attn_scalar": 32,
        **_WINDOW,
    },
    "Llama4ForCausalLM": {
        "model_type": "llama4_text",
        "num_hidden_layers": 4,
        "intermediate_size_mlp": 256,
        "no_rope_layers": [1, 0, 1, 0],
        "attention_chunk_size": 128,
        "interleave_moe_layer_step": 8,
    },
}
"""The same of models with windows and no state layers."""


def write(folder: Path, architecture: str, config: dict[str, Any]) -> Path:
    """Write a folder as vLLM takes it, without weights; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"architectures": [architecture], **COMMON, **config})
    (folder / "config.json").write_text(text)
    return folder
