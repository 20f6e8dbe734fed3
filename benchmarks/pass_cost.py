# SPDX-License-Identifier: Apache-2.0
"""What a forward pass costs on a real engine, pass by pass.

Prefills of 1 to 4,096 tokens of one sequence and of several, alone and while 30 other
sequences generate; decode steps of 1 to 64 sequences.  From these follow the numbers of
`hybrid_plugin/core/policy/costs.py`, in tokens of prefill.

    python -m benchmarks.pass_cost --engine vllm --out benchmarks/results/pass-cost-x
    python -m benchmarks.pass_cost --model tiny --cache-mib 24 --largest 512 --times 3
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.elastic_setup import Configuration
from benchmarks.low_load import sides
from benchmarks.passes import engines
from benchmarks.passes.costs import Costs, Timed, fit, medians
from benchmarks.passes.probes import Probe
from benchmarks.prefix_models import MODELS
from benchmarks.prefix_sides import machine, write

SIZES = (1, 16, 64, 128, 256, 512, 1024, 1536, 2048, 3072, 4096)
SEVERAL = (2, 4, 8)
BATCHES = (1, 2, 4, 8, 16, 32, 64)
CACHE_OFF = "stock, cache off"
WITHOUT_CACHE = {
    "vllm": Configuration({"enable_prefix_caching": False}),
    "sglang": Configuration({"disable_radix_cache": True}),
}
"""No prompt is split for what a cache keeps of it."""
DECODES = 30
STEPS = 40


async def measure(running: engines.Running, args: argparse.Namespace) -> list[Timed]:
    """All passes of all kinds."""
    sizes = [size for size in SIZES if size <= args.largest]
    small = [size for size in sizes if size * max(SEVERAL) <= args.largest]
    warming = Probe(running, 0)
    await warming.prefills(sizes, 1, 2)
    await warming.decodes(BATCHES, 8)
    probe = Probe(running, 1)
    await probe.prefills(sizes, 1, args.times)
    for sequences in SEVERAL:
        await probe.prefills(small, sequences, args.times)
    await probe.prefills_beside(sizes, DECODES, args.answer)
    await probe.decodes(BATCHES, STEPS)
    return probe.passes


def moves(path: Path | None, costs: Costs) -> Iterator[tuple[str, float]]:
    """MOVE_TOKENS of each size that `memory_moves.py` measured with the least blocks.

    Args:
        path: of its JSON; None for no such numbers.
        costs: of this machine.
    """
    found = json.loads(path.read_text())["blocks"][0]["moves"] if path else []
    for move in found:
        took = max(move["to states ms"], move["to pages ms"])
        yield f"{move['MiB']} MiB", costs.move_tokens(took)


def report(passes: Sequence[Timed], about: Mapping[str, Any], move: Path | None) -> str:
    """The kinds of passes as a table, and the costs."""
    lines = [", ".join(f"{name} {value}" for name, value in about.items()), ""]
    lines += [
        "Medians.  `ms` is the time from the last pass's result, or from the pass's "
        "own launch if that was later, to its result.  Where others generate, engines "
        "launch a pass before they look at the result of the one before: there the "
        "time of the two is right, its division between them is not.",
        "",
        "| prefill tokens | sequences | decodes in it | generate meanwhile | passes | "
        "launch ms | ms |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {one.prefill_tokens} | {one.prefills} | {one.decodes} | {one.beside} | "
        f"{count} | {1000 * one.launch:.2f} | {1000 * one.seconds:.2f} |"
        for one, count in medians(passes).items()
    ]
    return "\n".join([*lines, "", *_costs(passes, move)])


def _costs(passes: Sequence[Timed], move: Path | None) -> Iterator[str]:
    try:
        costs = fit(passes)
    except ValueError as error:
        yield f"No costs: {error}"
        return
    yield f"Smallest prefill pass: {1000 * costs.smallest_pass:.2f} ms.  "
    yield f"A token: {1e6 * costs.token:.2f} us.  A step: {1000 * costs.step:.2f} ms."
    yield ""
    yield f"PASS_TOKENS = {costs.pass_tokens:.0f}"
    yield ""
    yield f"STEP_TOKENS = {costs.step_tokens:.0f}"
    for size, tokens in moves(move, costs):
        yield ""
        yield f"MOVE_TOKENS = {tokens:.0f} ({size})"


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", choices=sides.ENGINES, default="vllm")
    parser.add_argument("--model", choices=MODELS, default="qwen3-next")
    parser.add_argument(
        "--side", default=CACHE_OFF, help="or as in low_concurrency (%(default)s)"
    )
    parser.add_argument(
        "--cache-mib", type=int, default=16 << 10, help="of the engine (%(default)s)"
    )
    parser.add_argument(
        "--largest", type=int, default=max(SIZES), help="tokens of a pass (%(default)s)"
    )
    parser.add_argument(
        "--times", type=int, default=8, help="that a batch is sent (%(default)s)"
    )
    parser.add_argument(
        "--answer",
        type=int,
        default=600,
        help="tokens of the answers beside prefills (%(default)s)",
    )
    parser.add_argument("--moves", type=Path, help="the JSON of memory_moves.py")
    parser.add_argument("--out", type=Path, help="path without suffix")
    return parser.parse_args()


def main() -> int:
    """Measure, print and write."""
    args = parse()
    # Looking may take memory of the device; the engine has a process of its own.
    about = machine()
    setup = sides.setup(args.model, args.cache_mib, about["device"] != "CPU")
    known = {CACHE_OFF: WITHOUT_CACHE[args.engine]}
    known |= sides.configurations(args.engine, args.model)
    if args.side not in known:
        raise SystemExit(f"--side: {args.side!r} is none of: {'; '.join(known)}")
    configuration = known[args.side]
    os.environ |= sides.variables(args.engine, setup, configuration, 0)
    sides.ENGINES[args.engine].prepare(setup)
    given = sides.arguments(args.engine, setup, configuration)

    async def work(running: engines.Running) -> None:
        passes = await measure(running, args)
        facts = {"model": args.model, "side": args.side, **about, **running.facts}
        text = report(passes, facts, args.moves)
        print(text)
        if args.out:
            found = {**facts, "flags": given, "passes": [asdict(one) for one in passes]}
            write(args.out, ".json", json.dumps(found, indent=1, default=str))
            write(args.out, ".md", text)

    engines.run(args.engine, given, work)
    return 0


if __name__ == "__main__":
    sys.exit(main())
