# SPDX-License-Identifier: Apache-2.0
"""Small replicas of the shapes: KV and states in the real one's proportion.

SGLang allocates what it schedules, so a replica has fewer layers and heads.  The bytes
of a token and of a sequence's states are the same fraction of the real one's, and so is
the memory that a task gets: `scale`.  What decides where states are taken (the
architecture and its chunk) is as it is in the real model.
"""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

from benchmarks.prefix_models import COMMON, MODELS

_SMALL = {"hidden_size": 64, "intermediate_size": 64}
REPLICAS: dict[str, tuple[Fraction, dict[str, Any]]] = {
    # One of 12 attention layers with three state layers, each a sixteenth.
    "qwen3-next": (
        Fraction(1, 12 * 16),
        {
            "num_hidden_layers": 4,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "linear_num_value_heads": 2,
            "linear_num_key_heads": 1,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
        },
    ),
    # One of 4 attention layers with six state layers, each an eighth.
    "nemotron-h-8b": (
        Fraction(1, 4 * 8),
        {
            "num_hidden_layers": 7,
            "hybrid_override_pattern": "MMM*MMM",
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "mamba_num_heads": 16,
            "mamba_n_groups": 1,
            "n_groups": 1,
            "expand": 16,
        },
    ),
    # One of 44 layers.
    "falcon-h1-7b": (
        Fraction(1, 44),
        {"num_hidden_layers": 1, "num_attention_heads": 2, "mamba_expand": 48},
    ),
}
"""By shape: the fraction, and what differs in its configuration."""


def scale(shape: str) -> Fraction:
    """A replica's bytes over the real one's."""
    return REPLICAS[shape][0]


def write_replica(shape: str, folder: Path, longest: int) -> None:
    """Write its configuration, for so many positions, into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    config = COMMON | MODELS[shape] | _SMALL | REPLICAS[shape][1]
    config["max_position_embeddings"] = longest
    (folder / "config.json").write_text(json.dumps(config, indent=1))
