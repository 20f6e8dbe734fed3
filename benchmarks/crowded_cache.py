# SPDX-License-Identifier: Apache-2.0
"""What a crowd restores: fixed and elastic pools, hot snapshots kept, waiting or not.

Replays workloads of `prefix_workloads` on the bookkeeping alone, at the shapes of a
model and the memory of `vllm_prefix`: steps like an engine's, but no model, no device
and no time.  It tells what is restored, how many steps that takes and how many
sequences are preempted.  "Not kept" is the same cache without the idea of hot ones:
every sequence starts that can.  With "sharing", sequences wait for one that computes
their beginning.

    python -m benchmarks.crowded_cache --out benchmarks/results/NAME
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.prefix_models import MODELS, cache_layout
from benchmarks.prefix_sides import write
from benchmarks.prefix_workloads import WORKLOADS, Reply
from hybrid_plugin.config import HybridConfig
from hybrid_plugin.core.cache import HybridCache
from hybrid_plugin.core.commands import Map, Unmap
from hybrid_plugin.core.policy.in_batch_sharing import (
    LOOK_AHEAD,
    InBatchPrefixSharing,
    waiting_prefill,
)
from hybrid_plugin.engine.cache_assembly import build_cache, build_pools
from hybrid_plugin.engine.memory_blocks import block_bytes
from hybrid_plugin.engine.sizing import EngineLimits, divide

PAGE, LONGEST = 16, 8192
MAX_RUNNING, MAX_STEP_TOKENS = 64, 8192
"""As in `vllm_prefix`."""


class GreedyCache(HybridCache):
    """Gives every sequence the slot that it can get."""

    def _must_wait(self, *args: Any) -> bool:
        return False


@dataclass(eq=False)
class Request:
    """A sequence, from its arrival to its last token."""

    name: str
    tokens: array[int]
    prompt: int
    length: int
    """Tokens at its end."""
    done: asyncio.Future[None]
    hit: int | None = None
    computed: int = 0
    resumed: bool = False


@dataclass(eq=False)
class Bookkeeper:
    """Schedules like an engine, on a cache, and computes nothing."""

    cache: HybridCache
    waiting: list[Request] = field(default_factory=list)
    running: list[Request] = field(default_factory=list)
    steps: int = 0
    preemptions: int = 0
    moving: int = 0
    """Steps before which memory moved: a device waits there."""
    following: InBatchPrefixSharing = field(init=False)
    _count: int = 0
    _rng: random.Random = field(default_factory=lambda: random.Random(0))

    def __post_init__(self) -> None:
        self.following = InBatchPrefixSharing(self.cache)

    async def ask(self, prompt: Sequence[int], max_tokens: int) -> Reply:
        """Serve a request among others."""
        self._count += 1
        request = Request(
            str(self._count),
            array("q", prompt),
            len(prompt),
            len(prompt) + max_tokens,
            asyncio.get_running_loop().create_future(),
        )
        self.waiting.append(request)
        await request.done
        answer = tuple(request.tokens[request.prompt :])
        return Reply(answer, request.prompt, request.hit or 0, 0.0)

    async def run(self) -> None:
        """Step while there is something to do, for ever."""
        while True:
            await asyncio.sleep(0)
            if self.waiting or self.running:
                self.step()

    def step(self) -> None:
        """Grow what runs, admit what waits, compute."""
        self.steps += 1
        work: dict[Request, int] = {}
        budget = MAX_STEP_TOKENS
        for request in list(self.running):
            if request in self.running and budget:
                budget = self._go_on(request, work, budget)
        self._plan()
        for request in list(self.waiting):
            if not budget or len(self.running) >= MAX_RUNNING:
                break
            if self.following.holds(request.name):
                continue
            spent = self._admit(request, work, budget)
            if not spent:
                break
            budget -= spent
        assert work, "nothing can run"
        commands = self.cache.drain_commands()
        self.moving += any(isinstance(c, Map | Unmap) for c in commands)
        for request, end in work.items():
            self._compute(request, end)

    def _plan(self) -> None:
        if self.following is not None:
            self.following.plan(
                [
                    (
                        r.name,
                        partial(waiting_prefill, self.cache, r.name, r.tokens, None),
                    )
                    for r in self.waiting[:LOOK_AHEAD]
                ]
            )

    def _go_on(self, request: Request, work: dict[Request, int], budget: int) -> int:
        end = min(request.computed + budget, len(request.tokens))
        stops = self.cache.snapshot_positions_of(request.name)
        end = self.cache.chunk_end(stops, request.computed, end, len(request.tokens))
        while self.cache.grow(request.name, end) is None:
            last = self.running[-1]
            budget += work.pop(last, last.computed) - last.computed
            self._preempt(last)
            if last is request:
                return budget
        work[request] = end
        return budget - (end - request.computed)

    def _preempt(self, request: Request) -> None:
        self.preemptions += 1
        self.running.remove(request)
        self.cache.finish(request.name, request.tokens, request.computed)
        request.computed, request.resumed = 0, True
        self.waiting.insert(0, request)

    def _admit(self, request: Request, work: dict[Request, int], budget: int) -> int:
        keep = self.following.pauses_of(request.name)
        found = self.cache.look_up(request.tokens, snapshot_at=keep)
        length = len(request.tokens)
        hit = found.match.length
        end = self.cache.chunk_end(
            found.snapshot_positions, hit, min(hit + budget, length), length
        )
        admission = self.cache.admit(
            request.name,
            found,
            num_tokens=end,
            reserve_tokens=length,
            resumed=request.resumed,
        )
        if admission is None:
            return 0
        self.waiting.remove(request)
        self.running.append(request)
        request.computed = hit
        request.hit = hit if request.hit is None else request.hit
        work[request] = end
        return end - hit

    def _compute(self, request: Request, end: int) -> None:
        request.computed = end
        if self.cache.is_prefilling(request.name):
            self.cache.advance(request.name, end)
        if end < len(request.tokens):
            return
        request.tokens.append(self._rng.randrange(1 << 15))
        if len(request.tokens) == request.length:
            self.running.remove(request)
            self.cache.finish(request.name, request.tokens, end)
            request.done.set_result(None)


def make_cache(
    model: str, budget: int, *, elastic: bool, kept: bool, follows: bool = True
) -> HybridCache:
    """A cache as an engine's adapter makes it."""
    options = HybridConfig() if follows else HybridConfig(in_batch_prefix_min_tokens=0)
    plan = divide(
        cache_layout(model, PAGE),
        budget,
        HybridConfig(elastic=elastic),  # refuse rather than fall back
        EngineLimits(
            max_model_len=LONGEST,
            max_sequences=MAX_RUNNING,
            block_bytes=block_bytes(budget, "cuda"),
        ),
        logging.getLogger(__name__),
    )
    if kept:
        return build_cache(plan, options)
    pools = build_pools(plan)
    cache = GreedyCache(
        pages=pools.pages,
        slots=pools.slots,
        page_size=PAGE,
        policy=options.snapshot_policy(PAGE),
        broker=pools.broker,
    )
    retention = cache.tree.retention
    retention.is_hot = lambda snapshot, now: False  # type: ignore[method-assign]
    return cache


async def replay(cache: HybridCache, workload: str, rounds: int) -> dict[str, Any]:
    """Serve a workload with several seeds, one after the other."""
    engine = Bookkeeper(cache)
    stepping = asyncio.create_task(engine.run())
    replies = []
    for seed in range(rounds):
        replies += await WORKLOADS[workload](engine.ask, random.Random(seed))
    stepping.cancel()
    return {
        "restored": sum(r.cached_tokens for r in replies)
        / sum(r.prompt_tokens for r in replies),
        "steps": engine.steps,
        "preemptions": engine.preemptions,
        "moving": engine.moving,
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """In Markdown."""
    lines = [
        "| model | workload | pools | hot snapshots | following | restored | steps | "
        "with moves | preemptions |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['model']} | {r['workload']} | {r['pools']} | {r['hot']} | "
        f"{r['following']} | "
        f"{r['restored']:.1%} | {r['steps']} | {r['moving']} | {r['preemptions']} |"
        for r in rows
    ]
    return "\n".join(lines)


def main() -> None:
    """Replay everything and report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    shapes = [model for model in MODELS if model != "tiny"]
    parser.add_argument("--models", nargs="*", choices=shapes, default=shapes)
    parser.add_argument("--workloads", nargs="*", choices=WORKLOADS, default=WORKLOADS)
    parser.add_argument("--cache-gib", type=float, default=8, help="(%(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="(%(default)s)")
    parser.add_argument("--out", type=Path, help="path without suffix")
    args = parser.parse_args()
    rows = []
    budget = int(args.cache_gib * 2**30)
    kinds = ((False, False), (True, False), (True, True))
    for model, workload, elastic, (kept, follows) in product(
        args.models, args.workloads, (False, True), kinds
    ):
        cache = make_cache(model, budget, elastic=elastic, kept=kept, follows=follows)
        row = {
            "model": model,
            "workload": workload,
            "pools": "elastic" if elastic else "fixed",
            "hot": "kept" if kept else "not kept",
            "following": "yes" if follows else "no",
        }
        rows.append(row | asyncio.run(replay(cache, workload, args.rounds)))
    print(table(rows))
    if args.out:
        document = {"cache_gib": args.cache_gib, "rounds": args.rounds, "rows": rows}
        write(args.out, ".json", json.dumps(document, indent=1))
        write(args.out, ".md", table(rows))


if __name__ == "__main__":
    main()
