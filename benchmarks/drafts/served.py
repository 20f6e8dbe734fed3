# SPDX-License-Identifier: Apache-2.0
"""In an engine's process: workloads served one by one, and what is told of each."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import sglang_prefix
from benchmarks.drafts.traffic import Scale, decoding, spelled_with, workloads
from benchmarks.elastic_engine import Limit, whole_or_nothing
from benchmarks.low_load.observed import LAST_RESULTS_S, Observed
from benchmarks.passes import compiled, log
from benchmarks.passes.engines import Running
from benchmarks.passes.log import Pass, busy_seconds
from benchmarks.prefix_sides import say
from benchmarks.prefix_workloads import WARM_UP, Ask, Reply, Workload, run_once

START_LIMIT_S = 480
"""An engine that takes longer hangs: its process ends, and the others go on."""
WORKLOAD_LIMIT_S = 300


@dataclass(frozen=True)
class Verified:
    """Since the engine started."""

    verifications: int
    """Of a sequence's drafts, whatever became of them."""
    tokens: int
    """That they gave: accepted drafts, and the token after them."""

    def since(self, before: Verified) -> Verified:
        """What came after."""
        return Verified(
            self.verifications - before.verifications, self.tokens - before.tokens
        )

    @property
    def length(self) -> float | None:
        """Tokens of a verification; None without any."""
        return self.tokens / self.verifications if self.verifications else None


class VllmCounters:
    """vLLM's own counters of drafts, in this process."""

    def __init__(self, running: Running) -> None:
        """Ask as vLLM's `AsyncLLM` is asked elsewhere."""
        self.ask = running.ask

    def verified(self) -> Verified:
        """What they say now."""
        from prometheus_client import REGISTRY

        found = {
            sample.name: int(sample.value)
            for metric in REGISTRY.collect()
            for sample in metric.samples
            if sample.name.startswith("vllm:spec_decode")
        }
        verifications = found.get("vllm:spec_decode_num_drafts_total", 0)
        accepted = found.get("vllm:spec_decode_num_accepted_tokens_total", 0)
        return Verified(verifications, verifications + accepted)


class SglangCounters:
    """What SGLang says of each answer's drafts, added up."""

    def __init__(self, running: Running) -> None:
        """Ask `running.engine`, and read what comes with the last step."""
        self._engine = running.engine
        self._verified = Verified(0, 0)
        self.ask = sglang_prefix.asker(self)

    def verified(self) -> Verified:
        """Of answers that are there."""
        return self._verified

    async def async_generate(self, **request: Any) -> AsyncIterator[Any]:
        """Like `Engine.async_generate`, for streams."""
        return self._watched(await self._engine.async_generate(**request))

    async def _watched(self, steps: AsyncIterator[Any]) -> AsyncIterator[Any]:
        last: dict[str, Any] = {}
        async for step in steps:
            last = step
            yield step
        told = last.get("meta_info", {})
        if verifications := told.get("spec_verify_ct", 0):
            # The first token comes with the prompt.
            tokens = told["completion_tokens"] - 1
            self._verified = Verified(
                self._verified.verifications + verifications,
                self._verified.tokens + tokens,
            )


COUNTERS: Mapping[str, Callable[[Running], VllmCounters | SglangCounters]] = {
    "vllm": VllmCounters,
    "sglang": SglangCounters,
}


async def answer_until_closed(
    engine: str, running: Running, scale: Scale, vocabulary: int, starting: Limit
) -> None:
    """Warm up; then a line of JSON in, a line with the outcome out.

    Args:
        engine: "vllm" or "sglang".
        running: the engine.
        scale: of the traffic.
        vocabulary: tokens that the model knows.
        starting: to be lifted, for the engine is there.
    """
    starting.lift()
    counters = COUNTERS[engine](running)
    ask = spelled_with(vocabulary, whole_or_nothing(counters.ask))
    warming = Limit(WORKLOAD_LIMIT_S)
    for workload in workloads(scale.shorter()).values():
        await workload(ask, random.Random(WARM_UP))
    warming.lift()
    say(running.facts)
    sent = workloads(scale)
    while line := await asyncio.to_thread(sys.stdin.readline):
        told = json.loads(line)
        limit = Limit(WORKLOAD_LIMIT_S)
        kept = Kept(sent[told["name"]], counters)
        found = await _outcome(running.passes, ask, kept, told["name"], told["seed"])
        limit.lift()
        say(found)


async def _outcome(
    written: Path, ask: Ask, kept: Kept, name: str, seed: int
) -> dict[str, Any]:
    observed = Observed(kept.run)
    outcome = await run_once(name, ask, seed, {name: observed.run})
    await asyncio.sleep(LAST_RESULTS_S)
    passes = log.read(written, observed.began, observed.ended)
    return (
        asdict(outcome)
        | observed.summary()
        | of_answers(kept.replies, observed.ended - observed.began)
        | of_passes(passes, decoding(name))
        | {"acceptance": kept.verified().length, "seed": seed}
        | {
            "slowest": log.slowest(passes),
            "kernels": compiled.read(written, observed.began, observed.ended),
        }
    )


class Kept:
    """A workload, its answers, and what was verified before it."""

    def __init__(
        self, workload: Workload, counters: VllmCounters | SglangCounters
    ) -> None:
        """Of one run of it."""
        self._workload, self._counters = workload, counters
        self.replies: list[Reply] = []
        self._before = Verified(0, 0)

    async def run(self, ask: Ask, rng: random.Random) -> list[Reply]:
        """A `Workload`."""
        self._before = self._counters.verified()
        self.replies = await self._workload(ask, rng)
        return self.replies

    def verified(self) -> Verified:
        """Since the run began."""
        return self._counters.verified().since(self._before)


def of_answers(replies: Sequence[Reply], seconds: float) -> dict[str, float]:
    """Tokens generated, and how many in a second.

    Args:
        replies: all of a run.
        seconds: from the first request to the last answer.
    """
    tokens = sum(len(reply.tokens) for reply in replies)
    return {"generated": tokens, "tokens_per_s": round(tokens / seconds, 2)}


def of_passes(passes: Sequence[Pass], decoding: int | None) -> dict[str, float]:
    """Sequences at once, and the time of a step.

    `at_once` is the largest number of sequences that took part in a pass, `decoding`
    the mean of those that decoded, by time.  `step_ms` is the median time of passes
    that prefilled nothing; where so many sequences decode by plan, of those in which
    all of them took part.

    Args:
        passes: in the order of their results.
        decoding: sequences that decode at once by plan; None for other traffic.
    """
    pairs = list(zip(passes, busy_seconds(passes), strict=True))
    steps = [
        (one.decodes, busy)
        for one, busy in pairs
        if one.decodes and not one.prefills and decoding in (None, one.decodes)
    ]
    decoded = [(one.decodes, busy) for one, busy in pairs if one.decodes]
    time = sum(busy for _, busy in decoded)
    return {
        "passes": len(passes),
        "at_once": max((one.prefills + one.decodes for one in passes), default=0),
        "decoding": round(sum(n * busy for n, busy in decoded) / time, 2)
        if time
        else 0,
        "steps": len(steps),
        "step_ms": round(1000 * statistics.median(b for _, b in steps), 3)
        if steps
        else 0.0,
    }
