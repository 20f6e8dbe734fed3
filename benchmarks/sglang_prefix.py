# SPDX-License-Identifier: Apache-2.0
"""Prefix caching of SGLang with and without the plugin, side by side in one run.

The models are those of `prefix_models`, with dummy weights.  All engines get equal
bytes of cache memory; each divides them in its own way.

    python -m benchmarks.sglang_prefix --model qwen3-next --out benchmarks/results/x
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.prefix_models import (
    MODELS,
    cache_layout,
    slot_bytes,
    token_bytes,
    write_model,
)
from benchmarks.prefix_sides import (
    Side,
    answer_until_closed,
    check_plugin,
    machine,
    table,
    take_turns,
    write,
)
from benchmarks.prefix_workloads import WORKLOADS, Ask, Reply, warm_up

DEFAULT, PLUGIN, FIXED = "stock, default", "plugin", "plugin, fixed pools"
EARLIER = "plugin, earlier"
"""The checkout that `--earlier` names."""


def configurations(model: str) -> dict[str, dict[str, Any]]:
    """Engine arguments of each side, besides those that all share."""
    # SGLang's Mamba-2 kernels need an interval of at least one chunk.
    interval = MODELS[model].get("chunk_size", 64)
    often = {"mamba_track_interval": interval, "page_size": 16}
    return {
        "stock, cache off": {"disable_radix_cache": True},
        DEFAULT: {},
        f"stock, every {interval}": {
            "mamba_radix_cache_strategy": "extra_buffer",
            **often,
        },
        "stock, lazy": {"mamba_radix_cache_strategy": "extra_buffer_lazy", **often},
        "stock, unified memory": {"enable_unified_memory": True, **often},
        EARLIER: {},
        FIXED: {},
        PLUGIN: {},
    }


LONGEST = 12_288
"""Tokens of a request."""

PREFILL_SIZES = [64, 128, 256, 512, 1024, 2048, 3072, 4096, 6144, 8192]

SCRATCH = Path(tempfile.gettempdir()) / "hybrid-bench-sglang"


def engine_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments that all configurations share."""
    return {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "random_seed": 0,
        "context_length": LONGEST,
        "max_running_requests": 64,
        "chunked_prefill_size": 8192,
        "attention_backend": "triton",
        "sampling_backend": "pytorch",
        "disable_flashinfer_autotune": True,
        "mem_fraction_static": 0.9,
        "cuda_graph_bs_decode": [1, 2, 4, 8, 16, 32, 48, 64],
        # SGLang captures 58 sizes of prefills for some models, for minutes.
        "cuda_graph_bs_prefill": PREFILL_SIZES,
        "log_level": "warning",
    }


def memory(args: argparse.Namespace) -> dict[str, int]:
    """Tokens and slots of the configuration, out of the bytes that all get.

    Elastic pools take those bytes as they are: see `start`.
    """
    if args.one == PLUGIN:
        return {}
    budget = args.cache_gib << 30
    if args.one != FIXED:
        return stock_pools(args.model, budget)
    pools = cache_layout(args.model, 16).split(budget, max_model_len=LONGEST)
    return {
        "max_total_tokens": (pools.pages - 1) * 16,
        "max_mamba_cache_size": pools.slots - 1,
    }


def stock_pools(model: str, budget: int) -> dict[str, int]:
    """Tokens and slots at SGLang's own ratio of them, --mamba-full-memory-ratio."""
    slots = int(budget * 0.9 / 1.9) // slot_bytes(model)
    tokens = (budget - slots * slot_bytes(model)) // token_bytes(model)
    return {"max_total_tokens": tokens, "max_mamba_cache_size": slots}


# --------------------------------------------------------- in an engine's process


def serve(args: argparse.Namespace) -> None:
    """Be one configuration's engine."""
    import sglang

    check_plugin("sglang")
    arguments = engine_arguments(args) | memory(args)
    arguments |= configurations(args.model)[args.one]
    engine = sglang.Engine(model_path=str(SCRATCH / args.model), **arguments)
    facts = {"sglang": sglang.__version__, **memory(args)}

    async def answer() -> None:
        ask = asker(engine)
        await warm_up(ask)
        await answer_until_closed(ask, facts)

    engine.loop.run_until_complete(answer())
    engine.shutdown()


def asker(engine: Any) -> Ask:
    """How to ask an `Engine`."""

    async def ask(prompt: Sequence[int], max_tokens: int) -> Reply:
        sampling = {
            "temperature": 0,
            "max_new_tokens": max_tokens,
            "ignore_eos": True,
        }
        begin, first = time.monotonic(), 0.0
        stream = await engine.async_generate(
            input_ids=list(prompt), sampling_params=sampling, stream=True
        )
        last: dict[str, Any] = {}
        async for step in stream:
            first, last = first or time.monotonic() - begin, step
        return Reply(
            tokens=tuple(last["output_ids"]),
            prompt_tokens=len(prompt),
            cached_tokens=last["meta_info"]["cached_tokens"],
            ttft_s=first,
        )

    return ask


# ------------------------------------------------------------ taking measurements


def start(name: str, args: argparse.Namespace) -> Side:
    """Start one configuration's engine."""
    one = PLUGIN if name == EARLIER else name
    command = [sys.executable, "-m", "benchmarks.sglang_prefix", "--one", one]
    command += ["--model", args.model, "--cache-gib", str(args.cache_gib)]
    options: dict[str, Any] = {"elastic": one == PLUGIN}
    if one == PLUGIN:
        options["gpu_memory_budget"] = args.cache_gib << 30
    variables = {
        "HYBRID_PLUGIN": "1" if name in (PLUGIN, FIXED, EARLIER) else "0",
        "HYBRID_CONFIG": json.dumps(options),
    }
    return Side(name, command, variables, args.earlier if name == EARLIER else None)


def run_all(args: argparse.Namespace) -> dict[str, Any]:
    """Start every engine, and measure them in turns."""
    write_model(args.model, SCRATCH / args.model)
    results: dict[str, Any] = {}
    with ExitStack() as stack:
        sides = []
        for name in args.only or configurations(args.model):
            if name == EARLIER and not args.earlier:
                continue
            sides.append(start(name, args))
            stack.callback(sides[-1].stop)
        for side in sides:
            side.wait_until_ready()
        for _ in take_turns(sides, args.rounds, args.workloads):
            results = {side.name: side.result() for side in sides}
            if args.out:
                save(args, results)
    return results


def save(args: argparse.Namespace, results: dict[str, Any]) -> None:
    """Write what there is so far."""
    document = {
        "model": args.model,
        "shapes": MODELS[args.model],
        "flags": engine_arguments(args),
        "configurations": configurations(args.model),
        "cache_gib": args.cache_gib,
        "machine": machine(),
        "results": results,
    }
    write(args.out, ".json", json.dumps(document, indent=1))
    write(args.out, ".md", table(results, DEFAULT))


def main() -> int:
    """Parse the command line; be one engine, or measure all and report."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", choices=MODELS, default="qwen3-next")
    parser.add_argument("--rounds", type=int, default=3, help="(%(default)s)")
    parser.add_argument(
        "--cache-gib", type=int, default=8, help="of each engine (%(default)s)"
    )
    parser.add_argument("--only", nargs="*", help="configurations to run")
    parser.add_argument(
        "--earlier",
        type=Path,
        help="checkout of another version, with the plugin's metadata in it",
    )
    parser.add_argument("--workloads", nargs="*", default=list(WORKLOADS))
    parser.add_argument("--out", type=Path, help="path without suffix")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        serve(args)
    else:
        print(table(run_all(args), DEFAULT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
