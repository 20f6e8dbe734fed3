# SPDX-License-Identifier: Apache-2.0
"""What a request costs the host: our core, SGLang's trees and vLLM's block pool.

    python -m benchmarks.core_host_cost --vllm FOLDER --out benchmarks/results/NAME

All run in one process on the same stream, in an environment with SGLang 0.5.23;
`--vllm` names the site-packages of another one with vLLM 0.32, from which vLLM
and what SGLang's lacks are imported (and openai, which each wants in a version
of its own).  CPU time of the thread, so that other processes do not count.

First every cache is filled with short requests that share prefixes, until it
holds `--nodes` nodes.  Then prompts of each length are served: *warm* ones, of
which all but the last 128 tokens are cached, and *cold* ones.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib.machinery
import json
import os
import platform
import random
import statistics
import sys
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.host_cost.driver import PHASES, Driver, Laps
from benchmarks.host_cost.ours import Ours

LENGTHS = (1_000, 10_000, 100_000)
NEW = 128
"""Tokens of a warm prompt that are not cached."""
ANSWER = 64
VOCABULARY = 150_000
FILL_NODES = 2.0
"""Nodes that a request of the filling leaves in every tree, about."""


def main() -> int:
    """Measure all, print and write."""
    args = _arguments()
    results = {}
    for name, build in _builders(args).items():
        results[name] = _measure(build(), args)
        print(json.dumps({name: results[name]}), flush=True)
        gc.collect()
    found = {
        "machine": args.machine,
        "python": platform.python_version(),
        "nodes": args.nodes,
        "results": results,
    }
    args.out.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    args.out.with_suffix(".md").write_text(_markdown(found))
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vllm", type=Path, required=True, metavar="SITE_PACKAGES")
    parser.add_argument("--nodes", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=40, help="of 1,000 tokens")
    parser.add_argument("--machine", default=platform.machine())
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def _builders(args: argparse.Namespace) -> dict[str, Callable[[], Driver]]:
    """By name, in the order in which they are measured."""
    import torch

    torch.set_num_threads(1)
    tokens, slots = 60 * args.nodes + 4_000_000, args.nodes + 1000
    longest = max(LENGTHS) + 1000
    _import_vllm_from(args.vllm)
    from benchmarks.host_cost.sglang_tree import SglangTree
    from benchmarks.host_cost.vllm_blocks import VllmBlocks

    builders: dict[str, Callable[[], Driver]] = {
        "ours": lambda: Ours(tokens, slots),
        "sglang-rust": lambda: SglangTree(tokens, slots, longest, "rust"),
        "sglang-python": lambda: SglangTree(tokens, slots, longest, "python"),
        "vllm-sha256": lambda: VllmBlocks(tokens, longest, "sha256"),
        "vllm-xxhash": lambda: VllmBlocks(tokens, longest, "xxhash"),
    }
    return {k: v for k, v in builders.items() if not args.only or k in args.only}


def _import_vllm_from(folder: Path) -> None:
    """Let vLLM be found, behind what is installed; its openai before."""

    class OpenAI:
        @staticmethod
        def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
            if name == "openai":
                return importlib.machinery.PathFinder.find_spec(name, [str(folder)])
            return None

    sys.meta_path.insert(0, OpenAI)  # type: ignore[arg-type]
    sys.path.append(str(folder))


def _measure(driver: Driver, args: argparse.Namespace) -> dict[str, Any]:
    rng = random.Random(1)
    small = {"fresh": _case(driver, 1_000, True, args.rounds, rng)}
    requests = _fill(driver, args.nodes, rng)
    found: dict[str, Any] = {
        "name": driver.name,
        "filled_with": requests,
        "entries": driver.entries(),
        "empty_tree_1000": small["fresh"],
        "cases": {},
    }
    for length in LENGTHS:
        rounds = max(args.rounds * 1000 // length, 8)
        for warm in (True, False):
            case = _case(driver, length, warm, rounds if warm else min(rounds, 10), rng)
            found["cases"][f"{length} {'warm' if warm else 'cold'}"] = case
    found["bytes_per_cached_token"] = _memory(driver, rng)
    return found


def _fill(driver: Driver, nodes: int, rng: random.Random) -> int:
    """Serve short requests, 45 behind each of many prefixes; returns how many."""
    count, root = 0, array("q")
    while count * FILL_NODES < nodes:
        if count % 45 == 0:
            root = _tokens(64, rng)
        driver.serve(root + _tokens(40, rng), _tokens(16, rng))
        count += 1
    return count


def _case(
    driver: Driver, length: int, warm: bool, rounds: int, rng: random.Random
) -> dict[str, Any]:
    """Medians over `rounds` requests."""
    bases = []
    if warm:
        bases = [_tokens((length - NEW) // 16 * 16, rng) for _ in range(2)]
        for base in bases:
            # A snapshot where the prompts part: SGLang takes one at the end of
            # the first, ours where the second leaves it.
            driver.serve(base, _tokens(ANSWER, rng))
            driver.serve(base + _tokens(NEW, rng), _tokens(ANSWER, rng))
    prompts = [
        (bases[n % 2] + _tokens(NEW, rng) if warm else _tokens(length, rng))
        for n in range(rounds)
    ]
    answers = [_tokens(ANSWER, rng) for _ in prompts]
    hits, laps = 0, []
    gc.collect()
    gc.disable()
    try:
        for prompt, answer in zip(prompts, answers, strict=True):
            hit, lap = driver.serve(prompt, answer)
            hits += hit
            laps.append(lap)
    finally:
        gc.enable()
    return {
        "hit_share": hits / sum(map(len, prompts)),
        "total_us": _microseconds(laps, lambda lap: lap.total),
        **{
            f"{phase}_us": _microseconds(
                laps, lambda lap, p=phase: lap.seconds.get(p, 0)
            )
            for phase in PHASES
        },
    }


def _microseconds(laps: Sequence[Laps], of: Callable[[Laps], float]) -> float:
    return round(1e6 * statistics.median(map(of, laps)), 1)


def _memory(driver: Driver, rng: random.Random) -> float:
    """Growth of the process by prompts of 50,000 tokens, per token."""
    driver.serve(_tokens(50_000, rng), _tokens(2, rng))
    count, before = 40, _resident_bytes()
    for _ in range(count):
        driver.serve(_tokens(50_000, rng), _tokens(2, rng))
    return round((_resident_bytes() - before) / (count * 50_000), 1)


def _resident_bytes() -> int:
    """Of the process, without what it could give back."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _tokens(count: int, rng: random.Random) -> array[int]:
    return array("q", rng.choices(range(VOCABULARY), k=count))


def _markdown(found: dict[str, Any]) -> str:
    results = found["results"]
    cases = list(next(iter(results.values()))["cases"])
    lines = [
        "# Host cost of a request",
        "",
        f"`benchmarks/core_host_cost.py` on a {found['machine']}, one process, Python "
        f"{found['python']}, about {found['nodes']:,} cached nodes.  Microseconds of "
        "CPU time for hash + match + admit + commit + finish, medians; in parentheses "
        "without the hashing, where there is any.",
        "",
        "| cache | " + " | ".join(cases) + " | bytes a cached token |",
        "|---" * (len(cases) + 2) + "|",
    ]
    for one in results.values():
        cells = [_total(one["cases"][case]) for case in cases]
        memory = f"{one['bytes_per_cached_token']:g}"
        lines.append(f"| {one['name']} | {' | '.join(cells)} | {memory} |")
    lines += [
        "",
        "SGLang's admit includes the page table, from which its tree reads pages.  "
        "vLLM's blocks are objects that are made at the start, and are not in its "
        "bytes.",
        "",
        "By phase, and with an empty tree to compare:",
        "",
        f"| cache | case | hit | {' | '.join(PHASES)} |",
        "|---" * (len(PHASES) + 3) + "|",
    ]
    for one in results.values():
        named = {"1000 warm, empty tree": one["empty_tree_1000"], **one["cases"]}
        for name, case in named.items():
            cells = [f"{case[f'{phase}_us']:,.0f}" for phase in PHASES]
            share = f"{100 * case['hit_share']:.0f} %"
            lines.append(f"| {one['name']} | {name} | {share} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _total(case: dict[str, float]) -> str:
    total, hashing = case["total_us"], case["hash_us"]
    return f"{total:,.0f}" + (f" ({total - hashing:,.0f})" if hashing else "")


if __name__ == "__main__":
    sys.exit(main())
