# SPDX-License-Identifier: Apache-2.0
"""One trace through one cache, measured."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from hybrid_plugin.core.cache import HybridCache
from hybrid_plugin.core.policy.divergence import Divergences
from hybrid_plugin.core.policy.eviction import LeastRecentlyUsed
from hybrid_plugin.core.policy.snapshot_positions import SnapshotPolicy
from hybrid_plugin.core.tiers.restores import TransferRates
from hybrid_plugin.tools.simulate.arrivals import Pace
from hybrid_plugin.tools.simulate.attention_reach import AttentionReach
from hybrid_plugin.tools.simulate.calibration import Equation, Measured, calibrate
from hybrid_plugin.tools.simulate.capacity import Capacity
from hybrid_plugin.tools.simulate.cost_model import CostModel, Costs
from hybrid_plugin.tools.simulate.drafting import Drafted, Drafting, Speculation
from hybrid_plugin.tools.simulate.host_totals import HostTotals
from hybrid_plugin.tools.simulate.job import Job
from hybrid_plugin.tools.simulate.known_costs import DEFAULT_COSTS
from hybrid_plugin.tools.simulate.latency import Targets, Times
from hybrid_plugin.tools.simulate.outcome import Outcome
from hybrid_plugin.tools.simulate.policies import DEFAULT_POLICY, build_policy
from hybrid_plugin.tools.simulate.request import Request
from hybrid_plugin.tools.simulate.served_cache import PluginCache, ServedCache
from hybrid_plugin.tools.simulate.server import Server
from hybrid_plugin.tools.simulate.serving import serve

SAMPLES = 200
"""Points of a series at most."""


@dataclass(frozen=True, slots=True)
class Serving:
    """How requests come, and what serves them, but for the cache."""

    pace: Pace = field(default_factory=lambda: Pace(concurrency=1))
    costs: CostModel = DEFAULT_COSTS
    reach: AttentionReach = field(default_factory=AttentionReach)
    chunk: int = 8192
    """Tokens of a pass at most."""
    max_running: int = 64
    """Sequences that run at once, at most."""
    targets: Targets = field(default_factory=Targets)
    first_measured: int = 0
    """Number of requests that start before the first one that counts."""

    @property
    def most_running(self) -> int:
        """Sequences that can run at once, by the pace too."""
        return min(self.max_running, self.pace.concurrency or self.max_running)

    def server(self, cache: ServedCache) -> Server:
        """An idle engine."""
        return Server(cache, self.costs.costs, self.reach, self.chunk, self.max_running)

    def measured(self, server: Server) -> list[Job]:
        """The jobs that count, in the order of their starts."""
        return server.started[self.first_measured :]


@dataclass(frozen=True, slots=True)
class Simulation:
    """How to replay a trace."""

    capacity: Capacity
    snapshots: SnapshotPolicy
    policy: str = DEFAULT_POLICY
    """Name of the eviction policy, one of `POLICIES`."""
    serving: Serving = field(default_factory=Serving)
    speculation: Speculation | None = None
    """Of an engine that drafts."""
    host_bandwidth: float = math.inf
    """Bytes in a second that come back from host memory, where the capacity has it."""

    def run(
        self,
        requests: Sequence[Request],
        on_request: Callable[[], None] = lambda: None,
    ) -> Outcome:
        """Serve `requests`; calls `on_request` after each."""
        begin = time.perf_counter()
        served = self._served()
        outcome = Outcome(
            self.policy, requests=len(requests), costs=self.serving.costs.title
        )
        outcome.capacity = {
            "page_size": self.capacity.page_size,
            "pages": self.capacity.pages,
            "slots": self.capacity.slots or 0,
        }
        server = self._server(served)
        peaks = _Peaks(self.capacity, outcome)
        series = _Series(self.capacity, outcome, -(-len(requests) // SAMPLES) or 1)
        served.on_step = peaks.note
        for job in serve(server, requests, self.serving.pace):
            outcome.too_long += job.hit is None
            series.note(served.cache, job)
            on_request()
        self._count(outcome, server, served.cache)
        outcome.seconds = time.perf_counter() - begin
        return outcome

    def calibrated(
        self, requests: Sequence[Request], measured: Measured
    ) -> tuple[CostModel, Sequence[Equation]]:
        """Costs with which the times are those of a measured run of `requests`.

        Returns:
            The costs, and each time as it was measured and as it is simulated.
        """

        def simulate(costs: Costs) -> Sequence[Equation]:
            server = self._server(self._served())
            server.costs, server.history = costs, []
            for _ in serve(server, requests, self.serving.pace):
                pass
            return measured.equations(server)

        costs, equations = calibrate(self.serving.costs.costs, simulate)
        return measured.model_of(costs), equations

    def _server(self, served: PluginCache) -> Server:
        """An idle engine, which drafts if it is to."""
        server = self.serving.server(served)
        if self.speculation is not None:
            server.drafting = Drafting(served.cache, self.speculation)
        return server

    def _served(self) -> PluginCache:
        """A cache that has learned nothing yet."""
        snapshots = replace(self.snapshots, divergences=Divergences())
        host = self.capacity.host_tier(self._eviction())
        rates = None if host is None else TransferRates(self.host_bandwidth)
        cache = self.capacity.build(snapshots, self._eviction(), host, rates)
        return PluginCache(cache, self.serving.max_running)

    def _eviction(self) -> LeastRecentlyUsed:
        return build_policy(
            self.policy,
            token_bytes=self.capacity.token_bytes,
            slot_bytes=self.capacity.slot_bytes,
        )

    def _count(self, outcome: Outcome, server: Server, cache: HybridCache) -> None:
        jobs = self.serving.measured(server)
        outcome.measured_requests = len(jobs)
        outcome.queried_tokens = sum(job.length for job in jobs)
        outcome.hit_tokens = sum(job.hit or 0 for job in jobs)
        outcome.prefill_steps = sum(job.steps for job in server.started)
        outcome.waited = sum(job.waited for job in server.started)
        outcome.preemptions = server.preemptions
        outcome.order = [job.request for job in server.started]
        outcome.times = Times.of(jobs, server, self.serving.targets)
        outcome.page_evictions = cache.stats.pages_evicted
        outcome.snapshot_evictions = cache.stats.snapshots_evicted
        outcome.snapshots_taken = cache.stats.snapshots_taken
        if server.drafting is not None:
            outcome.drafts = Drafted.of(server.drafting, cache.stats)
        if cache.broker.moves_memory:
            outcome.memory_moves = int(cache.broker.stats.moves)
        if cache.host is not None:
            outcome.host = HostTotals.of(cache.host, self.capacity.page_size)


class _Peaks:
    """Notes what is held at most, pass by pass."""

    def __init__(self, capacity: Capacity, outcome: Outcome) -> None:
        self._capacity = capacity
        self._outcome = outcome

    def note(self, cache: HybridCache) -> None:
        outcome = self._outcome
        pages = cache.pages.usable - cache.pages.free
        held = self._capacity.held_bytes(cache)
        outcome.peak_pages = max(outcome.peak_pages, pages)
        outcome.peak_snapshots = max(outcome.peak_snapshots, cache.slots.snapshots)
        if held is not None:
            outcome.peak_memory_bytes = max(outcome.peak_memory_bytes or 0, held)


class _Series:
    """Notes a point of the series now and then."""

    def __init__(self, capacity: Capacity, outcome: Outcome, interval: int) -> None:
        self._capacity = capacity
        self._outcome = outcome
        self._interval = interval
        self._served = self._queried = self._hit = 0

    def note(self, cache: HybridCache, job: Job) -> None:
        series = self._outcome.series
        self._served += 1
        self._queried += job.length
        self._hit += job.hit or 0
        if self._served % self._interval == 0:
            held = self._capacity.held_bytes(cache)
            pages = cache.pages.usable - cache.pages.free
            series.requests.append(self._served)
            series.hit_rate.append(self._hit / self._queried)
            series.memory.append(pages if held is None else held)
            series.snapshots.append(cache.slots.snapshots)
            self._queried = self._hit = 0
