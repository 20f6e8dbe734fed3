# SPDX-License-Identifier: Apache-2.0
"""How many sequences, and how often the tree, refer to each id."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from hybrid_plugin.core.tree.tokens import as_pages

SEQUENCE = 1 << 32
"""One reference of a sequence in an id's count."""
TREE = 1
"""One reference of the tree."""

FEW = 48
"""Up to so many ids a loop is faster than numpy."""

_OWNERS = {SEQUENCE: "sequence", TREE: "tree"}


class References:
    """A count per id, both kinds of reference in one number."""

    def __init__(self, capacity: int) -> None:
        self._counts = array("q", bytes(8 * capacity))
        self._view = np.frombuffer(self._counts, np.int64)  # the same memory

    def of(self, page: int) -> tuple[int, int]:
        """Return (references of sequences, references of the tree)."""
        return divmod(self._counts[page], SEQUENCE)

    def begin(self, pages: array[int]) -> None:
        """Give ids without references one of a sequence each."""
        if len(pages) > FEW:
            self._view[np.frombuffer(pages, np.int32)] = SEQUENCE
            return
        for page in pages:
            self._counts[page] = SEQUENCE

    def move(self, source: int, target: int) -> None:
        """Give all references of one id to another that has none."""
        self._counts[target] = self._counts[source]
        self._counts[source] = 0

    def gain(self, pages: Sequence[int], reference: int) -> Sequence[int]:
        """Add a reference to each id.

        Returns:
            Those that no sequence referred to before.

        Raises:
            ValueError: for an id without any reference.
        """
        if len(pages) > FEW:
            return self._gain_many(as_pages(pages), reference)
        counts, unused = self._counts, []
        for page in pages:
            before = counts[page]
            if not before:
                raise _free(page)
            if before < SEQUENCE:
                unused.append(page)
            counts[page] = before + reference
        return unused

    def lose(
        self, pages: Sequence[int], reference: int
    ) -> tuple[Sequence[int], Sequence[int]]:
        """Drop a reference from each id.

        Returns:
            Those without any reference now, and those that only the tree
            refers to.

        Raises:
            ValueError: for an id without a reference of that kind.
        """
        if len(pages) > FEW:
            return self._lose_many(as_pages(pages), reference)
        counts, freed, rested = self._counts, [], []
        for page in pages:
            left = counts[page] - reference
            if not _has(left + reference, reference):
                raise _nothing_to_drop(page, reference)
            counts[page] = left
            if not left:
                freed.append(page)
            elif left < SEQUENCE:
                rested.append(page)
        return freed, rested

    # ---------------------------------------------------------------- internal

    def _gain_many(self, pages: array[int], reference: int) -> Sequence[int]:
        ids = np.frombuffer(pages, np.int32)
        before = self._view[ids]
        if not before.all():
            raise _free(int(ids[before == 0][0]))
        self._view[ids] = before + reference
        return _as_array(ids[before < SEQUENCE])

    def _lose_many(
        self, pages: array[int], reference: int
    ) -> tuple[Sequence[int], Sequence[int]]:
        ids = np.frombuffer(pages, np.int32)
        left = self._view[ids]
        held = left >> 32 if reference == SEQUENCE else left & (SEQUENCE - 1)
        if not held.all():
            raise _nothing_to_drop(int(ids[held == 0][0]), reference)
        left -= reference
        self._view[ids] = left
        freed = left == 0
        return _as_array(ids[freed]), _as_array(ids[(left < SEQUENCE) & ~freed])


def _has(count: int, reference: int) -> bool:
    return count >= SEQUENCE if reference == SEQUENCE else bool(count & (SEQUENCE - 1))


def _as_array(ids: np.ndarray[tuple[int], np.dtype[np.int32]]) -> array[int]:
    result = array("i")
    result.frombytes(ids.tobytes())
    return result


def _free(page: int) -> ValueError:
    return ValueError(f"page {page} is free, it cannot gain a reference")


def _nothing_to_drop(page: int, reference: int) -> ValueError:
    return ValueError(f"page {page} has no {_OWNERS[reference]} reference to drop")
