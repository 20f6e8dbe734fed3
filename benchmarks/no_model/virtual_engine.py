# SPDX-License-Identifier: Apache-2.0
"""The simulator's engine behind the clients of a workload, in virtual time."""

from __future__ import annotations

import asyncio
import random
from array import array
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from math import inf
from typing import Any

from benchmarks.prefix_workloads import VOCABULARY, Reply
from hybrid_plugin.tools.simulate.cost_model import Costs
from hybrid_plugin.tools.simulate.job import Job
from hybrid_plugin.tools.simulate.request import Request
from hybrid_plugin.tools.simulate.served_cache import ServedCache
from hybrid_plugin.tools.simulate.server import Server

_TURNS = 8
"""Of the event loop between two passes, so that clients take what they were given."""


class VirtualEngine:
    """Answers with random tokens, and says how long that took."""

    def __init__(
        self, cache: ServedCache, costs: Costs, *, chunk: int, max_running: int
    ) -> None:
        """Start idle.

        Args:
            cache: that serves.
            costs: of a pass.
            chunk: tokens of a pass at most.
            max_running: sequences that run at once, at most.
        """
        self.server = Server(
            cache, costs, chunk=chunk, max_running=max_running, history=[]
        )
        self._ends: dict[Job, asyncio.Future[None]] = {}
        self._asked: list[Job] = []
        """That the server does not know yet."""
        self._count = 0
        self._rng = random.Random(0)

    async def ask(
        self, prompt: Sequence[int], max_tokens: int, answer: Sequence[int] = ()
    ) -> Reply:
        """Serve a request; its answer is random if none is given."""
        self._count += 1
        tokens = array("q", prompt)
        made = answer or self._rng.choices(range(10, VOCABULARY), k=max_tokens)
        request = Request(len(tokens), partial(array, "q", tokens), array("q", made))
        job = Job(request, self._count, self.server.now)
        self._ends[job] = asyncio.get_running_loop().create_future()
        self._asked.append(job)
        await self._ends[job]
        if job.hit is None:
            raise RuntimeError(f"{job.length} tokens found no room in the cache.")
        ttft = job.first_token - job.arrival
        return Reply(tuple(made), job.length, job.hit, ttft)

    def drive(
        self,
        workload: Callable[[Any, random.Random], Coroutine[Any, Any, list[Reply]]],
        seed: int,
    ) -> list[Reply]:
        """Serve a workload until its clients are done."""
        return asyncio.run(self._both(workload(self.ask, random.Random(seed))))

    async def _both(self, serving: Coroutine[Any, Any, list[Reply]]) -> list[Reply]:
        clients = asyncio.ensure_future(serving)
        while True:
            for _ in range(_TURNS):
                await asyncio.sleep(0)
            if clients.done():
                return clients.result()
            if self.server.is_idle:
                self.server.rest(until=self.server.now)
            while self._asked and self._asked[0].arrival <= self.server.seen:
                self.server.submit(self._asked.pop(0))
            if self.server.is_idle:
                raise RuntimeError("All clients wait, and nothing runs.")
            for job in self.server.step(inf):
                self._ends.pop(job).set_result(None)
