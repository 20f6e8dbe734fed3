# SPDX-License-Identifier: Apache-2.0
"""Prefix caching of vLLM with and without the plugin, side by side in one run.

The models are those of `prefix_models`, with dummy weights.  Each configuration has
an engine process of its own.  They start together, then take turns: every workload of
every round goes to one after the other, in an order that rotates, so that what slows
the machine down for a while slows all of them down.

    python -m benchmarks.vllm_prefix --model qwen3-next --out benchmarks/results/x
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.prefix_models import MODELS, write_model
from benchmarks.prefix_sides import (
    Side,
    answer_until_closed,
    check_plugin,
    machine,
    table,
    take_turns,
    write,
)
from benchmarks.prefix_workloads import (
    WORKLOADS,
    Ask,
    Reply,
    Workload,
    warm_up,
)

STATE_DTYPES = dict.fromkeys(("qwen3.5-4b", "nemotron-h-8b", "falcon-h1-7b"), "float32")
"""Where a model does not name its own."""

LONGEST = 12_288
"""Tokens of a request."""

# vLLM's own largest size; fewer of them, because each costs start-up time.
CAPTURE_SIZES = [1, 2, 4, 8, 16, 32, 64, 128, 256, 384, 512]

DEFAULT, PLUGIN, FIXED = "stock, default", "plugin", "plugin, fixed pools"
EARLIER = "plugin, earlier"
"""The checkout that `--earlier` names."""
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "stock, cache off": {"enable_prefix_caching": False},
    DEFAULT: {},
    "stock, unit 16, sparse": {"prefix_match_unit": 16},
    "stock, unit 16, dense": {
        "prefix_match_unit": 16,
        "prefix_cache_retention_interval": None,
    },
    EARLIER: {},
    FIXED: {"additional_config": {"hybrid_plugin": {"elastic": False}}},
    PLUGIN: {"additional_config": {"hybrid_plugin": {"elastic": True}}},
}

SCRATCH = Path(tempfile.gettempdir()) / "hybrid-bench"
"""Always the same folder: compile caches are keyed on the model's path."""


def model_folder(name: str) -> Path:
    """Where a model's configuration lies."""
    return SCRATCH / name


def engine_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments that all configurations share."""
    return {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "seed": 0,
        "max_model_len": LONGEST,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 8192,
        "kv_cache_memory_bytes": args.cache_gib << 30,
        # Only how much must be free at the start: engines share the device.
        "gpu_memory_utilization": 0.05,
        "mamba_ssm_cache_dtype": STATE_DTYPES.get(args.model, "auto"),
        "gdn_prefill_backend": "triton",
        "compilation_config": {"cudagraph_capture_sizes": CAPTURE_SIZES},
        "disable_log_stats": True,
    }


def in_stages(args: argparse.Namespace) -> dict[str, Any]:
    """The same, in as many stages of a pipeline as are asked for."""
    return engine_arguments(args) | {"pipeline_parallel_size": args.stages}


# --------------------------------------------------------- in an engine's process


async def serve(
    arguments: dict[str, Any], workloads: Mapping[str, Workload] = WORKLOADS
) -> None:
    """Be one configuration's engine: a line of JSON in, a line with the outcome out."""
    from vllm import __version__
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    check_plugin("vllm")
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
    ask = asker(engine)
    await warm_up(ask)
    block_size = engine.vllm_config.cache_config.block_size
    facts = {"vllm": __version__, "block_size": block_size}
    await answer_until_closed(ask, facts, workloads)
    engine.shutdown()


def asker(engine: Any) -> Ask:
    """How to ask an `AsyncLLM`."""
    from vllm import SamplingParams

    numbers = iter(range(1 << 30))

    async def ask(prompt: Sequence[int], max_tokens: int) -> Reply:
        sampling = SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
        )
        begin, first = time.monotonic(), 0.0
        request = {"prompt_token_ids": list(prompt)}
        output: Any = None
        async for step in engine.generate(request, sampling, str(next(numbers))):
            first, output = first or time.monotonic() - begin, step
        return Reply(
            tokens=tuple(output.outputs[0].token_ids),
            prompt_tokens=len(prompt),
            cached_tokens=output.num_cached_tokens or 0,
            ttft_s=first,
        )

    return ask


# ------------------------------------------------------------ taking measurements


def start(name: str, args: argparse.Namespace, lane: int) -> Side:
    """Start one configuration's engine, the `lane`-th of those that run together."""
    one = PLUGIN if name == EARLIER else name
    command = [sys.executable, "-m", "benchmarks.vllm_prefix", "--one", one]
    command += ["--model", args.model, "--cache-gib", str(args.cache_gib)]
    command += [f"--stages={args.stages}"] if args.stages > 1 else []
    variables = {
        "HYBRID_PLUGIN": "1" if name in (PLUGIN, FIXED, EARLIER) else "0",
        # Engines that start together must not write to one compile cache.
        "VLLM_CACHE_ROOT": str(SCRATCH / f"cache-{lane}"),
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    }
    return Side(name, command, variables, args.earlier if name == EARLIER else None)


def run_all(args: argparse.Namespace) -> dict[str, Any]:
    """Measure every configuration, so many of them at a time as fit."""
    write_model(args.model, model_folder(args.model))
    names = args.only or [
        name for name in CONFIGURATIONS if name != EARLIER or args.earlier
    ]
    results: dict[str, Any] = {}
    for begin in range(0, len(names), args.at_once):
        with ExitStack() as stack:
            sides = []
            for lane, name in enumerate(names[begin : begin + args.at_once]):
                sides.append(start(name, args, lane))
                stack.callback(sides[-1].stop)
            for side in sides:
                side.wait_until_ready()
            for _ in take_turns(sides, args.rounds, args.workloads):
                results |= {side.name: side.result() for side in sides}
                if args.out:
                    save(args, results)
    return results


# ----------------------------------------------------------------------- results


def save(args: argparse.Namespace, results: dict[str, Any]) -> None:
    """Write what there is so far."""
    document = {
        "model": args.model,
        "shapes": MODELS[args.model],
        "flags": in_stages(args),
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
    parser.add_argument(
        "--stages", type=int, default=1, help="of a pipeline, a GPU each (%(default)s)"
    )
    parser.add_argument("--only", nargs="*", help="configurations to run")
    parser.add_argument(
        "--earlier",
        type=Path,
        help="checkout of another version, with the plugin's metadata in it",
    )
    parser.add_argument(
        "--at-once", type=int, default=8, help="engines that fit the device together"
    )
    parser.add_argument("--workloads", nargs="*", default=list(WORKLOADS))
    parser.add_argument("--out", type=Path, help="path without suffix")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        arguments = in_stages(args) | CONFIGURATIONS[args.one]
        asyncio.run(serve(arguments | {"model": str(model_folder(args.model))}))
    else:
        print(table(run_all(args), DEFAULT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
