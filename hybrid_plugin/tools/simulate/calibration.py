# SPDX-License-Identifier: Apache-2.0
"""Costs from measured runs, by least squares.

A time that was measured, such as a percentile of the time to the first token, is the
sum of the passes within it.  A simulation says what these passes did, so each time
gives one equation that is linear in the costs.  Errors count in shares of the measured
time, and no cost is negative.  As other costs schedule other passes, simulation and fit
alternate.

What was measured may not tell all costs apart.  Therefore each is pulled towards its
value before, times one factor for all, because machines differ first of all by their
speed.  The pull is that of a measured time that is `PRIOR_ERROR` times as uncertain.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from itertools import combinations
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybrid_plugin.config import ConfigError
from hybrid_plugin.tools.simulate.cost_model import (
    COEFFICIENTS,
    CostModel,
    Costs,
    Work,
    read_object,
)
from hybrid_plugin.tools.simulate.job import Job
from hybrid_plugin.tools.simulate.server import Server

PRIOR_ERROR = 5.0
"""Fitted runs of an H200 are off by 10 to 20 %, as
`benchmarks/results/simulated-times.md` shows; costs of another machine or model may be
wrong by all of their value."""
ROUNDS = 12
"""Of simulation and fit; schedules change little after a few."""
_PERCENTILES = {"p50": 50, "p95": 95, "p99": 99}
Vector = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Equation:
    """A time that was measured, and what was done within it."""

    name: str
    work: Work
    measured: float
    """Seconds, without those in which nothing ran."""
    simulated: float
    """The same by the costs of the simulation."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Times of one run, in seconds: what a benchmark of a server prints."""

    machine: str
    model: str
    wall: float | None
    ttft: Mapping[str, float]
    """To the first token, by percentile."""
    tpot: Mapping[str, float]
    """For each later token, by percentile."""

    @classmethod
    def load(cls, path: Path) -> Measured:
        """Read a JSON object of `machine`, `model`, and some of the times.

        `{"machine": "H200", "model": "Qwen3-Next", "wall_s": 60.0, "ttft_s": {"p50":
        0.2, "p95": 0.9}, "tpot_s": {"p50": 0.015}}`

        Raises:
            ConfigError: if it cannot be read or says something else.
        """
        value = read_object(path, "measured run")
        known = {"machine", "model", "wall_s", "ttft_s", "tpot_s"}
        if not {"machine", "model"} <= set(value) <= known or len(value) == 2:
            raise ConfigError(
                f"{path} is no measured run: it must say machine, model, and some of "
                "wall_s, ttft_s and tpot_s."
            )
        wall = None
        if "wall_s" in value:
            wall = _seconds(value["wall_s"], f"{path}: wall_s")
        return cls(
            str(value["machine"]),
            str(value["model"]),
            wall,
            _by_percentile(value.get("ttft_s", {}), f"{path}: ttft_s"),
            _by_percentile(value.get("tpot_s", {}), f"{path}: tpot_s"),
        )

    def equations(self, server: Server) -> list[Equation]:
        """Of a simulation of the same run, whose server kept its history."""
        assert server.history is not None, "the server was told to keep it"
        jobs = [job for job in server.started if job.end < inf and job.generated]
        found = []
        if self.wall is not None:
            start = min(job.arrival for job in jobs)
            end = max(job.end for job in jobs)
            found.append(_equation("wall", server, start, end, self.wall))
        for name, seconds in self.ttft.items():
            job = _at(name, jobs, lambda job: job.first_token - job.arrival)
            span = (job.arrival, job.first_token)
            found.append(_equation(f"TTFT {name}", server, *span, seconds))
        longer = [job for job in jobs if job.generated > 1]
        for name, seconds in self.tpot.items() if longer else ():
            job = _at(
                name,
                longer,
                lambda job: (job.end - job.first_token) / (job.generated - 1),
            )
            count = job.generated - 1
            span = (job.first_token, job.end)
            found.append(
                _equation(f"TPOT {name}", server, *span, seconds * count, count)
            )
        return found

    def model_of(self, costs: Costs) -> CostModel:
        """Costs that were fitted to it."""
        return CostModel(self.machine, self.model, "fitted to one measured run", costs)


def calibrate(
    start: Costs, simulate: Callable[[Costs], Sequence[Equation]]
) -> tuple[Costs, Sequence[Equation]]:
    """Fit costs.

    Args:
        start: what costs are pulled towards.
        simulate: serves what was measured with given costs.

    Returns:
        The costs, and the equations with them.
    """
    costs = start
    best, error = start, inf
    kept: Sequence[Equation] = ()
    for _ in range(ROUNDS):
        equations = simulate(costs)
        now = _error(equations)
        if now < error:
            best, error, kept = costs, now, equations
        costs = fit(equations, start)
    return best, kept


def fit(equations: Sequence[Equation], prior: Costs) -> Costs:
    """The costs, none negative, with the least sum of squares."""
    weights = 1 / np.array([one.measured for one in equations])
    rows = np.array([astuple(one.work) for one in equations]) * weights[:, None]
    ratio = rows @ np.array(astuple(prior))
    speed = ratio.sum() / (ratio @ ratio)
    scale = speed * np.array([max(cost, 1e-12) for cost in astuple(prior)])
    pull = np.eye(len(COEFFICIENTS)) / PRIOR_ERROR
    left = np.vstack([rows * scale, pull])
    right = np.concatenate(
        [np.ones(len(equations)), np.full(len(pull), 1 / PRIOR_ERROR)]
    )
    return Costs(*(non_negative(left, right) * scale).tolist())


def non_negative(left: Vector, right: Vector) -> Vector:
    """The x >= 0 with the least |left x - right|.

    Its columns that are not 0 solve the problem without the bound, so the best of all
    such solutions that keep it is the one; of few columns there are few subsets.
    """
    count = left.shape[1]
    best, least = np.zeros(count), float(right @ right)
    for size in range(1, count + 1):
        for chosen in map(list, combinations(range(count), size)):
            found = np.linalg.lstsq(left[:, chosen], right, rcond=None)[0]
            error = float(np.sum((left[:, chosen] @ found - right) ** 2))
            if found.min() >= 0 and error < least:
                best, least = np.zeros(count), error
                best[chosen] = found
    return best


def _error(equations: Sequence[Equation]) -> float:
    return sum((one.simulated / one.measured - 1) ** 2 for one in equations)


def _at(name: str, jobs: Sequence[Job], key: Callable[[Job], float]) -> Job:
    """The job at a percentile, by nearest rank."""
    ranked = sorted(jobs, key=key)
    return ranked[int(_PERCENTILES[name] / 100 * (len(ranked) - 1))]


def _equation(
    name: str,
    server: Server,
    start: float,
    end: float,
    measured: float,
    count: int = 1,
) -> Equation:
    """Of the passes from `start` to `end`; `measured` and work are shown by `count`."""
    assert server.history is not None
    work = _done(server.history, end) - _done(server.history, start)
    busy = server.costs.seconds(work)
    idle = end - start - busy
    return Equation(
        name,
        work * (1 / count),
        max(measured - idle, measured * 1e-3) / count,
        busy / count,
    )


def _done(history: Sequence[tuple[float, Work]], time: float) -> Work:
    """Work that was done by `time`: of a pass that runs, the share that has passed."""
    index = bisect_left(history, time, key=lambda one: one[0])
    if index == len(history):
        return history[-1][1]
    end, after = history[index]
    before = history[index - 1][1] if index else Work()
    return after - (after - before) * _share_left(history, index, end - time)


def _share_left(
    history: Sequence[tuple[float, Work]], index: int, left: float
) -> float:
    start = history[index - 1][0] if index else 0.0
    return min(left / (history[index][0] - start), 1.0)


def _by_percentile(value: Any, where: str) -> dict[str, float]:
    if not isinstance(value, dict) or not set(value) <= set(_PERCENTILES):
        raise ConfigError(f"{where} must be an object of {', '.join(_PERCENTILES)}.")
    return {name: _seconds(one, f"{where}: {name}") for name, one in value.items()}


def _seconds(value: Any, where: str) -> float:
    if type(value) not in (int, float) or not 0 < value < inf:
        raise ConfigError(f"{where} must be seconds, more than 0.")
    return float(value)
