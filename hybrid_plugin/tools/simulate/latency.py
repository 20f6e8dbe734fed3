# SPDX-License-Identifier: Apache-2.0
"""What users notice of a simulated engine: times, and requests that keep targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from hybrid_plugin.tools.simulate.job import Job
from hybrid_plugin.tools.simulate.server import Server


@dataclass(frozen=True, slots=True)
class Targets:
    """What a request must keep to count as good; seconds."""

    ttft: float = inf
    """To the first token, from its arrival."""
    tpot: float = inf
    """For each later token, on average."""

    def kept_by(self, job: Job) -> bool:
        """Whether a request that has ended was good."""
        return _ttft(job) <= self.ttft and (_tpot(job) or 0.0) <= self.tpot


@dataclass(frozen=True, slots=True)
class Times:
    """Of the measured requests; virtual seconds."""

    wall: float
    """From the first arrival to the last end."""
    ttft: dict[str, float]
    """Time to the first token: p50, p95, p99."""
    tpot: dict[str, float]
    """Time per later token of a request, on average over them: p50, p95, p99."""
    queueing: dict[str, float]
    """From arrival to admission: p50, p95, p99."""
    peak_running: int
    """Sequences that ran at once, at most."""
    answered_tokens: int
    requests_per_s: float
    tokens_per_s: float
    """Generated ones."""
    good: int
    """Requests that kept the targets."""
    goodput: float
    """Those, per second."""

    @classmethod
    def of(cls, jobs: Sequence[Job], server: Server, targets: Targets) -> Times | None:
        """Of jobs that have ended; None without any."""
        jobs = [job for job in jobs if job.end < inf and job.generated]
        if not jobs:
            return None
        wall = max(job.end for job in jobs) - min(job.arrival for job in jobs)
        tokens = sum(job.generated for job in jobs)
        good = sum(targets.kept_by(job) for job in jobs)
        return cls(
            wall=wall,
            ttft=_percentiles([_ttft(job) for job in jobs]),
            tpot=_percentiles([t for job in jobs if (t := _tpot(job)) is not None]),
            queueing=_percentiles([job.admitted - job.arrival for job in jobs]),
            peak_running=server.peak_running,
            answered_tokens=tokens,
            requests_per_s=len(jobs) / wall,
            tokens_per_s=tokens / wall,
            good=good,
            goodput=good / wall,
        )

    def as_lines(self, requests: int) -> list[str]:
        """For people."""
        return [
            f"virtual time       {self.wall:,.1f} s, {self.requests_per_s:.3f} requests"
            f" and {self.tokens_per_s:,.0f} generated tokens a second",
            f"first token        {_shown(self.ttft)}",
            f"each later token   {_shown(self.tpot)}",
            f"in the queue       {_shown(self.queueing)}",
            f"running at once    {self.peak_running:,} at most",
            f"goodput            {self.goodput:.3f} requests a second; {self.good:,} of"
            f" {requests:,} kept the targets",
        ]


def _ttft(job: Job) -> float:
    return job.first_token - job.arrival


def _tpot(job: Job) -> float | None:
    if job.generated < 2:
        return None
    return (job.end - job.first_token) / (job.generated - 1)


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    return {f"p{p}": float(np.percentile(values, p)) for p in (50, 95, 99)}


def _shown(values: dict[str, float]) -> str:
    shown = ", ".join(f"{name} {_seconds(value)}" for name, value in values.items())
    return shown or "none"


def _seconds(value: float) -> str:
    return f"{value:,.2f} s" if value >= 1 else f"{1000 * value:.1f} ms"
