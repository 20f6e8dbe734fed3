# SPDX-License-Identifier: Apache-2.0
"""The standing of every architecture in the engines that are installed."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hybrid_plugin.engine.architectures import Provider, Standing
from hybrid_plugin.tools.doctor import installed
from hybrid_plugin.upstream.contracts import ENGINES, TITLES

Table = Mapping[str, Sequence[Standing]]
"""By the engine's name, or the column of the page."""


def of_installed_engines(engine: str | None = None) -> Table:
    """Look at the engines that are here.

    Args:
        engine: the only one to look at; None for all.
    """
    wanted = ENGINES if engine is None else (engine,)
    return {
        name: _standings(name)
        for name in wanted
        if installed.find_engine(name) is not None
    }


def of_release(root: Path) -> Sequence[Standing]:
    """Look at the source of a vLLM that is not installed.

    Args:
        root: the folder that holds its package.
    """
    from hybrid_plugin.vllm import architectures
    from hybrid_plugin.vllm.model_sources import ModelSources

    catalogue: Any = importlib.import_module("hybrid_models.catalogue")
    sources = ModelSources(root / "vllm")
    ours = [name for name in catalogue.BY_NAME if name not in sources.names]
    return architectures.standings(ours, sources)


def _standings(engine: str) -> Sequence[Standing]:
    adapter: Any = importlib.import_module(f"hybrid_plugin.{engine}.architectures")
    models: Any = importlib.import_module(f"hybrid_models.{engine}.registration")
    models.register_missing()
    ours = [entry.name for entry in models.chosen()]
    found: Sequence[Standing] = adapter.standings(ours)
    return found


def words(standing: Standing, engine: str) -> str:
    """Of one architecture in an engine, as a cell of a table."""
    whose = {
        Provider.ENGINE: f"{TITLES[engine]}'s class",
        Provider.OURS: "our class",
        Provider.NOBODY: "no class",
    }[standing.provider]
    reason = f": {standing.reason}" if standing.reason else ""
    note = f" {standing.note}" if standing.note else ""
    return f"{whose}, {standing.prospect.value}{note}{reason}"


def as_text(table: Table) -> str:
    """For a terminal."""
    return "\n\n".join("\n".join(_lines(name, found)) for name, found in table.items())


def _lines(engine: str, found: Sequence[Standing]) -> Iterator[str]:
    yield f"{TITLES[engine]} {installed.version_of(engine) or ''}".rstrip()
    width = max(len(standing.architecture) for standing in found)
    for standing in found:
        yield f"  {standing.architecture:{width}}  {words(standing, engine)}"


def as_json(table: Table) -> dict[str, list[dict[str, str]]]:
    """The same for programs."""
    return {
        engine: [
            {
                "architecture": standing.architecture,
                "class": standing.provider.value,
                "prefix_cache": standing.prospect.value,
                "reason": standing.reason,
                "note": standing.note,
            }
            for standing in found
        ]
        for engine, found in table.items()
    }
