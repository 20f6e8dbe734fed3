# SPDX-License-Identifier: Apache-2.0
"""What the matrix says of an engine version that is installed."""

from __future__ import annotations

from collections.abc import Sequence

from hybrid_plugin.upstream.hookpoints import version_number
from hybrid_plugin.upstream.matrix import Row, Status, load

_SAYINGS = {
    Status.SERVED: "in the compatibility matrix: served",
    Status.CONTRACTS: "in the compatibility matrix: hook points checked, not run",
    Status.REFUSED: "in the compatibility matrix: refused",
}


def release(version: str) -> str:
    """A version without what comes after `+`: the build."""
    return version.partition("+")[0]


def row_of(
    rows: Sequence[Row], engine: str, version: str, distribution: str = ""
) -> Row | None:
    """The version's row: of this distribution, or else of another build."""
    same = [r for r in rows if (r.engine, r.version) == (engine, release(version))]
    same.sort(key=lambda row: row.distribution != distribution)
    return same[0] if same else None


def standing(
    rows: Sequence[Row], engine: str, version: str, distribution: str = ""
) -> str:
    """What the matrix says of the version, a phrase."""
    row = row_of(rows, engine, version, distribution)
    if row is not None:
        return _SAYINGS[row.status]
    known = [version_number(row.version) for row in rows if row.engine == engine]
    if version_number(version) > max(known):
        return "newer than the compatibility matrix"
    return "not in the compatibility matrix"


def untested(engine: str, version: str) -> str | None:
    """A phrase where no test of ours has run on the version; None where one has."""
    rows = load()
    row = row_of(rows, engine, version)
    if row is not None and row.status is Status.SERVED:
        return None
    return (
        f"{standing(rows, engine, version)}: all hook points hold, but no test has "
        "run on it"
    )
