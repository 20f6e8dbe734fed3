# SPDX-License-Identifier: Apache-2.0
"""Models as `vllm serve` takes them: with a tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.prefix_models import MODELS, write_model
from benchmarks.prefix_workloads import VOCABULARY
from benchmarks.vllm_prefix import SCRATCH

BUNDLED = "bundled"
"""A small trained model in the repository: its answers mean something."""
NAMES = (*MODELS, BUNDLED)
_BUNDLED_FOLDER = Path(__file__).parents[2] / "tests" / "assets" / "tiny-qwen3-next"


def folder(name: str) -> Path:
    """Where a model lies; always the same: compile caches are keyed on it."""
    return _BUNDLED_FOLDER if name == BUNDLED else SCRATCH / f"served-{name}"


def has_weights(name: str) -> bool:
    """Whether answers mean something: other models have dummy weights."""
    return name == BUNDLED


def shape(name: str) -> Any:
    """The layers' sizes, for the record."""
    if name == BUNDLED:
        return json.loads((_BUNDLED_FOLDER / "config.json").read_text())
    return MODELS[name]


def write(name: str) -> None:
    """Write a model's configuration and a tokenizer, unless it is the bundled one."""
    if name == BUNDLED:
        return
    where = folder(name)
    write_model(name, where)
    words = {f"t{token} ": token for token in range(VOCABULARY)}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "t0 "},
    }
    (where / "tokenizer.json").write_text(json.dumps(tokenizer))
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "t1 ",
        "eos_token": "t2 ",
    }
    (where / "tokenizer_config.json").write_text(json.dumps(about))
