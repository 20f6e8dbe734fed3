# SPDX-License-Identifier: Apache-2.0
"""In an engine's process: one run of a cell, and what is told of it."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.low_load.cells import CLOSED, Cell, cells
from benchmarks.low_load.traffic import PLANS
from benchmarks.passes import compiled, log
from benchmarks.passes.engines import Running
from benchmarks.passes.log import Pass, busy_seconds
from benchmarks.prefix_sides import say
from benchmarks.prefix_workloads import WARM_UP, Ask, Reply, Workload, run_once

LAST_RESULTS_S = 0.05
"""Passes that were launched ahead of the last answer have ended by then."""


class Observed:
    """A workload, and the times of its requests."""

    def __init__(self, workload: Workload) -> None:
        """Observe one run of it."""
        self._workload = workload
        self._spans: list[tuple[float, float]] = []
        self.began = self.ended = 0.0
        """In seconds of `time.monotonic`."""

    async def run(self, ask: Ask, rng: random.Random) -> list[Reply]:
        """A `Workload`."""

        async def timed(prompt: Sequence[int], max_tokens: int) -> Reply:
            begin = time.monotonic()
            reply = await ask(prompt, max_tokens)
            self._spans.append((begin, time.monotonic()))
            return reply

        self.began = time.monotonic()
        replies = await self._workload(timed, rng)
        self.ended = time.monotonic()
        return replies

    def summary(self) -> dict[str, float]:
        """Number of requests, how long they took and how many ran on average."""
        took = [end - begin for begin, end in self._spans]
        return {
            "requests": len(took),
            "request_ms_p50": round(1000 * statistics.median(took), 2),
            "request_ms_mean": round(1000 * statistics.mean(took), 2),
            "running": round(sum(took) / (self.ended - self.began), 2),
        }


def of_passes(passes: Sequence[Pass]) -> dict[str, dict[str, float]]:
    """Prefill passes and others: number, tokens and seconds.

    A pass that prefills anything is a prefill pass.  `launch_s` is the host's time to
    prepare and launch, `busy_s` the time from the last pass's result to its own;
    medians are of launch, and of launch and wait until the result is there.

    Args:
        passes: in the order of their results.
    """
    pairs = list(zip(passes, busy_seconds(passes), strict=True))
    kinds = {
        "prefill": [pair for pair in pairs if pair[0].prefills],
        "decode": [pair for pair in pairs if not pair[0].prefills],
    }
    return {kind: _of_kind(found) for kind, found in kinds.items()}


def _of_kind(pairs: Sequence[tuple[Pass, float]]) -> dict[str, float]:
    launches = [one.launched - one.began for one, _ in pairs]
    results = [one.done - one.began for one, _ in pairs]
    return {
        "passes": len(pairs),
        "tokens": sum(one.prefill_tokens + one.decodes for one, _ in pairs),
        "launch_s": round(sum(launches), 4),
        "busy_s": round(sum(busy for _, busy in pairs), 4),
        "launch_ms_p50": _median_ms(launches),
        "result_ms_p50": _median_ms(results),
    }


def _median_ms(seconds: Sequence[float]) -> float:
    return round(1000 * statistics.median(seconds), 3) if seconds else 0.0


async def answer_until_closed(running: Running, requests: int, scale: float) -> None:
    """A line of JSON in, a line with the outcome out."""
    await warm_up(running.ask, scale)
    say(running.facts)
    while line := await asyncio.to_thread(sys.stdin.readline):
        told = json.loads(line)
        workload = Cell.named(told["name"]).workload(requests, scale, told["rate"])
        observed = Observed(workload)
        outcome = await run_once(
            told["name"], running.ask, told["seed"], {told["name"]: observed.run}
        )
        found = asdict(outcome) | observed.summary() | {"seed": told["seed"]}
        say(found | {"passes": await _passes(running.passes, observed)})


async def _passes(path: Path, observed: Observed) -> dict[str, Any]:
    await asyncio.sleep(LAST_RESULTS_S)
    span = (observed.began, observed.ended)
    passes = log.read(path, *span)
    return of_passes(passes) | {
        "slowest": log.slowest(passes),
        "kernels": compiled.read(path, *span),
    }


async def warm_up(ask: Ask, scale: float) -> None:
    """Compile what the first request of a kind compiles: each cell, but shorter."""
    for cell in cells(tuple(PLANS), (1, 4, 8), (CLOSED,)):
        await cell.workload(8, scale, 0.0)(ask, random.Random(WARM_UP))
