# SPDX-License-Identifier: Apache-2.0
"""Random drafters for the bundled model, and a LoRA adapter for another one.

What a random head proposes is hardly ever accepted.  It shows that the engine loads the
head beside the plugin's pools and that rejected drafts leave no trace; the trained MTP
head and the oracle show the rest.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.engines.drivers.driver import MODEL

RANK = 4
"""Of the adapter, and of a head that corrects drafts."""
BLOCK = 4
"""Tokens that are proposed at once, the known one counted where DFLASH counts it."""
SHARP = 2.0
"""Scale of queries and keys."""


def write_eagle(folder: Path) -> Path:
    """Write an EAGLE head: a decoder layer on hidden states and the next embedding."""
    config = _llama("LlamaForCausalLM")
    weights = _layer(config, "layers.0.", config["hidden_size"])
    del weights["layers.0.input_layernorm.weight"]  # its first layer has none
    weights["fc.weight"] = _random(config["hidden_size"], 2 * config["hidden_size"])
    return _write(folder, config, weights)


def write_eagle3(folder: Path) -> Path:
    """Write an EAGLE-3 head: the same on three layers' hidden states, with a norm."""
    config = _llama("LlamaForCausalLMEagle3")
    size = config["hidden_size"]
    config["draft_vocab_size"] = config["vocab_size"]
    weights = _layer(config, "midlayer.", 2 * size)
    weights |= {
        "midlayer.hidden_norm.weight": torch.ones(size),
        "norm.weight": torch.ones(size),
        "fc.weight": _random(size, 3 * size),
        "lm_head.weight": _random(config["vocab_size"], size),
    }
    return _write(folder, config, weights)


def write_block_drafter(folder: Path, model: Path, layers: Sequence[int]) -> Path:
    """Write a model that proposes a block of drafts at once, for DFLASH and DSPARK.

    Its attention is sharp, and what it reads are hidden states of the target alone, so
    that what it proposes tells other KV apart.

    Args:
        folder: to write it to.
        model: its target.
        layers: of the target, whose outputs it reads.
    """
    torch.manual_seed(5)
    target = json.loads((model / "config.json").read_text())
    size, tokens, count = target["hidden_size"], target["vocab_size"], 2
    config: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": size,
        "intermediate_size": 2 * size,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_hidden_layers": count,
        "vocab_size": tokens,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "dtype": "float32",
        "block_size": BLOCK,
        "dflash_config": {"mask_token_id": 257, "target_layer_ids": list(layers)},
        "markov_rank": RANK,
        "markov_head_type": "vanilla",
        "enable_confidence_head": False,
    }
    weights = {
        "fc.weight": torch.randn(size, len(layers) * size) * size**-0.5,
        "hidden_norm.weight": torch.ones(size),
        "norm.weight": torch.ones(size),
    }
    for number in range(count):
        prefix = f"layers.{number}."
        for name, weight in _layer(config, prefix, size).items():
            weights[name] = weight
            if weight.dim() == 2:
                weights[name] = torch.randn(weight.shape) * weight.shape[1] ** -0.5
        for name in ("q_norm", "k_norm"):
            weights[f"{prefix}self_attn.{name}.weight"] = torch.full((32,), SHARP)
    return _write(folder, config, weights, torch.float32)


def write_spark_drafter(folder: Path, model: Path, layers: Sequence[int]) -> Path:
    """Write the same with a head that corrects each draft by the one before it."""
    written = write_block_drafter(folder, model, layers)
    config = json.loads((written / "config.json").read_text())
    config["architectures"] = ["Qwen3DSparkModel"]
    weights = load_file(written / "model.safetensors")
    for name in ("w1", "w2"):
        shape = config["vocab_size"], RANK
        weights[f"markov_head.markov_{name}.weight"] = torch.randn(shape)
    shutil.rmtree(written)
    return _write(folder, config, weights, torch.float32)


def write_draft_model(folder: Path) -> Path:
    """Write a small Llama with the bundled model's tokens."""
    config = _llama("LlamaForCausalLM")
    size, tokens = config["hidden_size"], config["vocab_size"]
    weights = _layer(config, "model.layers.0.", size)
    weights |= {
        "model.embed_tokens.weight": _random(tokens, size),
        "model.norm.weight": torch.ones(size),
        "lm_head.weight": _random(tokens, size),
    }
    return _write(folder, config, weights)


def write_adapter(
    folder: Path,
    model: Path,
    merged: Path,
    seed: int = 1,
    names: Sequence[str] = ("q_proj", "o_proj", "out_proj"),
) -> Path:
    """Write a LoRA adapter of attention and state layers.

    Args:
        folder: to write it to.
        model: a checkpoint in one file.
        merged: to write the model to whose weights have it.
        seed: of its weights.
        names: of the linear layers.
    """
    torch.manual_seed(seed)
    weights, adapter = load_file(model / "model.safetensors"), {}
    for name, weight in list(weights.items()):
        if not name.endswith(tuple(f".{one}.weight" for one in names)):
            continue
        down = 0.3 * torch.randn(RANK, weight.shape[1])
        up = 0.3 * torch.randn(weight.shape[0], RANK)
        weights[name] = (weight.float() + up @ down).to(weight.dtype)
        path = f"base_model.model.{name.removesuffix('.weight')}"
        adapter[f"{path}.lora_A.weight"] = down
        adapter[f"{path}.lora_B.weight"] = up
    assert adapter, f"{model} has no layer to adapt"
    shutil.copytree(model, merged)
    save_file(weights, merged / "model.safetensors", {"format": "pt"})
    folder.mkdir(parents=True)
    save_file(adapter, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "bias": "none"}
    config |= {"target_modules": list(names), "task_type": "CAUSAL_LM"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def _llama(architecture: str) -> dict[str, Any]:
    """A Llama of one layer, of the bundled model's sizes."""
    model = json.loads((MODEL / "config.json").read_text())
    same = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "hidden_act",
        "rms_norm_eps",
        "max_position_embeddings",
        "eos_token_id",
        "pad_token_id",
        "dtype",
    )
    return {
        **{name: model[name] for name in same},
        "architectures": [architecture],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "rope_theta": 10000.0,
        "bos_token_id": None,
        "tie_word_embeddings": False,
    }


def _layer(
    config: Mapping[str, Any], prefix: str, inputs: int
) -> dict[str, torch.Tensor]:
    size, inner = config["hidden_size"], config["intermediate_size"]
    query = config["num_attention_heads"] * config["head_dim"]
    key = config["num_key_value_heads"] * config["head_dim"]
    shapes = {
        "self_attn.q_proj": (query, inputs),
        "self_attn.k_proj": (key, inputs),
        "self_attn.v_proj": (key, inputs),
        "self_attn.o_proj": (size, query),
        "mlp.gate_proj": (inner, size),
        "mlp.up_proj": (inner, size),
        "mlp.down_proj": (size, inner),
    }
    weights = {f"{prefix}{n}.weight": _random(*shape) for n, shape in shapes.items()}
    for name in ("input_layernorm", "post_attention_layernorm"):
        weights[f"{prefix}{name}.weight"] = torch.ones(size)
    return weights


def _random(*shape: int) -> torch.Tensor:
    return 0.02 * torch.randn(*shape)


def _write(
    folder: Path,
    config: Mapping[str, Any],
    weights: Mapping[str, torch.Tensor],
    dtype: torch.dtype = torch.bfloat16,
) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    typed = {name: weight.to(dtype) for name, weight in weights.items()}
    save_file(typed, folder / "model.safetensors", {"format": "pt"})
    return folder
