# SPDX-License-Identifier: Apache-2.0
"""config.json files of published models: their layers, but few of them.

Widths, heads and states are those of the models, as far as public sources name them,
so tensor parallelism divides what it divides there.  Layers, experts and the
vocabulary are fewer and a vision tower is small.  Weights in NVFP4 are described as
such, which some flags need, those in FP8 are not: the cache depends on neither.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Config = dict[str, Any]

_COMMON: Config = {
    "dtype": "bfloat16",
    "torch_dtype": "bfloat16",
    "vocab_size": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "hidden_act": "silu",
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
_DELTA: Config = {
    "head_dim": 256,
    "num_hidden_layers": 4,
    "full_attention_interval": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "attn_output_gate": True,
}
_DELTA_EXPERTS: Config = {
    "num_experts": 16,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
}
_MTP: Config = {"mtp_num_hidden_layers": 1, "num_nextn_predict_layers": 1}
_MROPE: Config = {
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "rope_type": "default",
        "rope_theta": 10000000,
        "partial_rotary_factor": 0.25,
    }
}
_QWEN_VISION: Config = {
    "depth": 2,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [],
}


def _qwen(kind: str, text: Config) -> Config:
    """A Qwen3.5: text layers behind a vision tower."""
    experts = "Moe" if "moe" in kind else ""
    hidden = text["hidden_size"]
    return {
        "architectures": [f"Qwen3_5{experts}ForConditionalGeneration"],
        "model_type": kind,
        "image_token_id": 1000,
        "video_token_id": 1001,
        "vision_start_token_id": 1002,
        "vision_end_token_id": 1003,
        "tie_word_embeddings": False,
        "text_config": {
            **_COMMON,
            **_DELTA,
            **_MTP,
            **_MROPE,
            "model_type": f"{kind}_text",
            **text,
        },
        "vision_config": {
            **_QWEN_VISION,
            "model_type": kind,
            "out_hidden_size": hidden,
        },
    }


def _nemotron(text: Config) -> Config:
    return {
        **_COMMON,
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "mlp_hidden_act": "relu2",
        "mamba_hidden_act": "silu",
        "ssm_state_size": 128,
        "mamba_n_groups": 8,
        "n_groups": 8,
        "conv_kernel": 4,
        "chunk_size": 128,
        "expand": 2,
        "head_dim": 128,
        "mamba_ssm_cache_dtype": "float32",
        "mamba_ssm_dtype": "float32",
        "layer_norm_epsilon": 1e-5,
        "use_conv_bias": True,
        "use_bias": False,
        "mlp_bias": False,
        "attention_bias": False,
        "mamba_proj_bias": False,
        **text,
    }


_NEMOTRON_EXPERTS: Config = {
    "hybrid_override_pattern": "MEM*E",
    "num_hidden_layers": 5,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 1,
    "mtp_hybrid_override_pattern": "*E",
    "mtp_layers_block_type": ["attention", "moe"],
}
_MLA: Config = {
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}


_KIMI: Config = {
    "model_type": "kimi_linear",
    "num_hidden_layers": 4,
    "mla_use_nope": True,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_expert_group": 1,
    "topk_group": 1,
    "use_grouped_topk": True,
    "num_experts": 16,
    "rope_theta": 10000.0,
    "max_position_embeddings": 1048576,
}


def _lfm(text: Config) -> Config:
    return {
        **_COMMON,
        "num_hidden_layers": 3,
        "layer_types": ["conv", "conv", "full_attention"],
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "conv_L_cache": 3,
        "conv_dim": 2048,
        "block_dim": 2048,
        "conv_bias": False,
        "norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "block_auto_adjust_ff_dim": True,
        "block_ff_dim": 12288,
        "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 256,
        "intermediate_size": 12288,
        "max_position_embeddings": 128000,
        **text,
    }


def _ling(text: Config) -> Config:
    return {
        **_COMMON,
        **_MLA,
        "architectures": ["BailingMoeV2_5ForCausalLM"],
        "model_type": "bailing_hybrid",
        "auto_map": {"AutoConfig": "configuration_shape.ShapeConfig"},
        "num_hidden_layers": 4,
        "layer_group_size": 4,
        "head_dim": 128,
        "num_experts": 16,
        "num_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "first_k_dense_replace": 1,
        "score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "group_norm_size": 4,
        "linear_silu": False,
        "use_qk_norm": True,
        "use_qkv_bias": False,
        "use_bias": False,
        "rope_interleave": True,
        "rope_theta": 6000000.0,
        "partial_rotary_factor": 0.5,
        "rotary_dim": 64,
        "num_nextn_predict_layers": 1,
        "max_position_embeddings": 131072,
        **text,
    }


def _granite(text: Config) -> Config:
    return {
        **_COMMON,
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "num_hidden_layers": 3,
        "layer_types": ["mamba", "attention", "mamba"],
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "attention_multiplier": 0.0078125,
        "embedding_multiplier": 12,
        "logits_scaling": 16,
        "residual_multiplier": 0.22,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_n_groups": 1,
        "mamba_chunk_size": 256,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
        "position_embedding_type": "nope",
        "max_position_embeddings": 131072,
        **text,
    }


def _falcon(text: Config) -> Config:
    return {
        **_COMMON,
        "architectures": ["FalconH1ForCausalLM"],
        "model_type": "falcon_h1",
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "mamba_d_state": 256,
        "mamba_n_groups": 1,
        "mamba_d_conv": 4,
        "mamba_chunk_size": 256,
        "mamba_expand": 2,
        "projectors_bias": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e11},
        **text,
    }


SHAPES: dict[str, Config] = {
    "qwen3-next": {
        **_COMMON,
        **_DELTA,
        **_DELTA_EXPERTS,
        **_MTP,
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "linear_num_value_heads": 32,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
    },
    "qwen3.5-27b": _qwen(
        "qwen3_5",
        {
            "hidden_size": 5120,
            "intermediate_size": 17408,
            "num_attention_heads": 24,
            "num_key_value_heads": 4,
            "linear_num_value_heads": 48,
        },
    ),
    "qwen3.5-4b": _qwen(
        "qwen3_5",
        {
            "hidden_size": 2560,
            "intermediate_size": 9216,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "linear_num_value_heads": 32,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3.5-35b-a3b": _qwen(
        "qwen3_5_moe",
        {
            **_DELTA_EXPERTS,
            "hidden_size": 2048,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "linear_num_value_heads": 32,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
        },
    ),
    "qwen3.5-397b-a17b": _qwen(
        "qwen3_5_moe",
        {
            **_DELTA_EXPERTS,
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "num_key_value_heads": 2,
            "linear_num_value_heads": 64,
            "moe_intermediate_size": 1024,
            "shared_expert_intermediate_size": 1024,
        },
    ),
    "qwen3.8-2.4t-a95b": {
        **_COMMON,
        **_DELTA,
        **_DELTA_EXPERTS,
        **_MTP,
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe_text",
        "hidden_size": 8192,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "linear_num_value_heads": 128,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 2048,
        "shared_expert_intermediate_size": 2048,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000000,
            "partial_rotary_factor": 0.25,
        },
    },
    "minicpm-v-4.6": {
        "architectures": ["MiniCPMV4_6ForConditionalGeneration"],
        "model_type": "minicpmv4_6",
        "image_size": 1120,
        "image_token_id": 1000,
        "video_token_id": 1001,
        "insert_layer_id": 0,
        "tie_word_embeddings": True,
        "text_config": {
            **_COMMON,
            **_DELTA,
            **_MROPE,
            "model_type": "qwen3_5_text",
            "hidden_size": 1024,
            "intermediate_size": 3584,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "linear_num_value_heads": 16,
            "tie_word_embeddings": True,
        },
        "vision_config": {
            "model_type": "minicpmv4_6_vision",
            "hidden_size": 1152,
            "image_size": 980,
            "insert_layer_id": 0,
            "intermediate_size": 4304,
            "num_attention_heads": 16,
            "num_channels": 3,
            "num_hidden_layers": 2,
            "patch_size": 14,
        },
    },
    "jamba-reasoning-3b": {
        **_COMMON,
        "architectures": ["JambaForCausalLM"],
        "model_type": "jamba",
        "num_hidden_layers": 3,
        "attn_layer_offset": 1,
        "attn_layer_period": 3,
        "hidden_size": 2560,
        "intermediate_size": 8192,
        "num_attention_heads": 20,
        "num_key_value_heads": 1,
        "num_experts": 1,
        "num_experts_per_tok": 1,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_dt_rank": 160,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
        "tie_word_embeddings": True,
    },
    "minimax-m1": {
        **_COMMON,
        "architectures": ["MiniMaxM1ForCausalLM"],
        "model_type": "minimax_m1",
        "auto_map": {"AutoConfig": "configuration_shape.ShapeConfig"},
        "num_hidden_layers": 3,
        "attn_type_list": [0, 0, 1],
        "hidden_size": 6144,
        "intermediate_size": 9216,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_local_experts": 16,
        "num_experts_per_tok": 2,
        "rotary_dim": 64,
        "rope_theta": 10000000,
        "postnorm": True,
        "shared_intermediate_size": 0,
        "layernorm_full_attention_alpha": 3.5565588200778455,
        "layernorm_full_attention_beta": 1.0,
        "layernorm_linear_attention_alpha": 3.5565588200778455,
        "layernorm_linear_attention_beta": 1.0,
        "layernorm_mlp_alpha": 3.5565588200778455,
        "layernorm_mlp_beta": 1.0,
        "max_position_embeddings": 10240000,
    },
    "zaya1-8b": {
        **_COMMON,
        "architectures": ["ZayaForCausalLM"],
        "model_type": "zaya",
        "num_hidden_layers": 2,
        "layer_types": ["hybrid", "hybrid"],
        "hidden_size": 2048,
        "moe_intermediate_size": 2048,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "num_experts": 16,
        "num_experts_per_tok": 1,
        "router_hidden_size": 256,
        "cca_time0": 2,
        "cca_time1": 2,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    },
    "nemotron-nano-9b-v2": _nemotron(
        {
            "hybrid_override_pattern": "M-M*-",
            "num_hidden_layers": 5,
            "hidden_size": 4480,
            "intermediate_size": 15680,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "mamba_num_heads": 128,
            "mamba_head_dim": 80,
            "max_position_embeddings": 131072,
        }
    ),
    "nemotron-3-nano": _nemotron(
        {
            **_NEMOTRON_EXPERTS,
            "hidden_size": 2688,
            "intermediate_size": 1856,
            "num_attention_heads": 32,
            "num_key_value_heads": 2,
            "mamba_num_heads": 64,
            "mamba_head_dim": 64,
            "moe_intermediate_size": 1856,
            "moe_shared_expert_intermediate_size": 3712,
        }
    ),
    "nemotron-3-super": _nemotron(
        {
            **_NEMOTRON_EXPERTS,
            "hidden_size": 4096,
            "intermediate_size": 2688,
            "num_attention_heads": 32,
            "num_key_value_heads": 2,
            "mamba_num_heads": 128,
            "mamba_head_dim": 64,
            "moe_latent_size": 1024,
            "moe_intermediate_size": 2688,
            "moe_shared_expert_intermediate_size": 5376,
        }
    ),
    "granite-4-h-small": _granite(
        {
            "hidden_size": 4096,
            "intermediate_size": 768,
            "shared_intermediate_size": 1536,
            "mamba_n_heads": 128,
            "num_local_experts": 16,
            "num_experts_per_tok": 10,
        }
    ),
    "granite-4-h-micro": _granite(
        {
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "shared_intermediate_size": 8192,
            "mamba_n_heads": 64,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "tie_word_embeddings": True,
        }
    ),
    "falcon-h1-7b": _falcon(
        {
            "hidden_size": 3072,
            "num_attention_heads": 12,
            "intermediate_size": 12288,
            "mamba_d_ssm": 3072,
            "mamba_n_heads": 24,
            "mamba_d_head": 128,
        }
    ),
    "falcon-h1-1.5b": _falcon(
        {
            "hidden_size": 2048,
            "num_attention_heads": 8,
            "intermediate_size": 4096,
            "mamba_d_ssm": 3072,
            "mamba_n_heads": 48,
            "mamba_d_head": 64,
        }
    ),
    "lfm2.5-1.2b": _lfm({"architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2"}),
    "lfm2.5-8b-a1b": _lfm(
        {
            "architectures": ["Lfm2MoeForCausalLM"],
            "model_type": "lfm2_moe",
            "intermediate_size": 7168,
            "moe_intermediate_size": 1792,
            "num_experts": 16,
            "num_experts_per_tok": 4,
            "num_dense_layers": 2,
            "norm_topk_prob": True,
            "use_expert_bias": True,
            "routed_scaling_factor": 1.0,
        }
    ),
    "lfm2.5-vl-1.6b": {
        "architectures": ["Lfm2VlForConditionalGeneration"],
        "model_type": "lfm2_vl",
        "image_token_id": 396,
        "downsample_factor": 2,
        "projector_hidden_act": "gelu",
        "projector_hidden_size": 2560,
        "projector_bias": True,
        "text_config": _lfm({"model_type": "lfm2"}),
        "vision_config": {
            "model_type": "siglip2_vision_model",
            "hidden_size": 256,
            "intermediate_size": 512,
            "num_attention_heads": 4,
            "num_hidden_layers": 2,
            "num_patches": 256,
            "patch_size": 16,
            "num_channels": 3,
        },
    },
    "kimi-linear-48b-a3b": {
        **_COMMON,
        **_MLA,
        **_KIMI,
        "architectures": ["KimiLinearForCausalLM"],
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 72,
        "moe_intermediate_size": 1024,
        "num_experts_per_token": 8,
        "num_shared_experts": 1,
        "routed_scaling_factor": 2.446,
        "linear_attn_config": {
            "full_attn_layers": [4],
            "kda_layers": [1, 2, 3],
            "head_dim": 128,
            "num_heads": 32,
            "short_conv_kernel_size": 4,
        },
    },
    "ling-2.6-flash": _ling(
        {
            "hidden_size": 4096,
            "intermediate_size": 9216,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "moe_intermediate_size": 1024,
            "moe_shared_expert_intermediate_size": 1024,
        }
    ),
    "ring-2.5-1t": _ling(
        {
            "hidden_size": 8192,
            "intermediate_size": 18432,
            "num_attention_heads": 64,
            "num_key_value_heads": 64,
            "q_lora_rank": 1536,
            "group_norm_size": 8,
            "moe_intermediate_size": 2048,
            "moe_shared_expert_intermediate_size": 2048,
        }
    ),
    "ling-3.0-flash": _ling(
        {
            "architectures": ["BailingMoeV3ForCausalLM"],
            "hidden_size": 2560,
            "intermediate_size": 6144,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "moe_intermediate_size": 512,
            "moe_shared_expert_intermediate_size": 512,
            "short_conv_kernel_size": 4,
            "no_kda_lora": True,
            "kda_safe_gate": True,
            "kda_lower_bound": -5.0,
            "gated_attention_proj_granularity_type": "head_wise",
            "group_norm_size": 1,
            "router_type": "topN",
        }
    ),
    "kimi-k3": {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": "kimi_k3",
        "media_placeholder_token_id": 1000,
        "text_config": {
            **_COMMON,
            **_MLA,
            **_KIMI,
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "num_attention_heads": 96,
            "num_key_value_heads": 96,
            "q_lora_rank": 1536,
            "mla_use_output_gate": True,
            "hidden_act": "situ",
            "activation_situ_beta": 4.0,
            "activation_situ_linear_beta": 25.0,
            "attn_res_block_size": 2,
            "moe_intermediate_size": 3072,
            "num_experts_per_token": 16,
            "num_shared_experts": 2,
            "routed_expert_hidden_size": 3584,
            "latent_moe_use_norm": True,
            "routed_scaling_factor": 1.0,
            "linear_attn_config": {
                "full_attn_layers": [4],
                "kda_layers": [1, 2, 3],
                "head_dim": 128,
                "num_heads": 96,
                "short_conv_kernel_size": 4,
                "use_full_rank_gate": True,
                "gate_lower_bound": -5.0,
            },
        },
        "vision_config": {
            "model_type": "kimi_k3_vision",
            "vt_num_hidden_layers": 2,
            "vt_hidden_size": 192,
            "vt_intermediate_size": 384,
            "qkv_hidden_size": 192,
        },
    },
    "qwen3.5-27b-dflash": {
        # It reads layers that this Qwen3.5 has.
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "vocab_size": _COMMON["vocab_size"],
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 5,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 262144,
        "block_size": 16,
        "dflash_config": {"target_layer_ids": [0, 1, 2], "mask_token_id": 1000},
    },
    "kimi-k3-dspark": {
        # It reads layers that this K3 has; how many heads it has is not published.
        "architectures": ["DSparkDraftModel"],
        "model_type": "qwen3",
        "vocab_size": _COMMON["vocab_size"],
        "hidden_size": 7168,
        "intermediate_size": 14336,
        "num_hidden_layers": 5,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "block_size": 7,
        "markov_rank": 256,
        "markov_head_type": "vanilla",
        "dflash_config": {"target_layer_ids": [0, 1, 2], "mask_token_id": 1000},
    },
    "glm-5.3-flash": {
        "architectures": ["Glm5NextForConditionalGeneration"],
        "model_type": "glm5_next",
        "image_token_id": 1000,
        "video_token_id": 1001,
        "text_config": {
            **_COMMON,
            "model_type": "glm5_next_text",
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "moe_intermediate_size": 2048,
            "num_hidden_layers": 4,
            "num_attention_heads": 64,
            "num_key_value_heads": 64,
            "n_routed_experts": 16,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "kv_lora_rank": 512,
            "q_lora_rank": 1536,
            "qk_nope_head_dim": 256,
            "qk_rope_head_dim": 0,
            "v_head_dim": 256,
            "index_topk": 2048,
            "index_head_dim": 128,
            "index_n_heads": 32,
            "index_kpool": 4,
            "index_kpool_compress": True,
            "index_kpool_always_select_tail": True,
            "linear_head_dim": 128,
            "linear_num_heads": 64,
            "linear_conv_kernel_dim": 4,
            "linear_lower_bound": -5.0,
            "num_nextn_predict_layers": 1,
            "mhc": True,
            "max_position_embeddings": 1048576,
        },
        "vision_config": {
            "model_type": "glm5_next_vision",
            "swiglu_limit": 10.0,
            "hidden_size": 1024,
            "num_heads": 16,
            "depth": 2,
        },
    },
}
"""By the name that a recipe calls its shape."""


_CODE = """\
from transformers import PretrainedConfig


class ShapeConfig(PretrainedConfig):
    model_type = "bailing_hybrid"
"""
"""What a checkpoint brings along whose configuration transformers does not know."""


_QUANTISED: dict[str, Config] = {
    "nvfp4": {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "group_size": 16,
        "kv_cache_quant_algo": None,
        "ignore": ["lm_head"],
        "producer": {"name": "modelopt", "version": "0.41.0"},
    },
}
"""What a config.json says of such weights."""


def write(folder: Path, shape: str, weights: str | None = None) -> Path:
    """Write a shape's config.json, and what else a checkpoint has beside its weights.

    Args:
        folder: is made.
        shape: one of `SHAPES`.
        weights: "nvfp4" if they are; None if not.

    Returns:
        The folder, as an engine takes it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = SHAPES[shape]
    if weights is not None:
        config = config | {"quantization_config": _QUANTISED[weights]}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "configuration_shape.py").write_text(_CODE)
    if shape in _IMAGES:
        (folder / "preprocessor_config.json").write_text(json.dumps(_IMAGES[shape]))
    _write_tokenizer(folder)
    return folder


_IMAGES: dict[str, Config] = {
    "kimi-k3": {
        "media_proc_cfg": {
            "in_patch_limit": 16384,
            "patch_size": 14,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
            "merge_kernel_size": 2,
            "temporal_merge_kernel_size": 4,
            "in_patch_limit_video": 16384,
            "in_patch_limit_each_frame": 4096,
            "fixed_output_tokens": None,
            "patch_limit_on_one_side": 512,
        }
    }
}
"""preprocessor_config.json of those whose engine reads it early."""

_TOKENIZER = Path(__file__).parents[2] / "tests" / "assets" / "tiny-qwen3-next"
_MARKS = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<|open|>",
    "<|close|>",
    "<|sep|>",
    "<|end_of_msg|>",
)
"""Tokens that parsers of answers look for."""


def _write_tokenizer(folder: Path) -> None:
    """One of bytes, which knows what parsers ask a tokenizer for."""
    tokenizer = json.loads((_TOKENIZER / "tokenizer.json").read_text())
    known: list[Config] = tokenizer["added_tokens"]
    for number, mark in enumerate(_MARKS, start=known[-1]["id"] + 1):
        known.append({**known[-1], "id": number, "content": mark, "special": False})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = (_TOKENIZER / "tokenizer_config.json").read_text()
    (folder / "tokenizer_config.json").write_text(settings)
