# SPDX-License-Identifier: Apache-2.0
"""The simulator's models of stock's caches beside the engines' own code.

Both serve the same workloads in the same memory; the engines run without a model, as
in `cache_curves`.  Once for each engine, in its environment:

    python -m benchmarks.stock_models vllm --out benchmarks/results/stock-models-vllm
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.curves.loads import own_loads
from benchmarks.curves.shapes import CHUNK, MAX_RUNNING, Task
from benchmarks.curves.sides import Side, run_side
from benchmarks.no_model.virtual_engine import VirtualEngine
from benchmarks.prefix_models import write_model
from benchmarks.prefix_workloads import Reply
from hybrid_plugin.tools.plan.estimate import aligned_blocks, static_pools
from hybrid_plugin.tools.plan.model import load_shape
from hybrid_plugin.tools.plan.shape import ModelShape
from hybrid_plugin.tools.simulate.known_costs import DEFAULT_COSTS
from hybrid_plugin.tools.simulate.served_cache import ServedCache
from hybrid_plugin.tools.simulate.stock_sglang import SglangModel
from hybrid_plugin.tools.simulate.stock_vllm import VllmModel

GIB = 1 << 30
SHAPE, LONGEST = "qwen3-next", 16_000
WORKLOADS = ("few-shot", "chats", "agents", "system-2k", "documents")
MEMORY = (2, 4, 8)
"""GiB."""


def model_shape() -> ModelShape:
    """With the states in bfloat16, as in the engines."""
    with TemporaryDirectory() as folder:
        write_model(SHAPE, Path(folder))
        return load_shape(Path(folder), ranks=1, kv_dtype=None, state_dtype="bfloat16")


def restored(engine: str, workload: str, gib: int) -> float:
    """Share of prompt tokens that an engine's model restores."""
    shape, budget = model_shape(), gib * GIB
    cache: ServedCache = (
        VllmModel(aligned_blocks(shape, budget))
        if engine == "vllm"
        else SglangModel(static_pools(shape, budget, 1))
    )
    virtual = VirtualEngine(
        cache, DEFAULT_COSTS.costs, chunk=CHUNK, max_running=MAX_RUNNING
    )

    async def run(_: Any, rng: random.Random) -> list[Reply]:
        async def ask(prompt: Sequence[int], answer: Sequence[int]) -> Reply:
            return await virtual.ask(prompt, len(answer), answer)

        return await own_loads()[workload].run(ask, rng)

    replies = virtual.drive(run, seed=0)
    cached = sum(reply.cached_tokens for reply in replies)
    return cached / sum(reply.prompt_tokens for reply in replies)


def measured(engine: str, points: Sequence[tuple[str, int]]) -> list[float]:
    """Share that its own code restores, by workload and GiB."""
    side = Side(engine, Path(sys.executable), f"benchmarks.curves.{engine}_side")
    tasks = [Task(SHAPE, w, 0, None, gib * GIB, LONGEST, engine) for w, gib in points]
    rows: list[dict[str, Any]] = []
    run_side(side, tasks, {}, rows.append)
    if any("failed" in row for row in rows):
        raise RuntimeError(f"{engine} could not serve: {rows}")
    return [row["restored"] for row in rows]


def main() -> None:
    """Measure one engine and its model, and write both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=("vllm", "sglang"))
    parser.add_argument("--out", type=Path, required=True, help="without an ending")
    args = parser.parse_args()
    points = [(workload, gib) for workload in WORKLOADS for gib in MEMORY]
    rows = [
        {"workload": w, "gib": g, "engine": real, "model": restored(args.engine, w, g)}
        for (w, g), real in zip(points, measured(args.engine, points), strict=True)
    ]
    args.out.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")
    text = _table(args.engine, rows)
    args.out.with_suffix(".md").write_text(text)
    print(text)


def _table(engine: str, rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        f"# The model of {engine}'s own cache",
        "",
        "Share of prompt tokens restored, by `benchmarks/stock_models.py`, with the "
        "shapes of Qwen3-Next.",
        "",
        "| workload | GiB | engine's code | model | difference, points |",
        "|---|---|---|---|---|",
    ]
    off = [100 * (row["model"] - row["engine"]) for row in rows]
    for row, points in zip(rows, off, strict=True):
        lines.append(
            f"| {row['workload']} | {row['gib']} | {row['engine']:.1%} | "
            f"{row['model']:.1%} | {points:+.1f} |"
        )
    sizes = [abs(points) for points in off]
    lines += [
        "",
        f"Off by {statistics.median(sizes):.1f} points in the median and by "
        f"{max(sizes):.1f} at most.",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
