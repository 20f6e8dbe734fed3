# SPDX-License-Identifier: Apache-2.0
"""A hub's cache on disk, with configurations only: these tests load no weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TOKENIZER = Path(__file__).parents[2] / "tests" / "assets" / "tiny-qwen3-next"
_REVISION = "0" * 40


def write(folder: Path, models: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Lay models out; returns the variables that make the hub's client use them."""
    for name, config in models.items():
        cache = folder / f"models--{name.replace('/', '--')}"
        snapshot = cache / "snapshots" / _REVISION
        snapshot.mkdir(parents=True)
        (cache / "refs").mkdir()
        (cache / "refs" / "main").write_text(_REVISION)
        (snapshot / "config.json").write_text(json.dumps(config))
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(TOKENIZER / file, snapshot)
    return {"HF_HUB_CACHE": str(folder), "HF_HUB_OFFLINE": "1"}
