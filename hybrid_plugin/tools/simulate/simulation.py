# SPDX-License-Identifier: Apache-2.0
"""One trace through one cache, measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hybrid_plugin.core.cache import HybridCache
from hybrid_plugin.core.policy.divergence import Divergences
from hybrid_plugin.core.policy.snapshot_positions import SnapshotPolicy
from hybrid_plugin.tools.simulate.capacity import Capacity
from hybrid_plugin.tools.simulate.outcome import Outcome
from hybrid_plugin.tools.simulate.policies import DEFAULT_POLICY, build_policy
from hybrid_plugin.tools.simulate.replay import Replay, Served
from hybrid_plugin.tools.simulate.request import Request

SAMPLES = 200
"""Points of a series at most."""


@dataclass(frozen=True, slots=True)
class Simulation:
    """How to replay a trace."""

    capacity: Capacity
    snapshots: SnapshotPolicy
    policy: str = DEFAULT_POLICY
    """Name of the eviction policy, one of `POLICIES`."""
    chunk: int = 8192
    """Tokens of a prefill step at most."""
    concurrency: int = 1
    """Sequences that are live at once."""
    first_measured: int = 0
    """Index of the first request that counts."""

    def run(
        self,
        requests: Sequence[Request],
        on_request: Callable[[], None] = lambda: None,
    ) -> Outcome:
        """Replay `requests`; calls `on_request` after each."""
        begin = time.perf_counter()
        cache = self._build()
        outcome = Outcome(self.policy, requests=len(requests))
        outcome.capacity = {
            "page_size": self.capacity.page_size,
            "pages": self.capacity.pages,
            "slots": self.capacity.slots or 0,
        }
        replay = Replay(cache, chunk=self.chunk, concurrency=self.concurrency)
        sampler = _Sampler(self.capacity, outcome, -(-len(requests) // SAMPLES) or 1)
        for index, served in enumerate(replay.serve(requests)):
            self._count(outcome, served, measured=index >= self.first_measured)
            sampler.note(cache, served)
            on_request()
        outcome.page_evictions = cache.stats.pages_evicted
        outcome.snapshot_evictions = cache.stats.snapshots_evicted
        outcome.snapshots_taken = cache.stats.snapshots_taken
        if cache.broker.moves_memory:
            outcome.memory_moves = int(cache.broker.stats.moves)
        outcome.seconds = time.perf_counter() - begin
        return outcome

    def _build(self) -> HybridCache:
        """A cache that has learned nothing yet."""
        eviction = build_policy(
            self.policy,
            token_bytes=self.capacity.token_bytes,
            slot_bytes=self.capacity.slot_bytes,
        )
        snapshots = replace(self.snapshots, divergences=Divergences())
        return self.capacity.build(snapshots, eviction)

    @staticmethod
    def _count(outcome: Outcome, served: Served, *, measured: bool) -> None:
        outcome.prefill_steps += served.steps
        outcome.too_long += not served.steps
        outcome.waited += served.waited
        if measured:
            outcome.measured_requests += 1
            outcome.queried_tokens += served.length
            outcome.hit_tokens += served.hit


class _Sampler:
    """Notes peaks at every request, and a point of the series now and then."""

    def __init__(self, capacity: Capacity, outcome: Outcome, interval: int) -> None:
        self._capacity = capacity
        self._outcome = outcome
        self._interval = interval
        self._served = self._queried = self._hit = 0

    def note(self, cache: HybridCache, served: Served) -> None:
        outcome, series = self._outcome, self._outcome.series
        pages = cache.pages.usable - cache.pages.free
        held = self._capacity.held_bytes(cache)
        outcome.peak_pages = max(outcome.peak_pages, pages)
        outcome.peak_snapshots = max(outcome.peak_snapshots, cache.slots.snapshots)
        if held is not None:
            outcome.peak_memory_bytes = max(outcome.peak_memory_bytes or 0, held)
        self._served += 1
        self._queried += served.length
        self._hit += served.hit
        if self._served % self._interval == 0:
            series.requests.append(self._served)
            series.hit_rate.append(self._hit / self._queried)
            series.memory.append(pages if held is None else held)
            series.snapshots.append(cache.slots.snapshots)
            self._queried = self._hit = 0
