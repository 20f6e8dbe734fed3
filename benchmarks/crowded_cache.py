# SPDX-License-Identifier: Apache-2.0
"""What a crowd restores: fixed and elastic pools, with and without waiting.

Replays workloads of `prefix_workloads` on the bookkeeping alone, at the shapes of a
model and the memory of `vllm_prefix`: steps like an engine's, but no model, no device
and no time.  It tells what is restored, how many steps that takes and how many
sequences are preempted.  Without "waiting for memory" every sequence starts that can,
whatever it evicts.  With "sharing", sequences wait for one that computes their
beginning.

    python -m benchmarks.crowded_cache --out benchmarks/results/NAME
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.no_model.bookkeeper import MAX_RUNNING, Bookkeeper
from benchmarks.prefix_models import MODELS, cache_layout
from benchmarks.prefix_sides import write
from benchmarks.prefix_workloads import WORKLOADS
from hybrid_plugin.config import HybridConfig
from hybrid_plugin.core.cache import HybridCache
from hybrid_plugin.core.memory.layout import CacheLayout
from hybrid_plugin.core.policy.eviction import LeastRecentlyUsed
from hybrid_plugin.engine.cache_assembly import build_cache, build_pools, eviction_for
from hybrid_plugin.engine.memory_blocks import block_bytes
from hybrid_plugin.engine.sizing import EngineLimits, divide

PAGE, LONGEST = 16, 8192


class GreedyCache(HybridCache):
    """Gives every sequence the memory that it can get."""

    def _must_wait(self, *args: Any) -> bool:
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
    """A cache as an engine's adapter makes it.

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
        cache_layout(model, PAGE, state_itemsize),
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
    kind = HybridCache if waits else GreedyCache
    cache = kind(
        pages=pools.pages,
        slots=pools.slots,
        page_size=PAGE,
        policy=options.snapshot_policy(PAGE),
        broker=pools.broker,
        eviction=(eviction or eviction_for)(plan.layout),
    )
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
        "| model | workload | pools | waiting for memory | sharing | restored | "
        "steps | with moves | preemptions |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['model']} | {r['workload']} | {r['pools']} | {r['waiting']} | "
        f"{r['sharing']} | "
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
    for model, workload, elastic, (waits, follows) in product(
        args.models, args.workloads, (False, True), kinds
    ):
        cache = make_cache(model, budget, elastic=elastic, waits=waits, follows=follows)
        row = {
            "model": model,
            "workload": workload,
            "pools": "elastic" if elastic else "fixed",
            "waiting": "yes" if waits else "no",
            "sharing": "yes" if follows else "no",
        }
        rows.append(row | asyncio.run(replay(cache, workload, args.rounds)))
    print(table(rows))
    if args.out:
        document = {"cache_gib": args.cache_gib, "rounds": args.rounds, "rows": rows}
        write(args.out, ".json", json.dumps(document, indent=1))
        write(args.out, ".md", table(rows))


if __name__ == "__main__":
    main()
