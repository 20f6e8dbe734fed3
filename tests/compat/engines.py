# SPDX-License-Identifier: Apache-2.0
"""Engine sources that are at hand: installed, or kept by ci/run_matrix.py."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import matrix_sources

from hybrid_plugin.upstream.hookpoints import SourceView
from hybrid_plugin.upstream.matrix import Row, Status, load

KEPT = Path(__file__).parents[2] / "build" / "matrix"


@cache
def source_of(row: Row) -> Path | None:
    """The folder with the row's engine, None if it is not at hand."""
    try:
        return matrix_sources.find(row, KEPT, offline=True)
    except matrix_sources.SourceError:
        return None


def rows_at_hand() -> list[Row]:
    """Supported rows whose source can be looked at, newest first for each engine."""
    rows = (row for row in load() if row.status is not Status.REFUSED)
    return [row for row in rows if source_of(row) is not None]


def view_of(row: Row) -> SourceView:
    """The row's source, to be looked at."""
    root = source_of(row)
    assert root is not None
    return SourceView(root, row.engine, row.version)
