# SPDX-License-Identifier: Apache-2.0
"""Fills the memory of this process from elsewhere, and converts where rows differ."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

import numpy as np
import numpy.typing as npt

from hybrid_plugin.core.commands import Pool
from hybrid_plugin.tiers.bundle import Bundle, Layouts, PageBytes, Row, pages_of
from hybrid_plugin.tiers.bundle_file import BundleReader, Rows
from hybrid_plugin.tiers.convert import Conversion, conversion
from hybrid_plugin.tiers.failure import Failure, Reason
from hybrid_plugin.tiers.manifest import STATE, TOKENS, Manifest, Run
from hybrid_plugin.tiers.row_layout import RowLayout

Conversions = dict[str, Conversion]


class Contents(Protocol):
    """What is said of a bundle before it is read, such as by a `Manifest`."""

    @property
    def start(self) -> int:
        """Its first token."""

    @property
    def end(self) -> int:
        """Behind its last token."""

    @property
    def runs(self) -> Sequence[Run]:
        """One for each pool of pages."""

    @property
    def state(self) -> RowLayout | None:
        """None for models without states."""


class Reader(Protocol):
    """Reads a bundle, such as a `BundleReader`."""

    @property
    def manifest(self) -> Contents:
        """What it holds."""

    def read(self, name: str, rows: Rows) -> Failure | None:
        """Fill memory with a tensor; see `BundleReader.read`."""


def conversions(
    manifest: Contents, layouts: Layouts, narrow: bool
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


def check(reader: BundleReader, wanted: Bundle, rank: str) -> Failure | None:
    """Whether a file holds what its name promises, whatever hashes say.

    Args:
        reader: of the file.
        wanted: what was looked for.
        rank: `Identity.rank_name` of whose part it must be.

    Raises:
        OSError: if the file system fails.
    """
    found = reader.manifest
    place = found.name.text, found.start, found.end, found.rank
    if place != (wanted.key, wanted.start, wanted.end, rank):
        return Failure(Reason.REPLACED, f"it ends at {found.end}, {found.rank}'s")
    starts = {run.pool: run.start for run in found.runs}
    for pool, pages in wanted.pages.items():
        if starts.get(pool, found.end + 1) > pages.start:
            return Failure(Reason.LAYOUT, f"{pool} begins behind {pages.start}")
    tokens = np.array(wanted.tokens[found.start : found.end], dtype="<i8")
    stored = np.zeros(found.end - found.start, dtype="<i8")
    failure = reader.read(TOKENS, [stored.view(np.uint8)])
    if failure is not None:
        return failure
    if not np.array_equal(stored, tokens):
        return Failure(Reason.OTHER_TOKENS, f"{found.start} to {found.end}")
    return None


def fill(reader: Reader, moves: Conversions, wanted: Bundle) -> Failure | None:
    """Read pages, and the state if it is wanted.

    Args:
        reader: of a bundle that was checked.
        moves: `conversions` of its manifest.
        wanted: where to; after a failure it holds anything.

    Raises:
        OSError: if the file system fails.
        ValueError: if the memory has another size.
    """
    for run in reader.manifest.runs:
        if run.pool not in wanted.pages:
            continue
        failure = _load_pages(reader, run, moves[run.pool], wanted.pages[run.pool])
        if failure is not None:
            return failure
    if wanted.state is None:
        return None
    return _load_state(reader, moves[STATE], wanted.state)


def gap(manifest: Manifest, layouts: Layouts, wanted: Bundle) -> PageBytes | None:
    """The first page, if it begins before that of the file: the rest is the parent's.

    Windows begin anywhere, and need nothing before.

    Args:
        manifest: of the file.
        layouts: of this process.
        wanted: what was read from it.
    """
    pages, own = wanted.pages.get(Pool.KV), layouts.pages[Pool.KV]
    if pages is None or pages.start != manifest.start:
        return None
    (source,) = [run.layout for run in manifest.runs if run.pool == Pool.KV]
    first = _first_token(manifest.start, own)
    if first >= _first_token(manifest.start, source):
        return None
    return PageBytes(first, [pages.rows[0].reshape(-1, own.row_bytes)[0]])


def _first_token(position: int, layout: RowLayout) -> int:
    """The first token of a page."""
    return position // layout.tokens * layout.tokens


def _load_pages(
    reader: Reader, run: Run, move: Conversion, wanted: PageBytes
) -> Failure | None:
    end, target = reader.manifest.end, move.target
    place = pages_of(wanted.start, end, target.tokens)
    if sum(piece.nbytes for piece in wanted.rows) != place.count * target.row_bytes:
        raise ValueError(f"{run.pool} takes {place.count} rows")
    if move.is_copy and place == pages_of(run.start, end, target.tokens):
        return reader.read(run.pool, wanted.rows)
    source = np.empty((run.rows(end), run.layout.row_bytes), dtype=np.uint8)
    failure = reader.read(run.pool, [source.reshape(-1)])
    if failure is None:
        skipped = wanted.start // run.layout.tokens - run.start // run.layout.tokens
        begin = wanted.start
        if run.pool == Pool.KV and begin == reader.manifest.start:
            # The whole page is in the file.
            begin = max(_first_token(begin, run.layout), _first_token(begin, target))
        _move(move, source[skipped:], PageBytes(begin, wanted.rows), end)
    return failure


def _move(
    move: Conversion, source: npt.NDArray[np.uint8], wanted: PageBytes, end: int
) -> None:
    """Move tokens to pages that lie in pieces; what they hold besides stays."""
    pieces = [row.reshape(-1, move.target.row_bytes) for row in wanted.rows]
    pages = np.concatenate(pieces)
    move.pages(source, pages, wanted.start, end)
    done = 0
    for piece in pieces:
        piece[:] = pages[done : done + len(piece)]
        done += len(piece)


def _load_state(
    reader: Reader,
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
