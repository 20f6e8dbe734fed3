# SPDX-License-Identifier: Apache-2.0
"""Models that draft for themselves: published shapes with a layer of MTP, a small one.

Weights are dummies, so acceptance is forced by the engines' own switches; the bundled
model has a trained head, whose drafts are accepted or not for what they are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.prefix_models import MODELS, write_model
from benchmarks.prefix_workloads import VOCABULARY

BUNDLED = "bundled"
_BUNDLED_FOLDER = Path(__file__).parents[2] / "tests" / "assets" / "tiny-qwen3-next"

MTP: Mapping[str, Mapping[str, Any]] = {
    "qwen3.5-4b": {"mtp_num_hidden_layers": 1},
    # Published Nemotron-H heads have attention and experts; this model has no experts.
    "nemotron-h-8b": {
        "num_nextn_predict_layers": 1,
        "mtp_hybrid_override_pattern": "*",
    },
    "qwen3-next": {"num_nextn_predict_layers": 1},
    "tiny": {"num_nextn_predict_layers": 1},
}
"""What configurations say of their layer of multi-token prediction, one each."""
NAMES = (*MTP, BUNDLED)


def folder(name: str, scratch: Path) -> Path:
    """Where a model lies; always the same: compile caches are keyed on it.

    Args:
        name: of the model; the bundled one lies in the repository.
        scratch: the folder that others are written into.
    """
    return _BUNDLED_FOLDER if name == BUNDLED else scratch / f"drafts-{name}"


def write(name: str, scratch: Path) -> None:
    """Write a model's configuration, unless it is the bundled one's."""
    if name == BUNDLED:
        return
    where = folder(name, scratch)
    write_model(name, where)
    path = where / "config.json"
    config = json.loads(path.read_text()) | dict(MTP[name])
    path.write_text(json.dumps(config, indent=1))


def shape(name: str) -> Mapping[str, Any]:
    """The layers' sizes, for the record."""
    if name == BUNDLED:
        found: dict[str, Any] = json.loads(
            (_BUNDLED_FOLDER / "config.json").read_text()
        )
        return found
    return {**MODELS[name], **MTP[name]}


def vocabulary(name: str) -> int:
    """Tokens that a model knows."""
    return int(shape(name).get("vocab_size", VOCABULARY))


def bytes_of(folder: Path, state_dtype: str) -> tuple[int, int]:
    """Of one sequence's states, and of a token's keys and values.

    Args:
        folder: where its configuration lies.
        state_dtype: of recurrent states.

    Returns:
        Both in bytes; the second with the layer that drafts.
    """
    # Processes of stock engines read this module too.
    from hybrid_plugin.tools.plan.model import load_shape

    found = load_shape(folder, state_dtype=state_dtype)
    layers = sum(group.count for group in found.attention)
    return found.state_bytes, found.token_bytes * (layers + 1) // layers
