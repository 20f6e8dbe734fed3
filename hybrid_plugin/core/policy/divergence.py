# SPDX-License-Identifier: Apache-2.0
"""Divergences: learns where prompts with a common prefix part, measured from their end.

Prompts that share a document or a system message and differ in the question after it
part as far before their ends as questions are long.  A prompt whose prefix is new gets
a snapshot where those after it will most likely part from it, weighed by what it saves.
(Placing checkpoints by the distribution of divergences follows arXiv 2605.05219.)
"""

from __future__ import annotations

import operator
from bisect import insort
from collections import deque

REMEMBERED = 64
"""Number of divergences that are remembered."""
ASSUMED_SHARE = 0.75
"""Share of a prompt that is shared, before anything was observed."""
_COUNTS = range(1, REMEMBERED + 2)


class Divergences:
    """The last distances from divergence to prompt end, in tokens."""

    def __init__(self) -> None:
        """Nothing was observed yet."""
        self._recent: deque[int] = deque()
        self._sorted: list[int] = []

    def observe(self, distance: int) -> None:
        """Record that a prompt parts from an earlier one so far before its end."""
        if len(self._recent) == REMEMBERED:
            self._sorted.remove(self._recent.popleft())
        self._recent.append(distance)
        insort(self._sorted, distance)

    def last_position(self, length: int) -> int:
        """The last one that `best_position` could be."""
        nearest = self._sorted[0] if self._sorted else length
        return max(_assumed(length), length - nearest)

    def best_position(self, length: int) -> int:
        """Position in a prompt of `length` tokens that is expected to save most.

        A prompt that parts from this one at or behind the position resumes there.
        """
        assumed = _assumed(length)
        distances = [*self._sorted]
        insort(distances, length - assumed)
        positions = [length - distance for distance in distances]
        saved = list(map(operator.mul, positions, _COUNTS))
        return positions[saved.index(max(saved))]


def _assumed(length: int) -> int:
    return int(length * ASSUMED_SHARE)
