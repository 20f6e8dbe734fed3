# SPDX-License-Identifier: Apache-2.0
"""What a crowd restores: fixed and elastic pools, with and without waiting.

Replays workloads on the bookkeeping alone, at the shapes of a model: steps like an
engine's, but no model and no device.  It tells what is restored, how many steps that
takes, how many sequences are preempted, and a *cost* in which both count: thousands of
tokens of prefill, where a step counts as 512 (`hybrid_plugin/core/policy/costs.py`).
Without "waiting for memory" every sequence starts that can, whatever it evicts.  With
"sharing", sequences wait for one that computes their beginning.

The workloads are those of `prefix_workloads`, and some more whose answers are 16 to 112
tokens long, so that sequences end one by one.

    python -m benchmarks.crowded_cache --out benchmarks/results/NAME
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.no_model.bookkeeper import MAX_RUNNING, Bookkeeper
from benchmarks.prefix_models import MODELS, cache_layout
from benchmarks.prefix_sides import write
from benchmarks.prefix_workloads import (
    WORKLOADS,
    Ask,
    Reply,
    Workload,
    at_most,
    conversations,
    text,
)
from hybrid_plugin.config import HybridConfig
from hybrid_plugin.core.cache import HybridCache
from hybrid_plugin.core.memory.layout import CacheLayout
from hybrid_plugin.core.policy.concurrency import ConcurrencyTradeoff
from hybrid_plugin.core.policy.costs import STEP_TOKENS
from hybrid_plugin.core.policy.eviction import LeastRecentlyUsed
from hybrid_plugin.engine.cache_assembly import build_cache, build_pools, eviction_for
from hybrid_plugin.engine.memory_blocks import block_bytes
from hybrid_plugin.engine.sizing import EngineLimits, divide

PAGE, LONGEST = 16, 8192


def answer(rng: random.Random) -> int:
    """Tokens of an answer."""
    return rng.randint(16, 112)


def one_by_one(workload: Workload) -> Workload:
    """The same with answers of other lengths, so that sequences do not end together."""

    async def run(ask: Ask, rng: random.Random) -> list[Reply]:
        return await workload(lambda prompt, _: ask(prompt, answer(rng)), rng)

    return run


async def documents(ask: Ask, rng: random.Random) -> list[Reply]:
    """400 questions about 32 documents, some asked about more often; 48 at a time."""
    found = [text(rng, 3000) for _ in range(32)]
    shares = [1 / (rank + 1) for rank in range(32)]
    prompts = [rng.choices(found, shares)[0] + text(rng, 200) for _ in range(400)]
    return list(await at_most(48, [ask(prompt, answer(rng)) for prompt in prompts]))


async def nothing_shared(ask: Ask, rng: random.Random) -> list[Reply]:
    """160 requests at once that share nothing."""
    prompts = [text(rng, 1500) for _ in range(160)]
    return await asyncio.gather(*(ask(prompt, answer(rng)) for prompt in prompts))


ONE_BY_ONE: dict[str, Workload] = {
    "crowd, one by one": one_by_one(WORKLOADS["crowd"]),
    "shuffled groups": one_by_one(WORKLOADS["generated shared prefix"]),
    "documents, 48 at a time": documents,
    "chats, 40 at a time": conversations(80, 40, turns=5, opening=400, answer=answer),
    "nothing shared": nothing_shared,
}
ALL = WORKLOADS | ONE_BY_ONE


KINDS = {"neither": (False, False), "waits": (True, False), "both": (True, True)}
"""Whether sequences wait for memory, and for one that computes their beginning."""


class NeverWaits(ConcurrencyTradeoff):
    """Gives every sequence the memory that it can get."""

    def should_wait(self, lost: float, running: int) -> bool:
        """No price is too high."""
        return False


def make_cache(
    model: str,
    budget: int,
    *,
    elastic: bool,
    waits: bool,
    follows: bool = True,
    longest: int = LONGEST,
    state_itemsize: int = 4,
    eviction: Callable[[CacheLayout], LeastRecentlyUsed] | None = None,
) -> HybridCache:
    """A cache as an engine's adapter makes it, on a GPU with packed pages.

    Args:
        model: whose shapes it has.
        budget: bytes.
        elastic: whether memory moves between its pools.
        waits: False for a cache in which every sequence starts that can.
        follows: whether sequences wait for one that computes their beginning.
        longest: tokens of a sequence at most.
        state_itemsize: bytes of a number of the recurrent states.
        eviction: makes another eviction policy than the default.
    """
    options = HybridConfig() if follows else HybridConfig(in_batch_prefix_min_tokens=0)
    plan = divide(
        replace(cache_layout(model, PAGE, state_itemsize), packed=True),
        budget,
        HybridConfig(elastic=elastic),  # refuse rather than fall back
        EngineLimits(
            max_model_len=longest,
            max_sequences=MAX_RUNNING,
            block_bytes=block_bytes(budget, "cuda"),
        ),
        logging.getLogger(__name__),
    )
    if waits and eviction is None:
        return build_cache(plan, options)
    pools = build_pools(plan)
    return HybridCache(
        pages=pools.pages,
        slots=pools.slots,
        page_size=PAGE,
        policy=options.snapshot_policy(PAGE),
        broker=pools.broker,
        eviction=(eviction or eviction_for)(plan.layout),
        concurrency=ConcurrencyTradeoff() if waits else NeverWaits(),
    )


def replay(cache: HybridCache, workload: str, rounds: int) -> dict[str, Any]:
    """Serve a workload with several seeds, one after the other."""
    engine = Bookkeeper(cache)
    replies: list[Reply] = []
    for seed in range(rounds):
        replies += engine.drive(ALL[workload](engine.ask, random.Random(seed)))
    return {
        "restored": sum(r.cached_tokens for r in replies)
        / sum(r.prompt_tokens for r in replies),
        "steps": engine.steps,
        "cost": round((engine.steps * STEP_TOKENS + engine.tokens) / 1000),
        "preemptions": engine.preemptions,
        "moving": engine.moving,
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """In Markdown."""
    lines = [
        "| model | GiB | workload | pools | waiting for memory | sharing | restored | "
        "steps | cost | with moves | preemptions |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['model']} | {r['GiB']:g} | {r['workload']} | {r['pools']} | "
        f"{r['waiting']} | {r['sharing']} | {r['restored']:.1%} | {r['steps']} | "
        f"{r['cost']} | {r['moving']} | {r['preemptions']} |"
        for r in rows
    ]
    return "\n".join(lines)


def main() -> None:
    """Replay everything and report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    shapes = [model for model in MODELS if model != "tiny"]
    parser.add_argument("--models", nargs="*", choices=shapes, default=shapes)
    parser.add_argument("--workloads", nargs="*", choices=ALL, default=ALL)
    parser.add_argument("--cache-gib", type=float, nargs="*", default=[8], help="(8)")
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=KINDS)
    parser.add_argument("--rounds", type=int, default=2, help="(%(default)s)")
    parser.add_argument("--out", type=Path, help="path without suffix")
    args = parser.parse_args()
    rows = []
    for model, gib, workload, elastic, kind in product(
        args.models, args.cache_gib, args.workloads, (False, True), args.kinds
    ):
        waits, follows = KINDS[kind]
        cache = make_cache(
            model, int(gib * 2**30), elastic=elastic, waits=waits, follows=follows
        )
        row = {
            "model": model,
            "GiB": gib,
            "workload": workload,
            "pools": "elastic" if elastic else "fixed",
            "waiting": "yes" if waits else "no",
            "sharing": "yes" if follows else "no",
        }
        rows.append(row | replay(cache, workload, args.rounds))
    print(table(rows))
    if args.out:
        document = {"rounds": args.rounds, "rows": rows}
        write(args.out, ".json", json.dumps(document, indent=1))
        write(args.out, ".md", table(rows))


if __name__ == "__main__":
    main()
