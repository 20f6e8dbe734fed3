# SPDX-License-Identifier: Apache-2.0
"""Random checkpoints whose states remember, for what the bundled model is not.

Usual random initialisation forgets a token within a few others, and any cache
passes with it.  Here the decay per token is drawn near one, so that what stood
hundreds of tokens back still moves the logits.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PretrainedConfig

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


WINDOW = 64
"""Tokens that layers with a window, or with chunks, look back at most."""


def write_nemotron_h(
    folder: Path, seed: int = 0, sliding_window: int | None = None
) -> Path:
    """Write a Nemotron-H (Mamba-2, attention, MLP) of about a million weights."""
    from transformers import NemotronHConfig

    pattern = "M-M*-M-M*-"
    layers: dict[str, Any] = {
        "hybrid_override_pattern": pattern,
        "num_hidden_layers": len(pattern),
    }
    config = NemotronHConfig(
        **SMALL,
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


def _write(config: PretrainedConfig, folder: Path, seed: int, **changes: Any) -> Path:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).float()  # type: ignore[no-untyped-call]
    for name, weight in model.named_parameters():
        _initialise(name, weight.data)
    model.save_pretrained(folder)
    for file in TOKENIZER.glob("*token*"):
        shutil.copy(file, folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes, indent=2))
    return folder


def _initialise(name: str, weight: torch.Tensor) -> None:
    if name.endswith("A_log"):
        weight.uniform_(-1.0, 0.5)
    elif name.endswith("dt_bias"):  # softplus: steps of 0.002 to 0.05
        weight.uniform_(-6.0, -3.0)
    elif name.endswith(".D"):
        weight.fill_(0.2)
    elif weight.dim() > 1:
        weight.normal_(0, weight.shape[-1] ** -0.5)
