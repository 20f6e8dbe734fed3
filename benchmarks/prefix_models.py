# SPDX-License-Identifier: Apache-2.0
"""Layer shapes of published models, as both engines read them.

Weights are dummies: every token costs what it costs in the real model's layers, and
no answer means anything.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.prefix_workloads import VOCABULARY

if TYPE_CHECKING:
    from hybrid_plugin.core.memory.layout import CacheLayout

COMMON = {
    "dtype": "bfloat16",
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 16384,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

_GATED_DELTA_NET = {
    "full_attention_interval": 4,
    "num_attention_heads": 16,
    "head_dim": 256,
    "linear_num_value_heads": 32,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}

_NEMOTRON_H_PATTERN = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"

MODELS: dict[str, dict[str, Any]] = {
    # 12 attention and 36 state layers of Qwen3-Next-80B-A3B; 32 experts for 512, so
    # that several engines fit one device.
    "qwen3-next": {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_key_value_heads": 2,
        **_GATED_DELTA_NET,
        "intermediate_size": 1024,
        "num_experts": 32,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
    # 8 attention and 24 state layers of Qwen3.5-4B, whose MLP is dense.
    "qwen3.5-4b": {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "hidden_size": 2560,
        "num_hidden_layers": 32,
        "num_key_value_heads": 4,
        **_GATED_DELTA_NET,
        "intermediate_size": 9216,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
        },
    },
    # 4 attention, 24 Mamba-2 and 24 MLP layers of Nemotron-H-8B.
    "nemotron-h-8b": {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "hidden_size": 4096,
        "num_hidden_layers": len(_NEMOTRON_H_PATTERN),
        "hybrid_override_pattern": _NEMOTRON_H_PATTERN,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 21504,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "mamba_n_groups": 8,
        "n_groups": 8,
        "ssm_state_size": 128,
        "conv_kernel": 4,
        "chunk_size": 128,
        "expand": 2,
    },
    # Attention and Mamba-2 side by side in each of the 44 layers of Falcon-H1-7B.
    "falcon-h1-7b": {
        "architectures": ["FalconH1ForCausalLM"],
        "model_type": "falcon_h1",
        "hidden_size": 3072,
        "num_hidden_layers": 44,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "intermediate_size": 12288,
        "mamba_d_ssm": 3072,
        "mamba_n_heads": 24,
        "mamba_d_head": 128,
        "mamba_d_state": 256,
        "mamba_n_groups": 1,
        "mamba_d_conv": 4,
        "mamba_chunk_size": 256,
        "mamba_expand": 2,
        "projectors_bias": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e11},
    },
    # For machines without a GPU: what matters is what the engine does around it.
    "tiny": {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "hidden_size": 128,
        "num_hidden_layers": 8,
        "num_key_value_heads": 2,
        **_GATED_DELTA_NET,
        "num_attention_heads": 4,
        "head_dim": 32,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "intermediate_size": 128,
        "num_experts": 2,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 128,
    },
}


def write_model(name: str, folder: Path, longest: int = 16384) -> None:
    """Write the model's configuration, for so many positions, into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    config = COMMON | {"max_position_embeddings": longest} | MODELS[name]
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def attention_and_state_layers(name: str) -> tuple[int, int]:
    """How many a model has of each."""
    model = MODELS[name]
    if "hybrid_override_pattern" in model:
        pattern = str(model["hybrid_override_pattern"])
        return pattern.count("*"), pattern.count("M")
    layers = int(model["num_hidden_layers"])
    if "mamba_d_ssm" in model:
        return layers, layers
    attention = layers // int(model["full_attention_interval"])
    return attention, layers - attention


def token_bytes(name: str) -> int:
    """Of a token's keys and values in bfloat16, over all attention layers."""
    model = MODELS[name]
    attention, _ = attention_and_state_layers(name)
    return 2 * 2 * attention * int(model["num_key_value_heads"] * model["head_dim"])


def slot_bytes(name: str, state_itemsize: int = 4) -> int:
    """Of a state slot, with convolutions of width 4 in bfloat16.

    Args:
        name: of the model.
        state_itemsize: bytes of a number of the recurrent states.
    """
    model = MODELS[name]
    _, states = attention_and_state_layers(name)
    if "ssm_state_size" in model:
        inner = model["mamba_num_heads"] * model["mamba_head_dim"]
        state = inner * model["ssm_state_size"]
        channels = inner + 2 * model["n_groups"] * model["ssm_state_size"]
    elif "mamba_d_ssm" in model:
        inner = model["mamba_d_ssm"]
        state = inner * model["mamba_d_state"]
        channels = inner + 2 * model["mamba_n_groups"] * model["mamba_d_state"]
    else:
        keys = model["linear_num_key_heads"] * model["linear_key_head_dim"]
        values = model["linear_num_value_heads"] * model["linear_value_head_dim"]
        state = values * model["linear_key_head_dim"]
        channels = 2 * keys + values
    return int(states * (state_itemsize * state + 2 * 3 * channels))


def cache_layout(name: str, page_size: int, state_itemsize: int = 4) -> CacheLayout:
    """Pages and slots of a model as the plugin sees them."""
    # Processes of stock engines read this module too, without the plugin.
    from hybrid_plugin.core.memory.layout import AttentionGroup, CacheLayout, StateGroup

    attention, _ = attention_and_state_layers(name)
    layers = tuple(f"attention {i}" for i in range(attention))
    page_bytes = page_size * token_bytes(name) // attention
    states = StateGroup(("states",), slot_bytes(name, state_itemsize))
    return CacheLayout(
        page_size=page_size,
        attention=(AttentionGroup(layers, page_bytes),),
        states=(states,),
    )
