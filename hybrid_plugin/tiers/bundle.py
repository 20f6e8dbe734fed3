# SPDX-License-Identifier: Apache-2.0
"""What goes into a bundle and what comes out of it: rows of memory, in place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from hybrid_plugin.core.commands import PoolId
from hybrid_plugin.core.tree.tokens import Tokens
from hybrid_plugin.tiers.bundle_file import Rows
from hybrid_plugin.tiers.manifest import Run
from hybrid_plugin.tiers.row_layout import RowLayout

Row = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Layouts:
    """How the rows of this process lie."""

    pages: Mapping[PoolId, RowLayout]
    """Of every pool of pages."""
    state: RowLayout | None
    """None for a model without states."""


@dataclass(frozen=True, slots=True)
class PageBytes:
    """The pages of one pool that belong to a bundle."""

    start: int
    """The first token that counts: the bundle's first one, or where a window begins."""
    rows: Rows
    """From the page of `start` to that of the end, in order: contiguous pieces of one
    row or several, `[rows, row bytes]` or `[row bytes]`."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """KV of tokens `start` to the end and the state there, in memory.

    Whoever writes it leaves the memory as it is, whoever reads it fills it.
    """

    key: str
    """`BundleName.text`; another kind of tier may name its bundles otherwise."""
    tokens: Tokens
    """From the start of the sequence to the end of the bundle."""
    start: int
    """Where the bundle before this one ends; 0 if there is none."""
    pages: Mapping[PoolId, PageBytes] = field(default_factory=dict)
    """Of every pool of pages, or of those that are wanted."""
    state: Row | None = None
    """`[row bytes]`, contiguous; None for a model without states, and where it is not
    wanted: only the last of several bundles needs it."""

    @property
    def end(self) -> int:
        """Behind its last token."""
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class PageRange:
    """Pages of a sequence, counted from its start."""

    first: int
    count: int


def pages_of(start: int, end: int, size: int) -> PageRange:
    """The pages of tokens `start` to `end`, with `size` tokens in each."""
    first = start // size
    return PageRange(first, -(-end // size) - first)


def needed(runs: Iterable[Run], end: int, layouts: Layouts) -> dict[PoolId, PageRange]:
    """Pages of this process that a bundle fills.

    The first one may hold tokens of the bundle before: they stay, or are written again
    with the same content.  So load bundles in the order of the sequence.

    Args:
        runs: of the bundle.
        end: of the bundle.
        layouts: of this process.
    """
    return {
        run.pool: pages_of(run.start, end, layouts.pages[run.pool].tokens)
        for run in runs
    }
