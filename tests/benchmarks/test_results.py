# SPDX-License-Identifier: Apache-2.0
"""The list of results names what is there, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
SUFFIXES = (".md", ".json", ".costs.json")


def _stored() -> set[str]:
    """Names without the ends that one result's files have."""
    names = {path.name for path in RESULTS.iterdir() if path.name != "README.md"}
    for suffix in reversed(SUFFIXES):
        names = {name.removesuffix(suffix) for name in names}
    return names


def _listed() -> list[str]:
    """Names in the first cells of the tables."""
    rows = (RESULTS / "README.md").read_text().splitlines()
    cells = [row.split("|")[1] for row in rows if row.startswith("| `")]
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


def test_every_result_is_listed_once() -> None:
    listed = _listed()
    assert sorted(listed) == sorted(_stored())
