# SPDX-License-Identifier: Apache-2.0
"""Random checkpoints whose states remember, for what the bundled model is not.

Usual random initialisation forgets a token within a few others, and any cache
passes with it.  Here the decay per token is drawn near one, so that what stood
hundreds of tokens back still moves the logits.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

TOKENIZER = Path(__file__).parents[1] / "assets" / "tiny-qwen3-next"


def write_nemotron_h(folder: Path, seed: int = 0) -> Path:
    """Write a Nemotron-H (Mamba-2, attention, MLP) of about a million weights."""
    from transformers import AutoModelForCausalLM, NemotronHConfig

    torch.manual_seed(seed)
    config = NemotronHConfig(
        vocab_size=264,
        hidden_size=128,
        intermediate_size=256,
        hybrid_override_pattern="M-M*-M-M*-",
        num_hidden_layers=10,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        ssm_state_size=64,
        mamba_num_heads=4,
        mamba_head_dim=64,
        n_groups=2,
        conv_kernel=4,
        expand=2,
        chunk_size=64,
        dtype="float32",
        bos_token_id=None,
        eos_token_id=258,
        pad_token_id=256,
    )
    model = AutoModelForCausalLM.from_config(config).float()
    for name, weight in model.named_parameters():
        _initialise(name, weight.data)
    model.save_pretrained(folder)
    for file in TOKENIZER.glob("*token*"):
        shutil.copy(file, folder)
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
