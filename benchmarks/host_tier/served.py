# SPDX-License-Identifier: Apache-2.0
"""In an engine's process: one run of a workload, and what is told of it."""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.elastic_engine import Limit, whole_or_nothing
from benchmarks.host_tier.traffic import (
    AGENTS,
    ALONE,
    BESIDE,
    RETURN,
    Scale,
    Step,
    steps,
    workloads,
)
from benchmarks.low_load.observed import LAST_RESULTS_S
from benchmarks.passes import log
from benchmarks.passes.engines import Running
from benchmarks.passes.log import Pass, busy_seconds
from benchmarks.prefix_sides import say
from benchmarks.prefix_workloads import (
    WARM_UP,
    Ask,
    Reply,
    Workload,
    percentiles,
    run_once,
)

START_LIMIT_S = 480
"""An engine that takes longer hangs: its process ends, and the others go on."""
PUBLISHED_S = 0.3
"""After the last answer, until the engine has published its counters."""
_HOST = "hybrid_cache_host_"
_TOTAL = "_total"


@dataclass(frozen=True)
class Asked:
    """A request."""

    reply: Reply
    seconds: float
    """From asking to its last token."""

    @property
    def ms_per_token(self) -> float | None:
        """Of the tokens after the first; None without any."""
        tokens = len(self.reply.tokens) - 1
        if tokens < 1:
            return None
        return 1000 * (self.seconds - self.reply.ttft_s) / tokens


class Timed:
    """A workload, and the times of its requests."""

    def __init__(self, workload: Workload) -> None:
        """Of one run of it."""
        self._workload = workload
        self.asked: list[Asked] = []
        self.replies: list[Reply] = []
        self.began = self.ended = 0.0
        """In seconds of `time.monotonic`."""

    async def run(self, ask: Ask, rng: random.Random) -> list[Reply]:
        """A `Workload`."""

        async def timed(prompt: Sequence[int], max_tokens: int) -> Reply:
            begin = time.monotonic()
            reply = await ask(prompt, max_tokens)
            self.asked.append(Asked(reply, time.monotonic() - begin))
            return reply

        self.began = time.monotonic()
        self.replies = await self._workload(timed, rng)
        self.ended = time.monotonic()
        return self.replies


def totals(metrics: Iterable[Any]) -> dict[str, float]:
    """The plugin's counters of host memory, without what their names share.

    Args:
        metrics: of `prometheus_client`; without the plugin there are none.
    """
    return {
        sample.name.removeprefix(_HOST).removesuffix(_TOTAL): sample.value
        for metric in metrics
        for sample in metric.samples
        if sample.name.startswith(_HOST) and sample.name.endswith(_TOTAL)
    }


def _of_this_process() -> dict[str, float]:
    from prometheus_client import REGISTRY

    return totals(REGISTRY.collect())


def _of_shared_files() -> dict[str, float]:
    """From the files that SGLang's processes share their counters in."""
    from prometheus_client.multiprocess import MultiProcessCollector

    folder = Path(os.environ["PROMETHEUS_MULTIPROC_DIR"])
    files = [str(path) for path in folder.glob("counter_*.db")]
    return totals(MultiProcessCollector.merge(files))


COUNTERS: Mapping[str, Callable[[], dict[str, float]]] = {
    "vllm": _of_this_process,
    "sglang": _of_shared_files,
}


def of_requests(asked: Sequence[Asked]) -> dict[str, float]:
    """Their number, mean time, and the tokens that they generated."""
    return {
        "requests": len(asked),
        "request_ms_mean": round(
            1000 * statistics.mean(one.seconds for one in asked), 2
        ),
        "generated": sum(len(one.reply.tokens) for one in asked),
    }


def of_agents(replies: Sequence[Reply], steps: Sequence[Step]) -> dict[str, float]:
    """Times to the first token of agents that come back.

    Nothing of what an agent begins with but its system prompt has been computed before,
    so that its first step says little about a cache.

    Args:
        replies: of the workload `agents`.
        steps: what they are replies to.
    """
    began: set[int] = set()
    back = []
    for reply, step in zip(replies, steps, strict=True):
        if step.agent in began:
            back.append(1000 * reply.ttft_s)
        began.add(step.agent)
    return {"back": len(back), **percentiles("back_ttft_ms", back)}


def of_prefixes(replies: Sequence[Reply], prefixes: int) -> dict[str, Any]:
    """Times to the first token of prefixes that come, and that come back.

    Args:
        replies: of the workload `returning`.
        prefixes: as many come first, and as many last.
    """
    first, last = replies[:prefixes], replies[-prefixes:]
    return {
        "first_ttft_ms": [round(1000 * one.ttft_s, 2) for one in first],
        "back_ttft_ms": [round(1000 * one.ttft_s, 2) for one in last],
        "back_prompt_tokens": [one.prompt_tokens for one in last],
        "back_cached_tokens": [one.cached_tokens for one in last],
    }


def of_decoding(asked: Sequence[Asked], decoded: int) -> dict[str, float]:
    """Milliseconds a token of the sequences that decode, and the prompts beside them.

    Args:
        asked: of the workload `decoding`.
        decoded: tokens of a sequence that decodes.
    """
    times = [
        one.ms_per_token
        for one in asked
        if len(one.reply.tokens) == decoded and one.ms_per_token is not None
    ]
    found: dict[str, float] = {"beside": len(asked) - len(times)}
    return found | ({"token_ms": round(statistics.mean(times), 3)} if times else {})


def of_passes(passes: Sequence[Pass]) -> dict[str, float]:
    """Passes that only decode: number, median and mean time.

    The time of a pass is that from the last pass's result to its own.

    Args:
        passes: in the order of their results.
    """
    pairs = zip(passes, busy_seconds(passes), strict=True)
    times = [1000 * busy for one, busy in pairs if one.decodes and not one.prefills]
    found: dict[str, float] = {"passes": len(passes), "decode_passes": len(times)}
    if times:
        found["decode_pass_ms_p50"] = round(statistics.median(times), 3)
        found["decode_pass_ms_mean"] = round(statistics.mean(times), 3)
    return found


async def answer_until_closed(
    engine: str, running: Running, scale: Scale, starting: Limit
) -> None:
    """Warm up; then a line of JSON in, a line with the outcome out.

    Args:
        engine: "vllm" or "sglang".
        running: the engine.
        scale: of the traffic.
        starting: to be lifted, for the engine is there.
    """
    starting.lift()
    ask = whole_or_nothing(running.ask)
    warming = Limit(scale.limit_s)
    for workload in workloads(scale.shorter()).values():
        await workload(ask, random.Random(WARM_UP))
    warming.lift()
    say(running.facts)
    while line := await asyncio.to_thread(sys.stdin.readline):
        told = json.loads(line)
        limit = Limit(scale.limit_s)
        found = await _outcome(engine, running.passes, ask, scale, **told)
        limit.lift()
        say(found)


async def _outcome(
    engine: str, written: Path, ask: Ask, scale: Scale, name: str, seed: int
) -> dict[str, Any]:
    before = COUNTERS[engine]()
    timed = Timed(workloads(scale)[name])
    outcome = await run_once(name, ask, seed, {name: timed.run})
    await asyncio.sleep(max(LAST_RESULTS_S, PUBLISHED_S))
    host = {
        name: value - before.get(name, 0) for name, value in COUNTERS[engine]().items()
    }
    passes = log.read(written, timed.began, timed.ended)
    found = asdict(outcome) | of_requests(timed.asked) | of_passes(passes)
    if name == AGENTS:
        found |= of_agents(timed.replies, steps(random.Random(seed), scale))
    if name == RETURN:
        found |= of_prefixes(timed.replies, scale.prefixes)
    if name in (ALONE, BESIDE):
        found |= of_decoding(timed.asked, scale.decoded)
    return found | {"seed": seed, "host": host}
