# SPDX-License-Identifier: Apache-2.0
"""The rows of `matrix.toml`."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from hybrid_plugin.upstream.hookpoints import version_number

MATRIX = Path(__file__).with_name("matrix.toml")


class MatrixError(ValueError):
    """A row that says too little, too much or nonsense."""


class Status(StrEnum):
    """What can be said of an engine version."""

    SERVED = "served"
    """Engine tests pass there."""
    CONTRACTS = "contracts"
    """Every hook point holds; no engine was run."""
    REFUSED = "refused"
    """Hook points are missing, and the plugin refuses."""


@dataclass(frozen=True, slots=True)
class Install:
    """How the environment of a row is made."""

    script: str
    """Relative to the repository; takes the folder, then extras of this package."""
    variables: Mapping[str, str] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class Row:
    """One version of an engine, on one platform."""

    engine: str
    """`vllm` or `sglang`: also the name of its package."""
    version: str
    distribution: str
    """What the package is called on PyPI."""
    platform: str
    """`cpu` or `cuda`."""
    python: str
    torch: str
    status: Status
    tested: str = ""
    """Where its engine tests run: `ci`, `gpu`, or nowhere."""
    tests: tuple[str, ...] = ()
    install: Install | None = None
    note: str = ""

    @property
    def name(self) -> str:
        """`distribution-version`."""
        return f"{self.distribution}-{self.version}"


def load(file: Path = MATRIX) -> tuple[Row, ...]:
    """Read the rows, newest first for each engine.

    Raises:
        MatrixError: naming the row that is wrong.
    """
    rows = tuple(_row(entry) for entry in tomllib.loads(file.read_text())["row"])
    names = [row.name for row in rows]
    for name in names:
        if names.count(name) > 1:
            raise MatrixError(f"{name} is there twice.")
    return rows


def newest(rows: Iterable[Row], engine: str) -> Row:
    """The newest served row of an engine.

    Raises:
        MatrixError: if there is none.
    """
    served = [r for r in rows if r.engine == engine and r.status is Status.SERVED]
    if not served:
        raise MatrixError(f"No version of {engine} is served.")
    return max(served, key=lambda row: version_number(row.version))


def _row(entry: Mapping[str, Any]) -> Row:
    values = dict(entry)
    name = f"{values.get('distribution')}-{values.get('version')}"
    try:
        values["status"] = Status(values.pop("status"))
        values["tests"] = tuple(values.pop("tests", ()))
        if "install" in values:
            values["install"] = Install(**values["install"])
        row = Row(**values)
    except (KeyError, TypeError, ValueError) as error:
        raise MatrixError(f"The row {name} is wrong: {error}.") from error
    if (row.status is Status.SERVED) != bool(row.tests and row.tested):
        raise MatrixError(
            f"The row {name} is wrong: `served` needs `tests` and `tested`, and "
            "nothing else has them."
        )
    if (row.tested == "ci") != (row.install is not None):
        raise MatrixError(
            f"The row {name} is wrong: what is tested in CI needs `install`, and "
            "nothing else has it."
        )
    return row
