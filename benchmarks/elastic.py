# SPDX-License-Identifier: Apache-2.0
"""Elastic pools against every fixed split and against vLLM alone, in one run.

Three phases follow each other, round after round: many short chats want state
slots, a few long prompts want KV pages, the third wants both.  A fixed split suits
one of them.  All engines get equal bytes of cache memory and take turns, as in
`vllm_prefix`.

    python -m benchmarks.elastic --model qwen3-next --out benchmarks/results/elastic-x
    python -m benchmarks.elastic --model tiny --cache-mib 12 --out ...   # on a CPU
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks import vllm_prefix
from benchmarks.elastic_workloads import CPU, GPU, Scale, phases
from benchmarks.prefix_models import MODELS, write_model
from benchmarks.prefix_sides import Side, machine, take_turns, write

DEFAULT, BEST_FLAGS, ELASTIC = "vLLM, default", "vLLM, unit 16, sparse", "elastic"
TINY = "tiny"
"""The model for machines without a GPU."""
LONGEST_OF_WARM_UP = 5100


def configurations(ratios: Sequence[float]) -> dict[str, dict[str, Any]]:
    """Engine arguments of each side, besides those that all share."""
    fixed = {f"fixed, {r:.0%} states": {"state_memory_ratio": r} for r in ratios}
    plugin: dict[str, dict[str, Any]] = {
        "fixed, automatic": {},
        **fixed,
        ELASTIC: {"elastic": True},
    }
    return {
        DEFAULT: {},
        BEST_FLAGS: {"prefix_match_unit": 16},
        **{
            name: {"additional_config": {"hybrid_plugin": {"enabled": True} | options}}
            for name, options in plugin.items()
        },
    }


def scale_of(args: argparse.Namespace) -> Scale:
    """Traffic that suits the model."""
    return CPU if args.model == TINY else GPU


def engine_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments that all configurations share."""
    scale = scale_of(args)
    shared = vllm_prefix.engine_arguments(
        argparse.Namespace(model=args.model, cache_gib=0)
    )
    longest = max(scale.longest + 1, LONGEST_OF_WARM_UP)
    if args.model == TINY:
        for name in ("gdn_prefill_backend", "compilation_config"):
            del shared[name]
        shared |= {"enforce_eager": True, "max_num_batched_tokens": 512}
    return shared | {
        "model": str(vllm_prefix.model_folder(args.model)),
        "hf_overrides": {"max_position_embeddings": longest},
        "max_model_len": longest,
        "max_num_seqs": scale.clients,
        "kv_cache_memory_bytes": args.cache_mib << 20,
    }


def start(name: str, args: argparse.Namespace, lane: int) -> Side:
    """Start one configuration's engine, the `lane`-th of those that run together."""
    command = [sys.executable, "-m", "benchmarks.elastic", "--one", name]
    command += ["--model", args.model, "--cache-mib", str(args.cache_mib)]
    command += ["--ratios", *map(str, args.ratios)]
    variables = {
        "HYBRID_PLUGIN": "0" if name in (DEFAULT, BEST_FLAGS) else "1",
        "VLLM_CACHE_ROOT": str(vllm_prefix.SCRATCH / f"cache-{lane}"),
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    }
    return Side(name, command, variables)


def run_all(args: argparse.Namespace) -> dict[str, Any]:
    """Measure every configuration, so many of them at a time as fit."""
    write_model(args.model, vllm_prefix.model_folder(args.model))
    names = args.only or list(configurations(args.ratios))
    order = list(phases(scale_of(args)))
    results: dict[str, Any] = {}
    for begin in range(0, len(names), args.at_once):
        with ExitStack() as stack:
            sides = []
            for lane, name in enumerate(names[begin : begin + args.at_once]):
                sides.append(start(name, args, lane))
                stack.callback(sides[-1].stop)
            for side in sides:
                side.wait_until_ready()
            for _ in take_turns(sides, args.rounds, order):
                results |= {side.name: side.result() for side in sides}
                if args.out:
                    save(args, results)
    return results


# ----------------------------------------------------------------------- results


def walls(result: Mapping[str, Any], order: Sequence[str]) -> list[float] | None:
    """Median seconds of each phase; None for an engine that did not serve all."""
    rounds = result.get("workloads", {})
    if any(not rounds.get(phase) for phase in order) or "died in" in result:
        return None
    return [statistics.median(r["wall_s"] for r in rounds[phase]) for phase in order]


def table(results: Mapping[str, Any], order: Sequence[str]) -> str:
    """Seconds of each phase and of all; throughput of elastic pools over the rest's."""
    seconds = {name: walls(result, order) for name, result in results.items()}
    ran = {name: [*took, sum(took)] for name, took in seconds.items() if took}
    columns = [*order, "all phases"]
    lines = [
        f"| configuration | {' | '.join(f'{c}, s' for c in columns)} | failed |",
        "|---" * (len(columns) + 2) + "|",
    ]
    for name, result in results.items():
        if name not in ran:
            why = result.get("died in")
            said = "did not start" if why is None else f"its engine died in `{why}`"
            lines.append(f"| {name} | {said} |" + " |" * len(columns))
            continue
        cells = " | ".join(f"{wall:.2f}" for wall in ran[name])
        lines.append(f"| {name} | {cells} | {_failed(result)} |")
    lines += ["", *_verdict(ran, columns)]
    return "\n".join(lines)


def _failed(result: Mapping[str, Any]) -> int:
    return sum(r["failed"] for rounds in result["workloads"].values() for r in rounds)


def _verdict(ran: Mapping[str, list[float]], columns: Sequence[str]) -> list[str]:
    if ELASTIC not in ran:
        return []
    own = ran[ELASTIC]
    fixed = {name: took for name, took in ran.items() if name.startswith("fixed")}
    lines = []
    for number, column in enumerate(columns):
        if fixed:
            best = min(fixed, key=lambda name: fixed[name][number])
            ratio = fixed[best][number] / own[number]
            lines.append(
                f"* {column}: elastic pools have {ratio:.2f}x the throughput of the "
                f"best fixed split ({best})."
            )
    for name in (DEFAULT, BEST_FLAGS):
        if name in ran:
            ratio = ran[name][-1] / own[-1]
            lines.append(f"* All phases: {ratio:.2f}x that of {name}.")
    return lines


def save(args: argparse.Namespace, results: dict[str, Any]) -> None:
    """Write what there is so far."""
    order = list(phases(scale_of(args)))
    document = {
        "model": args.model,
        "flags": engine_arguments(args) | {"model": args.model},
        "scale": vars(scale_of(args)),
        "machine": machine(),
        "results": results,
    }
    write(args.out, ".json", json.dumps(document, indent=1))
    write(args.out, ".md", table(results, order))


def main() -> int:
    """Parse the command line; be one engine, or measure all and report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", choices=MODELS, default="qwen3-next")
    parser.add_argument("--rounds", type=int, default=2, help="(%(default)s)")
    parser.add_argument(
        "--cache-mib", type=int, default=12 << 10, help="of each engine (%(default)s)"
    )
    parser.add_argument(
        "--ratios",
        type=float,
        nargs="*",
        default=[0.1, 0.3, 0.5, 0.7, 0.9],
        help="fixed splits: shares of the memory for states",
    )
    parser.add_argument("--only", nargs="*", help="configurations to run")
    parser.add_argument(
        "--at-once", type=int, default=8, help="engines that fit the device together"
    )
    parser.add_argument("--out", type=Path, help="path without suffix")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        own = configurations(args.ratios)[args.one]
        arguments = engine_arguments(args) | own
        asyncio.run(vllm_prefix.serve(arguments, phases(scale_of(args))))
    else:
        print(table(run_all(args), list(phases(scale_of(args)))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
