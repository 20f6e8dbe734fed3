# SPDX-License-Identifier: Apache-2.0
"""Rows of the scratch in which an engine verifies drafts, one for each sequence.

What a row holds is the adapter's business: the states after all drafts, or the inputs
they are computed from.  Rows are numbered by a sequence's place in its batch, so those
of a batch of `n` sequences are 0 to `n - 1`, and no row belongs to a sequence.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from hybrid_plugin.core.memory.id_space import IdSpace


@dataclass(frozen=True, slots=True)
class ScratchLayout:
    """How the rows of a scratch lie in memory, and how many there may be."""

    rows: int
    """Sequences that verify at once, at most."""
    apart: tuple[int, ...] = ()
    """Bytes of a row in each tensor whose rows follow each other without a gap."""
    together: int = 0
    """Bytes of a row in all other tensors, which lie side by side."""
    batches: tuple[int, ...] = ()
    """Sizes that an engine's graphs pad batches to, ascending; a padded row is written
    as well.  One beyond `rows` stands for `rows`; larger batches are not padded."""
    warm_up_rows: int = 1
    """Rows that are written before anything is served, if there are so many."""

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in all tensors."""
        return sum(self.apart) + self.together

    def padded(self, sequences: int) -> int:
        """Rows that a batch of so many sequences writes."""
        place = bisect_left(self.batches, sequences)
        if not sequences or place == len(self.batches):
            return sequences
        return max(min(self.batches[place], self.rows), sequences)


class ScratchRows:
    """As many rows as the largest batch has that can be launched.

    They are held from the admission of a sequence on, because a batch that decodes
    cannot wait for memory; its sequences may be in any of its places.
    """

    def __init__(self, layout: ScratchLayout, per_granule: int) -> None:
        """Manage addresses for all rows, rounded up to granules; row 0 is mapped.

        Args:
            layout: of the scratch.
            per_granule: rows whose memory comes and goes together.
        """
        self._layout = layout
        granules = -(-layout.rows // per_granule)
        self.ids = IdSpace(granules * per_granule, per_granule)
        self._more: list[int] = []
        """Rows held besides row 0, ascending."""

    @property
    def held(self) -> int:
        """Rows that a step may write; row 0 is always there."""
        return 1 + len(self._more)

    def missing(self, sequences: int) -> int:
        """Rows that a batch of so many sequences needs and that are not held."""
        return max(self._layout.padded(sequences) - self.held, 0)

    def hold(self, count: int) -> None:
        """Hold so many rows more; callers check that they are free."""
        self._more += self.ids.allocate(count)

    def keep(self, sequences: int) -> None:
        """Give back the rows that a batch of so many sequences does not need.

        Raises:
            ValueError: if it needs more than are held.
        """
        if self.missing(sequences):
            raise ValueError(
                f"{sequences} sequences are verified in {self.held} rows of scratch"
            )
        least = max(self._layout.padded(sequences) - 1, 0)
        freed: Sequence[int] = self._more[least:]
        del self._more[least:]
        self.ids.free_live(freed)
