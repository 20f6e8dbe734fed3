# SPDX-License-Identifier: Apache-2.0
"""What vLLM restores with and without the plugin, on a machine without a GPU.

vLLM's own engine, scheduler and cache serve the workloads of `prefix_workloads` at the
shapes of published models, but no model computes anything (`no_model`).  It tells what
is restored, in how many steps, and what the scheduler costs the host; not how long a
step takes.  Every configuration has a process of its own.

vLLM cuts the memory on a GPU in other ways than on a CPU, so its own cache gets the
block size that it has on a GPU.  With that it restores what it restored on an H200, to
a point (`results/vllm-prefix-*.md`).  The plugin's pages have 32 tokens, 16 there.

    python -m benchmarks.vllm_bookkeeping --out benchmarks/results/NAME
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import vllm_prefix
from benchmarks.prefix_models import write_model
from benchmarks.prefix_sides import MARK, check_plugin, machine, say, write
from benchmarks.prefix_workloads import WORKLOADS, run_once
from benchmarks.vllm_prefix import CONFIGURATIONS, EARLIER, FIXED, PLUGIN

Row = dict[str, Any]

OF_A_GPU = ("compilation_config", "gdn_prefill_backend", "gpu_memory_utilization")
"""Arguments of `vllm_prefix` that say nothing to a scheduler."""
CPU_PAGE = 32
"""The least that attention on a CPU takes."""
SCRATCH = Path(tempfile.gettempdir()) / "hybrid-bookkeeping"
GPU_BLOCKS = {
    "qwen3-next": 544,
    "qwen3.5-4b": 528,
    "nemotron-h-8b": 1040,
    "falcon-h1-7b": 3104,
}
"""Tokens in a block of vLLM 0.33 on an H200, as `vllm_prefix` found them."""


def engine_arguments(name: str, model: str, cache_gib: int) -> dict[str, Any]:
    """Of a configuration: those of `vllm_prefix`, but for what concerns the device."""
    asked = argparse.Namespace(model=model, cache_gib=cache_gib)
    shared = vllm_prefix.engine_arguments(asked)
    ours = name in (PLUGIN, FIXED)
    return {
        **{key: value for key, value in shared.items() if key not in OF_A_GPU},
        "model": str(SCRATCH / model),
        "enforce_eager": True,
        "enable_prefix_caching": True,
        "block_size": CPU_PAGE if ours else GPU_BLOCKS[model],
        **CONFIGURATIONS[name],
    }


def serve(arguments: dict[str, Any], workloads: list[str], rounds: int) -> None:
    """Be one configuration's process: print a row for each workload."""
    from vllm import __version__

    from benchmarks.no_model.vllm_engine import SteppedEngine

    check_plugin("vllm")
    engine = SteppedEngine(arguments)

    async def measure(workload: str, seed: int) -> Row:
        stepping = asyncio.ensure_future(engine.run())
        steps, seconds = engine.steps, engine.host_seconds
        outcome = await run_once(workload, engine.ask, seed)
        stepping.cancel()
        steps = engine.steps - steps
        return {
            "restored": outcome.cached_tokens / outcome.prompt_tokens,
            "steps": steps,
            "steps to first token": outcome.ttft_ms_p50 / 1000,
            "host ms a step": 1000 * (engine.host_seconds - seconds) / steps,
        }

    for workload in workloads:
        found = [asyncio.run(measure(workload, seed)) for seed in range(rounds)]
        row = {name: statistics.median(one[name] for one in found) for name in found[0]}
        say({"workload": workload, "vllm": __version__} | row)


def rows_of(name: str, model: str, args: argparse.Namespace) -> list[Row]:
    """What a configuration's process prints."""
    asked = ["benchmarks.vllm_bookkeeping", "--one", name]
    asked += ["--models", model, "--cache-gib", str(args.cache_gib)]
    asked += ["--rounds", str(args.rounds), "--workloads", *args.workloads]
    found = said_by(asked, plugin=name in (PLUGIN, FIXED))
    return [{"model": model, "configuration": name, **row} for row in found]


def said_by(asked: list[str], *, plugin: bool) -> list[Row]:
    """What the process of an engine without a model says of itself.

    Args:
        asked: a module, and its arguments.
        plugin: whether the engine has it.

    Raises:
        RuntimeError: if the process fails.
    """
    variables = {
        "HYBRID_PLUGIN": str(int(plugin)),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    }
    command = [sys.executable, "-m", *asked]
    done = subprocess.run(
        command, env=os.environ | variables, stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(asked)} ended with status {done.returncode}")
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    return [json.loads(line.removeprefix(MARK)) for line in lines]


def table(rows: list[Row]) -> str:
    """One Markdown row per model, workload and configuration."""
    lines = [
        "| model | workload | configuration | restored | steps | steps to first token "
        "| host ms a step |",
        "|---|---|---|---:|---:|---:|---:|",
    ]
    order = list(WORKLOADS)
    for row in sorted(rows, key=lambda r: (r["model"], order.index(r["workload"]))):
        lines.append(
            f"| {row['model']} | {row['workload']} | {row['configuration']} "
            f"| {100 * row['restored']:.1f} % | {row['steps']:.0f} "
            f"| {row['steps to first token']:.0f} | {row['host ms a step']:.2f} |"
        )
    return "\n".join(lines)


def main() -> int:
    """Parse the command line; be one engine, or ask all and report."""
    names = [name for name in CONFIGURATIONS if name != EARLIER]
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--models",
        nargs="*",
        choices=GPU_BLOCKS,
        default=["qwen3-next", "nemotron-h-8b"],
    )
    parser.add_argument("--only", nargs="*", choices=names, default=names)
    parser.add_argument("--workloads", nargs="*", default=list(WORKLOADS))
    parser.add_argument("--cache-gib", type=int, default=8, help="(%(default)s)")
    parser.add_argument("--rounds", type=int, default=1, help="(%(default)s)")
    parser.add_argument("--out", type=Path, help="path without suffix")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        arguments = engine_arguments(args.one, args.models[0], args.cache_gib)
        serve(arguments, args.workloads, args.rounds)
        return 0
    rows: list[Row] = []
    for model in args.models:
        write_model(model, SCRATCH / model)
        for name in args.only:
            rows += rows_of(name, model, args)
    if args.out:
        found = {"machine": machine(), "cache_gib": args.cache_gib, "rows": rows}
        write(args.out, ".json", json.dumps(found, indent=1))
        write(args.out, ".md", table(rows))
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
