# SPDX-License-Identifier: Apache-2.0
"""docs/messages.md and docs/monitoring.md quote what the code says."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from hybrid_plugin.engine.metrics import (
    _AVERAGES,
    _BY_REASON,
    _COUNTS,
    _POOLS,
    _TOTALS,
)

ROOT = Path(__file__).parents[1]
GAP = "\0"


def _said(tree: ast.AST) -> Iterator[str]:
    """Every string in the source, with gaps where values are put in."""
    inner: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            inner |= {id(part) for part in ast.walk(node)} - {id(node)}
            parts = (
                part.value if isinstance(part, ast.Constant) else GAP
                for part in node.values
            )
            yield "".join(map(str, parts))
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in inner
        ):
            yield re.sub(r"\{\w*\}|%[sd]", GAP, node.value)


@pytest.fixture(scope="module")
def sentences() -> list[str]:
    folders = ("hybrid_plugin", "model_registry")
    files = (file for name in folders for file in (ROOT / name).rglob("*.py"))
    return [text for file in files for text in _said(ast.parse(file.read_text()))]


def _quoted() -> list[str]:
    text = (ROOT / "docs" / "messages.md").read_text()
    section = text.partition("## Messages")[2].partition("\n## ")[0]
    rows = [r.split("|")[1] for r in section.splitlines() if r.startswith("| `")]
    return [quote for row in rows for quote in re.findall(r"`([^`]+)`", row)]


@pytest.mark.parametrize("quote", _quoted())
def test_message_is_what_the_code_says(quote: str, sentences: list[str]) -> None:
    fragments = [f.strip(" :") for f in re.split(r"\.\.\.|HYBRID_PLUGIN|,", quote)]
    fragments = [f for f in fragments if f]
    assert any(len(f) > 6 for f in fragments)
    assert any(all(f in text for f in fragments) for text in sentences), fragments


def test_dashboard_shows_every_metric() -> None:
    text = (ROOT / "docs" / "grafana.json").read_text()
    used = set(re.findall(r"hybrid_cache_\w+", text))
    known = {f"hybrid_cache_{name}_total" for name in (*_TOTALS, *_BY_REASON)}
    known |= {f"hybrid_cache_{name}" for name in (*_POOLS, *_AVERAGES, *_COUNTS)}
    known.add("hybrid_cache_mapped_bytes")
    assert used == known


def test_dashboard_is_explained() -> None:
    board = json.loads((ROOT / "docs" / "grafana.json").read_text())
    titles = [p["title"] for p in board["panels"] if p["type"] != "row"]
    text = (ROOT / "docs" / "monitoring.md").read_text()
    section = text.partition("## Monitoring")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if "|" in line][2:]
    explained = [name.strip() for row in rows for name in row.split(",")]
    assert sorted(explained) == sorted(titles)
