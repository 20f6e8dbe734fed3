# SPDX-License-Identifier: Apache-2.0
"""In an engine's process: requests counted, phases watched, outcomes told."""

from __future__ import annotations

import asyncio
import faulthandler
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any

from benchmarks.elastic_workloads import Scale, phases, warm_up
from benchmarks.prefix_sides import say
from benchmarks.prefix_workloads import Ask, Reply, Workload, run_once

INTERVAL_S = 0.25
MOST_POINTS = 300
START_LIMIT_S = 480
"""An engine that takes longer hangs: its process ends, and the others go on."""
_MAPPED = "hybrid_cache_mapped_bytes"

Mapped = Callable[[], Mapping[str, float]]
"""Bytes behind `pages` and behind `slots`; empty where nothing says so."""


class Limit:
    """Ends this process and those that it started, unless it is lifted in time."""

    def __init__(self, seconds: float) -> None:
        """Begin to wait."""
        self._timer = threading.Timer(seconds, self._end)
        self._timer.daemon = True
        self._timer.start()

    def lift(self) -> None:
        """What was waited for has come."""
        self._timer.cancel()

    def _end(self) -> None:
        faulthandler.dump_traceback(all_threads=True)
        # `Side` gave the process a group of its own.  Without its children's ends of
        # the pipe closed, `Side` would wait for a line from them.
        os.killpg(0, signal.SIGKILL)


def mapped_bytes(metrics: Iterable[Any]) -> dict[str, float]:
    """What the plugin's own metrics say of the memory behind its pools.

    Args:
        metrics: of `prometheus_client`, the plugin's among them, if it has any.
    """
    return {
        sample.labels["pool"]: sample.value
        for metric in metrics
        for sample in metric.samples
        if sample.name == _MAPPED
    }


class Watch:
    """What a phase generates, and where memory is meanwhile."""

    def __init__(self, mapped: Mapped) -> None:
        """Ask `mapped` at every sample."""
        self._mapped = mapped
        self._tokens = 0
        self._samples: list[tuple[float, int, Mapping[str, float]]] = []

    async def count(
        self, steps: AsyncIterator[Any], length: Callable[[Any], int]
    ) -> AsyncIterator[Any]:
        """Pass on an answer's steps, each of which repeats what came before.

        Args:
            steps: of one answer.
            length: tokens that a step has.
        """
        seen = 0
        async for step in steps:
            now = length(step)
            self._tokens += now - seen
            seen = now
            yield step

    @asynccontextmanager
    async def sampling(self) -> AsyncIterator[None]:
        """Sample until the block ends, from nothing on."""
        self._samples = []
        begin, before = time.monotonic(), self._tokens

        def sample() -> None:
            elapsed = time.monotonic() - begin
            tokens = self._tokens - before
            self._samples.append((elapsed, tokens, dict(self._mapped())))

        async def go_on() -> None:
            while True:
                sample()
                await asyncio.sleep(INTERVAL_S)

        task = asyncio.create_task(go_on())
        try:
            yield
        finally:
            task.cancel()
            sample()

    def series(self) -> dict[str, list[float]]:
        """The last phase: seconds since its start, tokens, MiB behind each pool."""
        step = -(-len(self._samples) // MOST_POINTS)
        taken = self._samples[::-step][::-1]
        found: dict[str, list[float]] = {
            "t": [round(elapsed, 2) for elapsed, _, _ in taken],
            "tokens": [tokens for _, tokens, _ in taken],
        }
        for kind, pool in (("pages", "kv"), ("slots", "state")):
            sizes = [mapped[pool] for _, _, mapped in taken if pool in mapped]
            if len(sizes) == len(taken):
                found[f"{kind}_mib"] = [round(size / 2**20, 1) for size in sizes]
        return found


def whole_or_nothing(ask: Ask) -> Ask:
    """An answer that is short, or an error, has no tokens: it counts as failed."""

    told: set[str] = set()

    async def careful(prompt: Sequence[int], max_tokens: int) -> Reply:
        try:
            reply = await ask(prompt, max_tokens)
        except Exception as error:
            if repr(error) not in told:
                told.add(repr(error))
                print(f"requests fail: {error!r}", file=sys.stderr, flush=True)
            return Reply((), len(prompt), 0, 0.0)
        if len(reply.tokens) == max_tokens:
            return reply
        return Reply((), len(prompt), reply.cached_tokens, reply.ttft_s)

    return careful


async def answer_until_closed(
    ask: Ask, facts: Mapping[str, Any], scale: Scale, watch: Watch, starting: Limit
) -> None:
    """Warm up; then a line of JSON in, a line with the outcome out.

    Args:
        ask: how to ask the engine.
        facts: what it says about itself.
        scale: of the traffic.
        watch: of the engine.
        starting: to be lifted, for the engine is there.

    Raises:
        RuntimeError: if no request of a phase is answered: there is no engine.
    """
    starting.lift()
    warming = Limit(scale.phase_limit)
    await warm_up(ask, scale)
    warming.lift()
    ask = whole_or_nothing(ask)
    sent = {name: _watched(phase, watch) for name, phase in phases(scale).items()}
    say(facts)
    while line := await asyncio.to_thread(sys.stdin.readline):
        running = Limit(scale.phase_limit)
        outcome = await run_once(ask=ask, workloads=sent, **json.loads(line))
        running.lift()
        say(asdict(outcome) | {"series": watch.series()})


def _watched(phase: Workload, watch: Watch) -> Workload:
    async def run(ask: Ask, rng: random.Random) -> list[Reply]:
        async with watch.sampling():
            replies = await phase(ask, rng)
        if not any(reply.tokens for reply in replies):
            raise RuntimeError("no request was answered: the engine is gone.")
        return replies

    return run
