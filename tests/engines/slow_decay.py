# SPDX-License-Identifier: Apache-2.0
"""Random checkpoints whose states remember, for what the bundled model is not.

Usual random initialisation forgets a token within a few others, and any cache
passes with it.  Here the decay per token is drawn near one, so that what stood
hundreds of tokens back still moves the logits.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Tensors = dict[str, torch.Tensor]
CONVERTED = "converted"
"""Folder below a published checkpoint, of what it is converted to."""
TOKENIZER = Path(__file__).parents[1] / "assets" / "tiny-qwen3-next"

SMALL: dict[str, Any] = {
    "vocab_size": 264,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "dtype": "float32",
    "bos_token_id": None,
    "eos_token_id": 258,
    "pad_token_id": 256,
}


ONE_KV_HEAD: dict[str, Any] = {"num_key_value_heads": 1, "head_dim": 64}
"""Attention that two ranks cannot divide by its heads of KV."""

_STATES_ALONE: dict[str, Any] = {
    "vocab_size": 264,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "tie_word_embeddings": False,
    "dtype": "float32",
    "bos_token_id": None,
    "eos_token_id": 258,
    "pad_token_id": 256,
}
"""Of models without attention, whose configurations know no longest sequence."""

ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
QWEN3_5: dict[str, Any] = {
    **SMALL,
    "num_hidden_layers": 8,
    "layer_types": [*["linear_attention"] * 3, "full_attention"] * 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "tie_word_embeddings": False,
}
"""Its text model, but for how it turns positions."""

WINDOW = 64
"""Tokens that layers with a window, or with chunks, look back at most."""


def write_nemotron_h(
    folder: Path, seed: int = 0, sliding_window: int | None = None, **changed: Any
) -> Path:
    """Write a Nemotron-H (Mamba-2, attention, MLP) of about a million weights."""
    from transformers import NemotronHConfig

    pattern = "M-M*-M-M*-"
    layers: dict[str, Any] = {
        "hybrid_override_pattern": pattern,
        "num_hidden_layers": len(pattern),
    }
    config = NemotronHConfig(
        **SMALL | changed,
        **layers,
        ssm_state_size=64,
        mamba_num_heads=4,
        mamba_head_dim=64,
        n_groups=2,
        conv_kernel=4,
        expand=2,
        chunk_size=64,
    )
    # The pattern alone, as in published checkpoints: SGLang's configuration class and
    # transformers (which of them, by version) disagree on the names of layer types.
    return _write(
        config,
        folder,
        seed,
        layers_block_type=None,
        hybrid_override_pattern=pattern,
        mamba_n_groups=config.n_groups,
        sliding_window=sliding_window,
    )


def write_nemotron_h_window(folder: Path, seed: int = 0) -> Path:
    """Write the same with a window on all attention layers, as some are published."""
    return write_nemotron_h(folder, seed, WINDOW)


def write_gemma3(folder: Path, seed: int = 0) -> Path:
    """Write a Gemma-3 (full attention and sliding windows, no states) of that size."""
    from transformers import Gemma3TextConfig

    config = Gemma3TextConfig(
        **SMALL,
        num_hidden_layers=4,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"] * 2,
        query_pre_attn_scalar=32,
        tie_word_embeddings=False,  # the last token would decide the next one alone
    )
    return _write(config, folder, seed)


def write_llama4(folder: Path, seed: int = 0) -> Path:
    """Write a Llama-4 (full attention and local chunks) without experts."""
    from transformers import Llama4TextConfig

    config = Llama4TextConfig(
        **SMALL,
        intermediate_size_mlp=256,
        num_hidden_layers=4,
        no_rope_layers=[1, 0, 1, 0],
        attention_chunk_size=WINDOW,
        interleave_moe_layer_step=8,
    )
    return _write(config, folder, seed)


def write_laguna(folder: Path, seed: int = 0) -> Path:
    """Write a Laguna (full attention and sliding windows) without experts."""
    from transformers import LagunaConfig

    layers = 4
    config = LagunaConfig(
        **SMALL,
        num_hidden_layers=layers,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"] * (layers // 2),
        mlp_layer_types=["dense"] * layers,
    )
    return _write(config, folder, seed)


def write_falcon_h1(folder: Path, seed: int = 0) -> Path:
    """Write a Falcon-H1 (Mamba-2 beside attention, in each layer) of that size."""
    from transformers import FalconH1Config

    config = FalconH1Config(
        **SMALL,
        num_hidden_layers=4,
        mamba_d_ssm=256,
        mamba_n_heads=4,
        mamba_d_head=64,
        mamba_n_groups=1,
        mamba_d_state=64,
        mamba_d_conv=4,
        mamba_expand=2,
        mamba_chunk_size=64,
    )
    return _write(config, folder, seed)


def write_mamba2(folder: Path, seed: int = 0) -> Path:
    """Write a Mamba-2 (state layers only) of about half a million weights."""
    from transformers import Mamba2Config

    config = Mamba2Config(
        **_STATES_ALONE,
        num_heads=4,
        head_dim=64,
        n_groups=1,
        state_size=64,
        chunk_size=64,
    )
    # As published, and as SGLang asks for.
    return _write(config, folder, seed, intermediate_size=256, rms_norm=True)


def write_mamba(folder: Path, seed: int = 0) -> Path:
    """Write a Mamba (Mamba-1 layers only) of that size."""
    from transformers import MambaConfig

    config = MambaConfig(**_STATES_ALONE, state_size=8, time_step_rank=8)
    return _write(config, folder, seed)


def write_falcon_mamba(folder: Path, seed: int = 0) -> Path:
    """Write a Falcon-Mamba (the same, with norms of B, C and dt) of that size."""
    from transformers import FalconMambaConfig

    config = FalconMambaConfig(**_STATES_ALONE, state_size=8, time_step_rank=8)
    return _write(config, folder, seed)


def write_xlstm(folder: Path, seed: int = 0) -> Path:
    """Write an xLSTM (matrix memories only) of about a million weights."""
    from transformers import xLSTMConfig

    # As published: transformers takes such names only where their kernels are.
    published = {
        "chunkwise_kernel": "chunkwise--triton_xl_chunk",
        "sequence_kernel": "native_sequence__triton",
        "step_kernel": "triton",
    }
    config = xLSTMConfig(**_STATES_ALONE, num_heads=4)
    return _write(config, folder, seed, **published)


def write_qwen3_5(folder: Path, seed: int = 0) -> Path:
    """Write a Qwen3.5 (gated delta nets, attention, dense layers) of that size."""
    from transformers import Qwen3_5TextConfig

    rope = ROPE | {"partial_rotary_factor": 0.25}
    config = Qwen3_5TextConfig(**QWEN3_5, rope_parameters=rope)
    return _write(config, folder, seed, full_attention_interval=4)


def write_qwen3_next(folder: Path, seed: int = 0, **changed: Any) -> Path:
    """Write a Qwen3-Next (gated delta nets, attention, experts) of that size."""
    from transformers import Qwen3NextConfig

    experts = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
    }
    config = Qwen3NextConfig(
        **QWEN3_5 | experts | changed,
        rope_parameters=ROPE | {"partial_rotary_factor": 0.25},
    )
    return _write(config, folder, seed, full_attention_interval=4)


def write_bamba(folder: Path, seed: int = 0) -> Path:
    """Write a Bamba (Mamba-2, and attention in some places) of that size."""
    from transformers import BambaConfig

    config = BambaConfig(
        **{name: value for name, value in SMALL.items() if name != "head_dim"},
        num_hidden_layers=6,
        attn_layer_indices=[2, 5],
        mamba_n_heads=4,
        mamba_d_head=64,
        mamba_n_groups=1,
        mamba_d_state=64,
        mamba_d_conv=4,
        mamba_expand=2,
        mamba_chunk_size=64,
    )
    return _write(config, folder, seed)


def write_jamba(folder: Path, seed: int = 0) -> Path:
    """Write a Jamba (Mamba-1, attention, some layers of experts) of that size."""
    from transformers import JambaConfig

    config = JambaConfig(
        **{name: value for name, value in SMALL.items() if name != "head_dim"},
        num_hidden_layers=4,
        attn_layer_period=4,
        attn_layer_offset=2,
        num_experts=4,
        mamba_d_state=8,
        mamba_dt_rank=8,
    )
    return _write(config, folder, seed)


def write_olmo_hybrid(folder: Path, seed: int = 0) -> Path:
    """Write an OLMo-Hybrid (gated delta net and attention) of that size."""
    from transformers import OlmoHybridConfig

    config = OlmoHybridConfig(
        **SMALL,
        num_hidden_layers=4,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    _write(config, folder, seed)
    sizes = [2 * 32, 2 * 32, 4 * 32]
    _rewrite(folder, lambda tensors: _cut_convolutions(tensors, sizes))
    return folder


def write_recurrent_gemma(folder: Path, seed: int = 0) -> Path:
    """Write a RecurrentGemma (gated linear recurrence and windows) of that size."""
    from transformers import RecurrentGemmaConfig

    small = {name: value for name, value in SMALL.items() if name != "head_dim"}
    config = RecurrentGemmaConfig(
        **small | {"intermediate_size": 512, "num_key_value_heads": 1},
        num_hidden_layers=6,
        lru_width=128,
        attention_window_size=WINDOW,
    )
    return _write(config, folder, seed)


def write_glm5_next(folder: Path, seed: int = 0) -> Path:
    """Write a GLM-5.3-Flash (Kimi delta attention, sparse latent attention): small.

    An index key stands for 4 tokens, as published, and a query reads 16 of them.  As
    published, it has a head that proposes drafts, which is random like the rest.
    """
    from transformers import Glm5NextConfig

    kinds = ["linear_attention", "indexed_attention"] * 3
    text = {
        **{name: value for name, value in SMALL.items() if name != "head_dim"},
        "num_key_value_heads": 4,
        "num_hidden_layers": len(kinds),
        "layer_types": kinds,
        "mlp_layer_types": ["dense"] * len(kinds),
        "indexer_types": ["full"] * len(kinds),
        "q_lora_rank": 48,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "index_topk": 64,
        "index_head_dim": 128,
        "index_n_heads": 4,
        "index_kpool": 4,
        "linear_head_dim": 32,
        "linear_num_heads": 4,
        "hc_mult": 2,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "tie_word_embeddings": False,
    }
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "num_heads": 2,
        "intermediate_size": 64,
        "out_hidden_size": 128,
        "projection_intermediate_size": 64,
    }
    config = Glm5NextConfig(text_config=text, vision_config=vision)
    published = {
        "mhc": True,
        "index_kpool_compress": True,
        "indexer_types": None,
        "first_k_dense_replace": len(kinds),
        "num_nextn_predict_layers": 1,
    }
    write_with_images(config, folder, seed, published)
    _rewrite(folder, lambda tensors: _add_glm5_next_head(tensors, len(kinds), text))
    return folder


def _add_glm5_next_head(tensors: Tensors, layer: int, text: dict[str, Any]) -> None:
    """Add the layer behind the last one: latent attention with experts."""
    layers, size = "model.language_model.layers", text["hidden_size"]
    for name, weight in list(tensors.items()):
        kept = name.removeprefix(f"{layers}.1.")
        if kept != name and not kept.startswith(("hc_", "mlp.")):
            tensors[f"{layers}.{layer}.{kept}"] = weight.clone()
    experts = {"gate.weight": (text["n_routed_experts"], size)}
    inner = text["moe_intermediate_size"]
    parts = [f"experts.{number}" for number in range(text["n_routed_experts"])]
    for part in (*parts, "shared_experts"):
        experts |= {f"{part}.{name}_proj.weight": (inner, size) for name in _GATED}
        experts[f"{part}.down_proj.weight"] = (size, inner)
    shapes = {f"mlp.{name}": shape for name, shape in experts.items()}
    shapes["eh_proj.weight"] = (size, 2 * size)
    for name, shape in shapes.items():
        tensors[f"{layers}.{layer}.{name}"] = weight = torch.empty(shape)
        _initialise(name, weight)
    for name in ("enorm.weight", "hnorm.weight", "shared_head.norm.weight"):
        tensors[f"{layers}.{layer}.{name}"] = torch.ones(size)
    correction = torch.zeros(text["n_routed_experts"])
    tensors[f"{layers}.{layer}.mlp.gate.e_score_correction_bias"] = correction


_GATED = ("gate", "up")


QWEN4_EXP: dict[str, Any] = {
    **SMALL,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "hc_count": 2,
    "hc_lowrank": 16,
    "ple_layer_ids": [1, 3],
    "ngram_size": 3,
    "heads_per_ngram": 2,
    "ngram_vocab_size_base": 500,
    "split_ngram_parts": 2,
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 32,
    "indexer_budget": 64,
    "indexer_compress_ratio": 4,
    "output_gate_type": "silu",
    "tie_word_embeddings": False,
}
"""Its text model, but for how it turns positions.  Releases of transformers disagree on
what its attention layers are called, and all take the published name."""


def write_qwen4_exp(folder: Path, seed: int = 0) -> Path:
    """Write a Qwen4-Exp (gated delta nets, sparse attention, n-gram embeddings): small.

    An index key stands for 4 tokens, as published, and a query reads 16 of them.
    """
    from transformers import Qwen4ExpConfig

    text = {
        **QWEN4_EXP,
        "rope_parameters": {
            **ROPE,
            "partial_rotary_factor": 0.5,
            "mrope_section": [4, 2, 2],
            "mrope_interleaved": True,
        },
    }
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "num_heads": 2,
        "intermediate_size": 64,
        "out_hidden_size": 128,
    }
    config = Qwen4ExpConfig(text_config=text, vision_config=vision)
    return write_with_images(config, folder, seed, {"full_attention_interval": 2})


def write_qwen4_exp_text(folder: Path, seed: int = 0) -> Path:
    """Write its text model alone, as wide as the kernels of a GPU want it.

    A query reads 512 index keys, as published: vLLM's kernels choose no fewer.  Every
    token goes to all experts, or rounding would send some elsewhere.  Residual streams
    that are mixed leave little to tell tokens by, so logits are four times as large.
    """
    from transformers import Qwen4ExpTextConfig

    wide = {
        "hidden_size": 256,
        "num_attention_heads": 16,
        "head_dim": 128,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "num_experts": 2,
        "hc_count": 4,
        "indexer_head_dim": 128,
        "indexer_budget": 2048,
        "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5},
    }
    _write(Qwen4ExpTextConfig(**QWEN4_EXP | wide), folder, seed)
    _rewrite(folder, lambda tensors: tensors["lm_head.weight"].mul_(4))
    return folder


def write_minimax(folder: Path, seed: int = 0) -> Path:
    """Write a MiniMax (lightning attention, attention, experts) of that size."""
    from transformers import MiniMaxConfig

    config = MiniMaxConfig(
        **SMALL | {"intermediate_size": 64},
        num_hidden_layers=4,
        layer_types=[
            "linear_attention" if number != 2 else "full_attention"
            for number in range(4)
        ],
        num_local_experts=4,
        block_size=64,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        linear_attn_alpha_factor=1.2,
        full_attn_beta_factor=0.8,
        mlp_alpha_factor=1.1,
    )
    return _write(config, folder, seed)


def write_minimax_text_01(folder: Path, seed: int = 0) -> Path:
    """Write the same as it is published; what transformers takes lies in it."""
    source = write_minimax(folder / CONVERTED, seed)
    found = json.loads((source / "config.json").read_text())
    kinds = found.pop("layer_types")
    for kind, name in (
        ("linear_attn", "linear_attention"),
        ("full_attn", "full_attention"),
        ("mlp", "mlp"),
    ):
        for factor in ("alpha", "beta"):
            value = found.pop(f"{kind}_{factor}_factor")
            found[f"layernorm_{name}_{factor}"] = value
    found |= {
        "architectures": ["MiniMaxText01ForCausalLM"],
        "model_type": "minimax_text_01",
        "attn_type_list": [int(kind == "full_attention") for kind in kinds],
        "postnorm": True,
        "rope_theta": found.pop("rope_parameters")["rope_theta"],
        "rotary_dim": found["head_dim"],
    }
    for file in source.iterdir():
        shutil.copy(file, folder)
    (folder / "config.json").write_text(json.dumps(found, indent=2))
    return folder


def write_minimax_m1(folder: Path, seed: int = 0) -> Path:
    """Write the same by its other name."""
    write_minimax_text_01(folder, seed)
    path = folder / "config.json"
    found = json.loads(path.read_text()) | {
        "architectures": ["MiniMaxM1ForCausalLM"],
        "model_type": "minimax_m1",
    }
    path.write_text(json.dumps(found, indent=2))
    return folder


def write_zamba(folder: Path, seed: int = 0) -> Path:
    """Write a Zamba (Mamba-1 of two heads, and a block that layers share)."""
    from transformers import ZambaConfig

    small = {"num_key_value_heads": 4, "intermediate_size": 128}
    config = ZambaConfig(
        **{name: value for name, value in SMALL.items() if name != "head_dim"} | small,
        num_hidden_layers=5,
        layers_block_type=["mamba", "hybrid", "mamba", "hybrid", "mamba"],
        n_mamba_heads=2,
        mamba_d_state=8,
        mamba_dt_rank=8,
    )
    return _write(config, folder, seed)


def write_zamba2(folder: Path, seed: int = 0) -> Path:
    """Write a Zamba2 (Mamba-2, and blocks that several layers share) of that size."""
    from transformers import Zamba2Config

    small = {"num_key_value_heads": 4, "intermediate_size": 128}
    config = Zamba2Config(
        **{name: value for name, value in SMALL.items() if name != "head_dim"} | small,
        num_hidden_layers=6,
        layers_block_type=["mamba", "hybrid", "mamba", "hybrid", "hybrid", "hybrid"],
        n_mamba_heads=4,
        mamba_ngroups=2,
        mamba_d_state=32,
        num_mem_blocks=2,
        adapter_rank=8,
        use_shared_attention_adapter=True,
        use_mem_rope=True,
        chunk_size=64,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    return _write(config, folder, seed)


def write_zaya(folder: Path, seed: int = 4) -> Path:
    """Write a Zaya (compressed convolutional attention, experts) of that size."""
    from transformers import ZayaConfig

    rope = {"rope_type": "default", "partial_rotary_factor": 0.5}
    config = ZayaConfig(
        **SMALL,
        num_hidden_layers=4,
        layer_types=["hybrid", "hybrid_sliding", "hybrid", "hybrid"],
        sliding_window=WINDOW,
        moe_intermediate_size=64,
        num_experts=4,
        router_hidden_size=32,
        tie_word_embeddings=False,
        cca_time0=2,
        cca_time1=2,
        rope_parameters={
            "hybrid": rope | {"rope_theta": 5e6},
            "hybrid_sliding": rope | {"rope_theta": 1e4},
        },
    )
    _write(config, folder, seed)

    def vary(tensors: Tensors) -> None:
        for name, tensor in tensors.items():
            if name.endswith(("_scale", "temp")):
                tensor.uniform_(0.7, 1.3)
            elif name.endswith(("states_bias", "residual_bias")):
                tensor.uniform_(-0.005, 0.005)
            elif name.endswith("balancing_biases"):
                tensor.uniform_(-1.05, -0.95)
                tensor[-1] = -1.0  # transformers sets it so, whatever a file has

    _rewrite(folder, vary)
    return folder


def write_gigachat35(folder: Path, seed: int = 0) -> Path:
    """Write a GigaChat 3.5 (gated delta nets, latent attention, experts)."""
    small = {name: value for name, value in SMALL.items() if name != "head_dim"}
    config = small | {
        "architectures": ["GigaChat35ForCausalLM"],
        "model_type": "gigachat3_5",
        "num_key_value_heads": 4,
        "num_hidden_layers": 4,
        "layer_types": [
            "linear_attention",
            "linear_attention",
            "full_attention",
            "linear_attention",
        ],
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "q_lora_rank": 48,
        # As published: vLLM's latent attention on a GPU takes no others.
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "rope_theta": 10000.0,
        "rope_interleave": True,
        "rope_scaling": {
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 256,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "max_position_embeddings": 1024,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "linear_sigmoid_gate_scale": 2.0,
        "linear_gating_type": "zero_centered",
        "output_gate_type": "sigmoid",
        "norm_type": "ZeroCenteredGatedNorm",
        "layernorm_type": "pre_post",
        "layernorm_gating_weight": 2.0,
        "gated_attention": True,
        "use_mla_scaling_factor": True,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "moe_intermediate_size": 64,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "tie_word_embeddings": False,
    }
    return _write_reference("gigachat35", config, folder, seed)


def write_plamo2(folder: Path, seed: int = 0) -> Path:
    """Write a PLaMo 2 (Mamba-2, attention over a window and over all tokens)."""
    small = {name: value for name, value in SMALL.items() if name != "head_dim"}
    config = small | {
        "architectures": ["Plamo2ForCausalLM"],
        "model_type": "plamo2",
        "num_hidden_layers": 5,
        "hidden_size_per_head": 32,
        "max_position_embeddings": 10 << 20,  # as published: too many for a table
        "attention_window_size": WINDOW,
        "sliding_window": WINDOW,
        "full_attention_idx": [3],
        "mamba_d_state": 32,
        "mamba_d_conv": 4,
        "mamba_num_heads": 4,
        "mamba_step": 2,
        "mamba_enabled": True,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    }
    return _write_reference("plamo2", config, folder, seed)


def write_phi4flash(folder: Path, seed: int = 0) -> Path:
    """Write a Phi-4-mini-flash (Mamba-1, windows, and layers that read others')."""
    small = {name: value for name, value in SMALL.items() if name != "head_dim"}
    config = small | {
        "architectures": ["Phi4FlashForCausalLM"],
        "model_type": "phi4flash",
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "sliding_window": WINDOW,
        "mb_per_layer": 2,
        "mamba_d_state": 8,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "hidden_act": "silu",
        "layer_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    }
    return _write_reference("phi4flash", config, folder, seed)


def write_jet_nemotron(folder: Path, seed: int = 0) -> Path:
    """Write a Jet-Nemotron (delta nets with taps of each token, windows, attention)."""
    small = {name: value for name, value in SMALL.items() if name != "head_dim"}
    config = small | {
        "architectures": ["JetNemotronForCausalLM"],
        "model_type": "jet_nemotron",
        "num_hidden_layers": 5,
        "layer_types": ["jet", "jet", "swa", "jet", "attn"],
        "efficient_attention_config": {
            "swa": {"window_size": WINDOW},
            "jet": {
                "mode": "chunk",
                "expand_v": 2.0,
                "num_heads": 4,
                "head_dim": 32,
                "norm_eps": "1e-5",
                "conv_size": 4,
                "dconv_generator_reduction": 8,
                "dconv_implementation": "triton",
            },
        },
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
    }
    return _write_reference("jet_nemotron", config, folder, seed)


def write_kimi_linear(folder: Path, seed: int = 0, **changed: Any) -> Path:
    """Write a Kimi Linear (Kimi delta attention, latent attention, experts)."""
    from transformers import KimiLinearConfig

    layers = 4
    published: dict[str, Any] = {
        "num_key_value_heads": 4,
        "num_hidden_layers": layers,
        "linear_attn_config": {
            "kda_layers": [1, 2, 4],
            "full_attn_layers": [3],
            "num_heads": 4,
            "head_dim": 32,
            "short_conv_kernel_size": 4,
        },
        "q_lora_rank": None,
        # As published: vLLM's latent attention on a GPU takes no others.
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "mla_use_nope": True,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "moe_intermediate_size": 64,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "num_experts": 4,
        "num_experts_per_token": 2,
        "num_shared_experts": 1,
        "num_expert_group": 1,
        "topk_group": 1,
        "use_grouped_topk": True,
        "routed_scaling_factor": 2.446,
        "tie_word_embeddings": False,
        **changed,
    }
    small = {name: value for name, value in SMALL.items() if name != "head_dim"}
    config = KimiLinearConfig(**small | published)
    # As published: numbers of layers, and no lists of kinds.
    return _write(config, folder, seed, layer_types=None, **published)


def _write_reference(
    name: str, config: dict[str, Any], folder: Path, seed: int
) -> Path:
    """Write a model that is in `tests.models.references`."""
    from safetensors.torch import save_file

    from tests.models import references

    torch.manual_seed(seed)
    model = references.build(name, config)
    for part, weight in model.named_parameters():
        _initialise(part, weight.data)
        if "norm" in part and weight.dim() == 1:
            weight.data.add_(torch.randn_like(weight), alpha=0.05)
        if part == "model.embed_tokens.weight" and config["tie_word_embeddings"]:
            # Small, or the last token decides the next one alone.
            weight.data.normal_(0, 0.02)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {part: x.contiguous() for part, x in model.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for file in TOKENIZER.glob("*token*"):
        shutil.copy(file, folder)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return folder


def write_with_images(
    config: PretrainedConfig, folder: Path, seed: int, published: dict[str, Any]
) -> Path:
    """Write a model that takes images, with its tower.

    Args:
        config: as transformers has it.
        folder: is made.
        seed: of the weights.
        published: what published configurations of its text model say besides; None
            for what they leave out.
    """
    from transformers import AutoModelForImageTextToText

    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(config).float()
    for name, weight in model.named_parameters():
        _initialise(name, weight.data)
    model.save_pretrained(folder)
    for file in TOKENIZER.glob("*token*"):
        shutil.copy(file, folder)
    path = folder / "config.json"
    found = json.loads(path.read_text())
    text = found["text_config"] | published
    found["text_config"] = {k: v for k, v in text.items() if v is not None}
    path.write_text(json.dumps(found, indent=2))
    return folder


def _write(config: PretrainedConfig, folder: Path, seed: int, **changes: Any) -> Path:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).float()  # type: ignore[no-untyped-call]
    for name, weight in model.named_parameters():
        _initialise(name, weight.data)
    if config.tie_word_embeddings:
        # Small, or the last token decides the next one alone.
        model.get_input_embeddings().weight.data.normal_(0, 0.02)
    model.save_pretrained(folder)
    for file in TOKENIZER.glob("*token*"):
        shutil.copy(file, folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes, indent=2))
    return folder


def _rewrite(folder: Path, change: Callable[[Tensors], None]) -> None:
    """Change the tensors of a checkpoint."""
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def sharpen_attention(folder: Path) -> Path:
    """Have attention layers of a checkpoint look at few tokens, whose KV then counts.

    Random ones look at all alike, and KV that is missing here and there changes little.
    Scores become six times as large, or three times where they are normed.
    """

    def sharpen(tensors: Tensors) -> None:
        normed = [name for name in tensors if name.endswith("q_norm.weight")]
        for name in normed:
            tensors[name] += 2  # to ones, or to zeros to which one is added
        for name in tensors.keys() if not normed else ():
            if name.endswith("q_proj.weight"):
                tensors[name] *= 6

    _rewrite(folder, sharpen)
    return folder


def _cut_convolutions(tensors: Tensors, sizes: list[int]) -> None:
    """As published checkpoints have them; transformers writes three equal parts."""
    names = [f".{part}_conv1d." for part in "qkv"]
    for name in [name for name in tensors if names[0] in name]:
        parts = [name.replace(names[0], other) for other in names]
        whole = torch.cat([tensors[part] for part in parts])
        pieces = torch.split(whole, sizes)
        tensors.update(
            (part, piece.contiguous())
            for part, piece in zip(parts, pieces, strict=True)
        )


def _initialise(name: str, weight: torch.Tensor) -> None:
    if name.endswith("forget_gate.A_log"):
        weight.uniform_(0.0, 0.3)
    elif name.endswith("A_log"):
        weight.uniform_(-1.0, 0.5)
    elif name.endswith("forget_gate.dt_bias"):  # 5 sigmoid: steps of 0.001 to 0.05
        weight.uniform_(-8.0, -5.0)
    elif name.endswith("dt_bias"):  # softplus: steps of 0.002 to 0.05
        weight.uniform_(-6.0, -3.0)
    elif name.endswith(".D"):
        weight.fill_(0.2)
    elif name.endswith(("dt_proj.bias", "dt_proj_bias")):
        weight.uniform_(-6.0, -3.0)
    elif name.endswith("igate_preact.bias"):
        weight.uniform_(-1.0, 1.0)
    elif name.endswith("fgate_preact.bias"):  # sigmoid: decays of 0.98 to 0.998
        weight.uniform_(4.0, 6.0)
    elif name.endswith("recurrent_param"):  # decays of 0.97 to 0.999
        weight.uniform_(-8.0, -5.0)
    elif name.endswith(("q_weight", "k_weight")):  # of norms
        weight.normal_(1, 0.05)
    elif weight.dim() > 1:
        weight.normal_(0, weight.shape[-1] ** -0.5)
