# SPDX-License-Identifier: Apache-2.0
"""What goes into a bundle and what comes out of it: rows of memory, in place."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from hybrid_plugin.core.commands import PoolId
from hybrid_plugin.core.tree.tokens import Tokens
from hybrid_plugin.tiers.bundle_file import Rows
from hybrid_plugin.tiers.manifest import Manifest
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
class PageRows:
    """The pages of one pool that belong to a bundle."""

    start: int
    """The first token that counts: the bundle's first one, or where a window begins."""
    rows: Rows
    """Contiguous `[row bytes]` each, from the page of `start` to that of the end."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """What is to be stored: KV of tokens `start` to the end, and the state there.

    The memory must stay as it is until the bundle is stored or refused.
    """

    namespace: Hashable
    """What the whole sequence must have in common with another.  Adapters must be named
    such that one name stands for the same weights for as long as files are kept."""
    tokens: Tokens
    """From the start of the sequence to the end of the bundle."""
    start: int
    """Where the bundle before this one ends; 0 if there is none."""
    pages: Mapping[PoolId, PageRows]
    """For every pool of pages."""
    state: Row | None
    """`[row bytes]`, contiguous."""


@dataclass(frozen=True, slots=True)
class Destination:
    """Memory for what is loaded."""

    pages: Mapping[PoolId, Rows] = field(default_factory=dict)
    """For every pool of pages the writable rows of `needed`."""
    state: Row | None = None
    """None leaves the state in the file: only the last of several bundles needs it."""


@dataclass(frozen=True, slots=True)
class PageRange:
    """Pages of a sequence, counted from its start."""

    first: int
    count: int


def needed(manifest: Manifest, layouts: Layouts) -> dict[PoolId, PageRange]:
    """Pages of this process that a bundle fills.

    The first one may hold tokens of the bundle before: they stay, or are written again
    with the same content.  So load bundles in the order of the sequence.
    """
    pages = {}
    for run in manifest.runs:
        size = layouts.pages[run.pool].tokens
        first = run.start // size
        pages[run.pool] = PageRange(first, -(-manifest.end // size) - first)
    return pages
