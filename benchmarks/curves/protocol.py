# SPDX-License-Identifier: Apache-2.0
"""What a workload asks of an engine, and how clients take turns."""

from __future__ import annotations

import asyncio
import heapq
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from benchmarks.prefix_workloads import VOCABULARY, Reply

Ask = Callable[[Sequence[int], Sequence[int]], Coroutine[Any, Any, Reply]]
"""Prompt, and the tokens that the engine is to generate for it.

The workload names the answer, so that all caches serve the same tokens."""
Workload = Callable[[Ask, random.Random], Coroutine[Any, Any, list[Reply]]]


@dataclass(frozen=True)
class Load:
    """A workload with what is said about it."""

    name: str
    concurrency: int
    """Requests in flight, at most."""
    run: Workload


def text(rng: random.Random, count: int) -> list[int]:
    """Random tokens: nothing is shared by accident."""
    return rng.choices(range(10, VOCABULARY), k=count)


def child(rng: random.Random) -> random.Random:
    """A generator of its own, so that no client's draws depend on another's pace."""
    return random.Random(rng.getrandbits(64))


async def clients(tasks: Sequence[Coroutine[Any, Any, list[Reply]]]) -> list[Reply]:
    """Run all at once, and gather what each was answered."""
    return [reply for replies in await asyncio.gather(*tasks) for reply in replies]


@dataclass
class Gate:
    """Lets so many requests in at a time; of those that wait, the one due first.

    There is no clock: a client that thinks draws how much later its next turn is
    due, and turns are served in the order of those times.
    """

    limit: int
    _inside: int = 0
    _count: int = 0
    _waiting: list[tuple[float, int, asyncio.Future[None]]] = field(
        default_factory=list
    )

    @asynccontextmanager
    async def at(self, due: float) -> AsyncIterator[None]:
        """Hold a place, from `due` on at the earliest among those who wait."""
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._count += 1
        heapq.heappush(self._waiting, (due, self._count, place))
        # All who could come now shall have come before one is chosen.
        await asyncio.sleep(0)
        self._admit()
        await place
        try:
            yield
        finally:
            self._inside -= 1
            asyncio.get_running_loop().call_soon(self._admit)

    def _admit(self) -> None:
        while self._waiting and self._inside < self.limit:
            self._inside += 1
            heapq.heappop(self._waiting)[2].set_result(None)
