# SPDX-License-Identifier: Apache-2.0
"""The plugin's cache behind engine-like steps: `crowded_cache`, elastic."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from benchmarks.crowded_cache import PAGE, make_cache
from benchmarks.curves.bound import Served, bound_hit_tokens
from benchmarks.curves.protocol import Load
from benchmarks.curves.serving import measure, serve_tasks
from benchmarks.curves.shapes import STATE_ITEMSIZE, Task, state_bytes
from benchmarks.no_model.bookkeeper import Bookkeeper
from benchmarks.prefix_models import token_bytes
from hybrid_plugin.core.memory.layout import CacheLayout
from hybrid_plugin.core.policy.eviction import LeastRecentlyUsed

BOUND = "bound"
LRU = "lru"


def engine_of(task: Task) -> Bookkeeper:
    """The cache of a task, behind steps.

    `ours` is as it is by default, and so it is for the bound; `ours:lru` evicts what
    was used least recently, and `ours:module:name` has the policy that a function or
    class of no arguments makes.
    """
    policy = task.cache.partition(":")[2]
    cache = make_cache(
        task.shape,
        task.memory,
        elastic=True,
        waits=True,
        longest=task.longest,
        state_itemsize=STATE_ITEMSIZE[task.shape],
        eviction=_eviction(policy) if policy else None,
    )
    return Bookkeeper(cache)


def serve(task: Task, load: Load) -> dict[str, Any]:
    """Serve a task."""
    engine = engine_of(task)
    row = measure(engine, load, task.seed)
    if task.cache == BOUND:
        hits = bound_of(task, engine)
        restored = hits / row["prompt_tokens"]
        return row | {"cached_tokens": hits, "restored": restored, "recomputed": None}
    return row | {"preemptions": engine.preemptions, "moving": engine.moving}


def bound_of(task: Task, engine: Bookkeeper) -> int:
    """Hit tokens that no cache can exceed, in the order in which ours served."""
    # The last token of an answer is sampled, not computed.
    served = [Served(r.tokens[:-1], r.prompt, r.end) for r in engine.served]
    return bound_hit_tokens(
        served,
        task.memory,
        page_size=PAGE,
        page_bytes=PAGE * token_bytes(task.shape),
        state_bytes=state_bytes(task.shape),
    )


def _eviction(policy: str) -> Callable[[CacheLayout], LeastRecentlyUsed]:
    module, _, name = policy.partition(":")
    if not name and policy != LRU:
        raise ValueError(f"{policy!r} is no eviction policy: take {LRU} or MODULE:NAME")

    def make(layout: CacheLayout) -> LeastRecentlyUsed:
        if not name:
            return LeastRecentlyUsed()
        made: LeastRecentlyUsed = getattr(import_module(module), name)()
        return made

    return make


if __name__ == "__main__":
    serve_tasks(serve)
