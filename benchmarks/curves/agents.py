# SPDX-License-Identifier: Apache-2.0
"""Agents with tools, retries and sub-agents: 2,000 to 14,000 tokens a prompt."""

from __future__ import annotations

import random
from dataclasses import dataclass

from benchmarks.curves.protocol import Ask, Gate, Load, child, clients, text
from benchmarks.prefix_workloads import Reply

_LONGEST = 13_500
_RETRIES = 0.15
"""Of steps whose answer is thrown away, and asked for again."""


@dataclass
class _Team:
    """The agents of one kind, and those they send out."""

    ask: Ask
    gate: Gate
    system: list[int]
    sub_system: list[int]

    async def agent(self, own: random.Random) -> list[Reply]:
        """Up to ten steps; now and then three sub-agents work on one together."""
        history = self.system + text(own, own.randint(100, 600))
        due, replies = 4 * own.random(), list[Reply]()
        helped = set(own.sample(range(1, 8), 1))
        for step in range(own.randint(6, 10)):
            more, history = await self._step(own, history, due)
            replies += more
            due += own.expovariate(2)
            if step in helped:
                tasks = [self._sub_agent(child(own), due) for _ in range(3)]
                replies += await clients(tasks)
                due += 2
                history = history + text(own, 3 * 150)
            history = history + text(own, int(100 * 25 ** own.random()))
            if len(history) > _LONGEST - 200:
                break
        return replies

    async def _sub_agent(self, own: random.Random, due: float) -> list[Reply]:
        history = self.sub_system + text(own, own.randint(80, 300))
        replies: list[Reply] = []
        for _ in range(own.randint(2, 3)):
            more, history = await self._step(own, history, due)
            replies += more
            due += own.expovariate(2)
            history = history + text(own, int(100 * 25 ** own.random()))
        return replies

    async def _step(
        self, own: random.Random, history: list[int], due: float
    ) -> tuple[list[Reply], list[int]]:
        """Ask until an answer is taken; returns it behind the history."""
        replies: list[Reply] = []
        while True:
            answer = text(own, own.randint(30, 120))
            async with self.gate.at(due):
                replies.append(await self.ask(history, answer))
            if own.random() >= _RETRIES:
                return replies, history + answer


def agents(concurrency: int = 8) -> Load:
    """Twelve agents of two kinds, each kind with its tools; about 200 requests."""

    async def run(ask: Ask, rng: random.Random) -> list[Reply]:
        gate = Gate(concurrency)
        kinds = [
            _Team(ask, gate, text(rng, length), text(rng, 1600))
            for length in (1900, 3200)
        ]
        return await clients([kinds[n % 2].agent(child(rng)) for n in range(12)])

    return Load("agents", concurrency, run)
