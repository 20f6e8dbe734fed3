# SPDX-License-Identifier: Apache-2.0
"""Reservations: pages that live sequences have been promised and do not hold yet."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from hybrid_plugin.core.commands import Pool, PoolId
from hybrid_plugin.core.memory.window_tables import WindowDemand, WindowGroup
from hybrid_plugin.core.sequence import LiveSequence


class Reservations:
    """What the live sequences of one cache have reserved."""

    def __init__(
        self,
        page_size: int,
        windows: Sequence[WindowGroup],
        sequences: Mapping[str, LiveSequence],
        restoring: Callable[[int], int],
    ) -> None:
        """Watch over a cache.

        Args:
            page_size: tokens in a page.
            windows: its window groups.
            sequences: that are live, by name.
            restoring: pages of a window group, given by its index, that restores have
                in use: no sequence holds them.
        """
        self._page_size = page_size
        self._windows = tuple(windows)
        self._sequences = sequences
        self._restoring = restoring
        self._indices = {Pool.window(i): i for i in range(len(self._windows))}

    def promised(self, pool: PoolId = Pool.KV) -> int:
        """Pages that live sequences have reserved and do not hold yet.

        Of full attention, those for the rest of their prompts.
        """
        if pool == Pool.KV:
            return sum([sequence.promised for sequence in self._sequences.values()])
        index = self._indices[pool]
        return max(self._reserved(index) - self._held(index), 0)

    def window_wants(self, count: int, demand: WindowDemand | None = None) -> list[int]:
        """Pages of each window group that must be there to admit a sequence.

        Sequences that share a page do not leave it at the same time, so what each of
        them reserves counts in full.

        Args:
            count: pages that it gets at once, its hit shared already.
            demand: what it wants to have reserved.
        """
        wants = []
        for index, group in enumerate(self._windows):
            reserved = self._reserved(index)
            if demand is not None:
                reserved += demand.pages(group.window, self._page_size, prefilling=True)
            wants.append(max(count, reserved - self._held(index)))
        return wants

    def _held(self, index: int) -> int:
        """Pages of a window group that live sequences hold."""
        return self._windows[index].pages.in_use - self._restoring(index)

    def _reserved(self, index: int) -> int:
        """Pages of a window group that live sequences reserved, held or not."""
        window = self._windows[index].window
        return sum(
            [
                sequence.window_demand.pages(
                    window, self._page_size, prefilling=sequence.is_prefilling
                )
                for sequence in self._sequences.values()
                if sequence.window_demand is not None
            ]
        )
