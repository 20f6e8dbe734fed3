# SPDX-License-Identifier: Apache-2.0
"""What is sent at once: a plan, how many requests run, and how they arrive."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

from benchmarks.low_load.arrivals import at_times, poisson, so_many_at_a_time
from benchmarks.low_load.traffic import PLANS, Conversation
from benchmarks.prefix_workloads import Ask, Reply, Workload

POISSON, CLOSED = "Poisson", "closed"
"""Arrivals: at random times; or each when one before it has been answered."""


@dataclass(frozen=True)
class Cell:
    """A point of the benchmark."""

    plan: str
    running: int
    """Requests that run at once; on average, where they arrive at random times."""
    arrivals: str

    @property
    def name(self) -> str:
        """Of the point."""
        return f"{self.plan}, {self.running}, {self.arrivals}"

    @property
    def closed(self) -> Cell:
        """The same with so many requests at a time."""
        return replace(self, arrivals=CLOSED)

    @classmethod
    def named(cls, name: str) -> Cell:
        """The point of a name."""
        plan, running, arrivals = name.rsplit(", ", 2)
        return cls(plan, int(running), arrivals)

    def conversations(
        self, rng: random.Random, requests: int, scale: float
    ) -> list[Conversation]:
        """What is said; other cells share nothing with it, nor do other rounds."""
        own = random.Random(f"{self.name} {rng.random()}")
        return PLANS[self.plan](own, requests, scale)

    def workload(self, requests: int, scale: float, rate: float) -> Workload:
        """Send it.

        Args:
            requests: about as many; chats have whole numbers of turns.
            scale: of all lengths.
            rate: requests per second on average, where they arrive at random times.
        """

        async def run(ask: Ask, rng: random.Random) -> list[Reply]:
            plan = self.conversations(rng, requests, scale)
            if self.arrivals == CLOSED:
                return await so_many_at_a_time(ask, plan, self.running)
            turns = sum(map(len, plan))
            times = poisson(rng, rate * len(plan) / turns, len(plan))
            return await at_times(ask, plan, times)

        return run


def cells(
    plans: Sequence[str], running: Sequence[int], arrivals: Sequence[str]
) -> list[Cell]:
    """All combinations, in the order in which they are measured."""
    return [Cell(*point) for point in product(plans, running, arrivals)]
