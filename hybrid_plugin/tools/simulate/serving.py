# SPDX-License-Identifier: Apache-2.0
"""Requests and the engine that serves them, on one clock."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from math import inf

from hybrid_plugin.tools.simulate.arrivals import Arrivals, Pace
from hybrid_plugin.tools.simulate.job import Job
from hybrid_plugin.tools.simulate.request import Request
from hybrid_plugin.tools.simulate.server import Server


def serve(server: Server, requests: Sequence[Request], pace: Pace) -> Iterator[Job]:
    """Serve all requests; yields each when it has ended, or can never be served."""
    arrivals, numbers = Arrivals(requests, pace), count(1)
    while True:
        for due, request in arrivals.send(server.seen):
            server.submit(Job(request, next(numbers), due))
        if not server.is_idle:
            for job in server.step(arrivals.next_time):
                arrivals.ended(job.request, server.now)
                yield job
        elif arrivals.next_time < inf:
            server.rest(until=arrivals.next_time)
        else:
            return
