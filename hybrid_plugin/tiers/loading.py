# SPDX-License-Identifier: Apache-2.0
"""Fills the memory of this process from a file, and converts where rows differ."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import numpy as np

from hybrid_plugin.core.commands import PoolId
from hybrid_plugin.core.tree.tokens import Tokens
from hybrid_plugin.tiers.bundle import Destination, Layouts, Row
from hybrid_plugin.tiers.bundle_file import BundleReader, Rows
from hybrid_plugin.tiers.convert import Conversion, conversion
from hybrid_plugin.tiers.failure import Failure, Reason
from hybrid_plugin.tiers.manifest import STATE, TOKENS, Manifest, Run
from hybrid_plugin.tiers.row_layout import RowLayout

Conversions = dict[str, Conversion]


def conversions(
    manifest: Manifest, layouts: Layouts, narrow: bool
) -> Conversions | Failure:
    """How each tensor of rows becomes rows of this process."""
    source: dict[str, RowLayout] = {run.pool: run.layout for run in manifest.runs}
    target: dict[str, RowLayout] = dict(layouts.pages)
    if manifest.state is not None:
        source[STATE] = manifest.state
    if layouts.state is not None:
        target[STATE] = layouts.state
    if source.keys() != target.keys():
        return Failure(Reason.LAYOUT, f"it has {', '.join(source)}")
    moves: Conversions = {}
    for name, layout in target.items():
        move = _conversion(source[name].text, layout.text, narrow)
        if isinstance(move, Failure):
            return move
        moves[name] = move
    return moves


@lru_cache(maxsize=256)  # a folder has few layouts, and thousands of files
def _conversion(source: str, target: str, narrow: bool) -> Conversion | Failure:
    return conversion(RowLayout.from_text(source), RowLayout.from_text(target), narrow)


def fill(
    reader: BundleReader,
    moves: Conversions,
    counts: Mapping[PoolId, int],
    destination: Destination,
) -> Failure | None:
    """Read pages, and the state if it is wanted.

    Args:
        reader: of the file.
        moves: `conversions` of its manifest.
        counts: rows that each pool takes.
        destination: where to; after a failure it holds anything.

    Raises:
        OSError: if the file system fails.
        ValueError: if the destination has another size.
    """
    for run in reader.manifest.runs:
        rows = destination.pages[run.pool]
        if len(rows) != counts[run.pool]:
            raise ValueError(f"{run.pool} takes {counts[run.pool]} rows")
        failure = _load_pages(reader, run, moves[run.pool], rows)
        if failure is not None:
            return failure
    if destination.state is None:
        return None
    return _load_state(reader, moves[STATE], destination.state)


def check_tokens(
    reader: BundleReader, manifest: Manifest, tokens: Tokens
) -> Failure | None:
    """Whether a file holds what its name promises, whatever hashes say.

    Args:
        reader: of the file.
        manifest: of what was looked for.
        tokens: of the sequence.

    Raises:
        OSError: if the file system fails.
    """
    if reader.manifest != manifest:
        return Failure(Reason.REPLACED, f"it ends at {reader.manifest.end}")
    wanted = np.array(tokens[manifest.start : manifest.end], dtype="<i8")
    stored = np.zeros(manifest.end - manifest.start, dtype="<i8")
    failure = reader.read(TOKENS, [stored.view(np.uint8)])
    if failure is not None:
        return failure
    if not np.array_equal(stored, wanted):
        return Failure(Reason.OTHER_TOKENS, f"{manifest.start} to {manifest.end}")
    return None


def _load_pages(
    reader: BundleReader, run: Run, move: Conversion, rows: Rows
) -> Failure | None:
    if move.is_copy:
        return reader.read(run.pool, rows)
    end = reader.manifest.end
    source = np.empty((run.rows(end), run.layout.row_bytes), dtype=np.uint8)
    failure = reader.read(run.pool, [source.reshape(-1)])
    if failure is not None:
        return failure
    target = np.stack(rows)
    move.pages(source, target, run.start, end)
    for row, filled in zip(rows, target, strict=True):
        row[:] = filled
    return None


def _load_state(
    reader: BundleReader,
    move: Conversion,
    row: Row,
) -> Failure | None:
    if move.is_copy:
        return reader.read(STATE, [row])
    source = np.empty(move.source.row_bytes, dtype=np.uint8)
    failure = reader.read(STATE, [source])
    if failure is None:
        move.state(source, row)
    return failure
