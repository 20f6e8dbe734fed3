# SPDX-License-Identifier: Apache-2.0
"""docs/features.md, out of ci/features.toml.

python -m ci.features --write
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "ci" / "features.toml"
PAGE = ROOT / "docs" / "features.md"
ENGINES = {"vllm": "vLLM", "sglang": "SGLang"}

_HEAD = """\
# Features

What an engine is started with, beside the plugin.  `python -m ci.features --write`
makes this page out of `ci/features.toml`.  Tests check that every test named here
exists, and that every refusal is said: by an engine that is configured so, or in a test
that the file names.

* **tested**: served on a real engine by that test.
* **refused**: with that sentence ([limits](limits.md) says what that means).
* **the engine**: what the engine itself makes of it.
* **not tested**: taken, and no test serves it on an engine.

| feature | vLLM | SGLang |
|---|---|---|
"""


@dataclass(frozen=True, slots=True)
class Standing:
    """What becomes of one feature in one engine; one of the first four is set."""

    tested: tuple[str, ...] = ()
    """Tests on a real engine, as `path::function`."""
    refused: str = ""
    engine: str = ""
    untested: str = ""
    flags: tuple[str, ...] = ()
    """With which an engine refuses it."""
    by: str = ""
    """Where no flags do, the test that has the plugin refuse it."""

    def __post_init__(self) -> None:
        """Check it.

        Raises:
            ValueError: for several standings, or none, or a refusal nobody checks.
        """
        given = (self.tested, self.refused, self.engine, self.untested)
        if sum(map(bool, given)) != 1:
            raise ValueError(f"not one standing: {self}")
        if bool(self.refused) != (bool(self.flags) != bool(self.by)):
            raise ValueError(f"flags, or a test, are for refusals: {self}")

    @property
    def cell(self) -> str:
        """Of the table."""
        if self.tested:
            names = (f"`{test.split('::')[0]}`" for test in self.tested)
            return "tested: " + ", ".join(names)
        if self.refused:
            return f"refused: {self.refused}"
        if self.engine:
            return f"the engine: {self.engine}"
        return f"not tested: {self.untested}"


@dataclass(frozen=True, slots=True)
class Feature:
    """One row."""

    name: str
    standings: dict[str, Standing]
    """By engine."""


def features(source: Path = SOURCE) -> list[Feature]:
    """All rows, in the order of the file."""
    rows: list[dict[str, Any]] = tomllib.loads(source.read_text())["feature"]
    return [
        Feature(row["name"], {engine: _standing(row[engine]) for engine in ENGINES})
        for row in rows
    ]


def _standing(given: dict[str, Any]) -> Standing:
    lists = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in given.items()
    }
    return Standing(**lists)


def refusals(engine: str) -> Iterator[tuple[str, Standing]]:
    """Names of features that flags of an engine ask for, and their refusals."""
    for feature in features():
        standing = feature.standings[engine]
        if standing.flags:
            yield feature.name, standing


def page(rows: Sequence[Feature]) -> str:
    """The whole page."""
    lines = (
        f"| {row.name} | " + " | ".join(row.standings[e].cell for e in ENGINES) + " |\n"
        for row in rows
    )
    return _HEAD + "".join(lines)


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit(__doc__)
    PAGE.write_text(page(features()))
