# SPDX-License-Identifier: Apache-2.0
"""Which window page goes with which KV page: one for all who read the KV page.

Some engines address a window group through one table, from KV pages to window
pages, that all sequences of a batch share.  That table can only be right if no
two of them, nor a snapshot that one may resume from, hold different window pages
for the same KV page.  So it is here:

- A KV page and a window page that are allocated together, for the same tokens,
  are a pair.  A sequence that resumes takes both from the path of the snapshot,
  or gets fresh copies of both.
- A snapshot belongs to a path of the tree, and the KV pages of a path may be those
  of another sequence that computed the same tokens first.  There the snapshot gets
  their window pages, as long as anybody refers to those: equal tokens have equal
  KV.  If nobody does, the KV page gets the window page of the sequence from which
  the snapshot is taken, and they are a pair from then on.

What is paired with a window page that was free in between is forgotten.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping

import numpy as np

from hybrid_plugin.core.memory.id_space import RESERVED_ID
from hybrid_plugin.core.memory.pools import PagePool
from hybrid_plugin.core.memory.reference_counts import FEW
from hybrid_plugin.core.tree.tokens import Pages

_USE = 1 << 32
"""One more use of a window page, in its mark; the lower half is its id."""


class PagePairs:
    """The window page of each KV page, for one window group.

    A mark names one use of a window page, from its allocation until it is free.
    Every call is linear in the pages it names, but for `move_windows`.
    """

    def __init__(self, capacity: int, windows: PagePool) -> None:
        """Start without pairs.

        Args:
            capacity: KV pages, the reserved one included.
            windows: pool of the window group.
        """
        self._windows = windows
        self._marks = array("q", range(windows.capacity))
        self._of = array("q", bytes(8 * capacity))
        self._marks_view = np.frombuffer(self._marks, np.int64)
        self._of_view = np.frombuffer(self._of, np.int64)  # the same memory

    def begin(self, pages: Pages, windows: Pages) -> None:
        """Pair pages that were allocated together, one by one."""
        if len(pages) > FEW:
            ids = np.frombuffer(windows, np.int32)
            self._marks_view[ids] += _USE
            self._of_view[np.frombuffer(pages, np.int32)] = self._marks_view[ids]
            return
        for page, window in zip(pages, windows, strict=True):
            self._of[page] = self._marks[window] = self._marks[window] + _USE

    def begin_apart(self, pages: Pages, windows: Pages) -> None:
        """Note that pages were allocated, none of them paired yet; see `settle`."""
        for page in pages:
            self._of[page] = RESERVED_ID
        for window in windows:
            self._marks[window] += _USE

    def held(self, pages: Pages) -> Pages:
        """The window page of each KV page, as long as anybody refers to it.

        The reserved one where nobody does.
        """
        return array("i", map(self._held, pages))

    def _held(self, page: int) -> int:
        mark = self._of[page]
        paired = mark % _USE
        alive = self._marks[paired] == mark and any(self._windows.references(paired))
        return paired if alive else RESERVED_ID

    def settle(self, pages: Pages, windows: Pages) -> Pages:
        """The window pages of KV pages in the tree, for a snapshot.

        Args:
            pages: of the tree.
            windows: for the same tokens, held by a sequence; they become the pair of
                those of `pages` that have none.
        """
        return array("i", map(self._settle, pages, windows))

    def _settle(self, page: int, window: int) -> int:
        paired = self._held(page)
        if paired != RESERVED_ID:
            return paired
        self._of[page] = self._marks[window]
        return window

    def move_pages(self, moved: Mapping[int, int]) -> None:
        """Keep the pairs of KV pages that got other ids.

        Args:
            moved: new id by old id.
        """
        for source, target in moved.items():
            self._of[target] = self._of[source]

    def move_windows(self, moved: Mapping[int, int]) -> None:
        """Keep the pairs of window pages that got other ids; linear in all KV pages.

        Args:
            moved: new id by old id.
        """
        old = np.fromiter(moved.keys(), np.int64, len(moved))
        new = np.fromiter(moved.values(), np.int64, len(moved))
        before = np.full_like(self._marks_view, -1)
        before[old] = self._marks_view[old]
        self._marks_view[new] += _USE
        after = self._marks_view.copy()
        after[old] = self._marks_view[new]
        ids = self._of_view % _USE
        paired = self._of_view == before[ids]
        self._of_view[paired] = after[ids[paired]]
