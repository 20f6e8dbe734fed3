# SPDX-License-Identifier: Apache-2.0
"""When requests come: at their own times, at random, or as others end."""

from __future__ import annotations

import heapq
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from hybrid_plugin.tools.simulate.request import Request


@dataclass(frozen=True, slots=True)
class Pace:
    """How clients send the requests of a trace.

    A request that goes on after another one comes its recorded pause after that one's
    answer, whatever the pace.
    """

    concurrency: int | None = None
    """Requests in flight at most: each of so many clients waits for its answer before
    it sends another request.  None for any number."""
    rate: float | None = None
    """Requests, or beginnings of conversations, per second: a Poisson process.  None
    for the times of the trace; a request without one comes at once."""
    seed: int = 0


class Arrivals:
    """Sends requests when they are due."""

    def __init__(self, requests: Sequence[Request], pace: Pace) -> None:
        """Nothing was sent yet."""
        self._requests = requests
        self._places = pace.concurrency
        self._full_until = 0.0
        """When a place was last left while there was no other one."""
        self._due: list[tuple[float, int]] = []
        """A heap of (time, index of the request)."""
        self._after: dict[int, list[int]] = defaultdict(list)
        """Requests that follow one that has not ended."""
        rng, time = random.Random(pace.seed), 0.0
        known = {request.key for request in requests if request.key is not None}
        for index, request in enumerate(requests):
            if request.after in known:
                assert request.after is not None
                self._after[request.after].append(index)
                continue
            if pace.rate is not None:
                time += rng.expovariate(pace.rate)
            due = request.arrival or 0.0 if pace.rate is None else time
            heapq.heappush(self._due, (due, index))

    @property
    def next_time(self) -> float:
        """When the next request comes, as long as no other one ends; inf if none."""
        return self._due[0][0] if self._due and self._has_place else inf

    def send(self, now: float) -> list[tuple[float, Request]]:
        """The requests that are sent by `now`, with their times."""
        sent = []
        while self._due and self._due[0][0] <= now and self._has_place:
            due, index = heapq.heappop(self._due)
            if self._places is not None:
                due, self._places = max(due, self._full_until), self._places - 1
            sent.append((due, self._requests[index]))
        return sent

    def ended(self, request: Request, now: float) -> None:
        """Note that a request was answered, or refused."""
        if self._places is not None:
            self._full_until = self._full_until if self._places else now
            self._places += 1
        if request.key is not None:
            for index in self._after.pop(request.key, ()):
                due = now + self._requests[index].pause
                heapq.heappush(self._due, (due, index))

    @property
    def _has_place(self) -> bool:
        return self._places is None or self._places > 0
