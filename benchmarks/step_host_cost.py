# SPDX-License-Identifier: Apache-2.0
"""What a step of decoding costs vLLM's scheduler, with and without the plugin.

vLLM's own engine, scheduler and cache decode sequences that share nothing, with the
layers of a published model and without computing any (`no_model`).  Counted is the CPU
time in which a step is scheduled and its output is taken in, its statistics included,
as servers have them: on a GPU it comes on top of what launching a step costs, unless
the device takes longer.  With drafts, a random number of each sequence's is accepted.
Steps are synchronous.  Configurations take turns, each in a process of its own.

    python -m benchmarks.step_host_cost --out benchmarks/results/NAME
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks.prefix_models import write_model
from benchmarks.prefix_sides import check_plugin, machine, say, write
from benchmarks.vllm_bookkeeping import SCRATCH, engine_arguments, said_by
from benchmarks.vllm_prefix import PLUGIN

Row = dict[str, Any]
MODEL = "qwen3-next"
SIDES = {"vLLM, no prefix cache": "stock, default", "plugin": PLUGIN}
"""By name, the configuration of `vllm_prefix` that each is like."""
DRAFTS = (0, 3)
PROMPT, ANSWER = 32, 400
"""Tokens of each sequence."""


def arguments(side: str, drafts: int) -> dict[str, Any]:
    """Of a side's engine."""
    found = engine_arguments(SIDES[side], MODEL, 16)
    found |= {"disable_log_stats": False, "enable_prefix_caching": side == "plugin"}
    if drafts:
        found["speculative_config"] = {
            "method": "ngram",
            "num_speculative_tokens": drafts,
            "prompt_lookup_max": 2,
        }
    return found


def serve(side: str, drafts: int, sequences: list[int]) -> None:
    """Be one configuration's process: print a row for each number of sequences."""
    from vllm import __version__

    from benchmarks.no_model.drafting import NoModelWithDrafts
    from benchmarks.no_model.vllm_engine import NoModel, SteppedEngine

    check_plugin("vllm")
    executor = NoModelWithDrafts if drafts else NoModel
    engine = SteppedEngine(arguments(side, drafts), executor)

    async def decode(count: int, answer: int, seed: int) -> Row:
        numbers = random.Random(seed)
        stepping = asyncio.ensure_future(engine.run())
        steps, seconds = engine.steps, engine.host_seconds
        prompts = [
            [numbers.randrange(1000, 100_000) for _ in range(PROMPT)]
            for _ in range(count)
        ]
        await asyncio.gather(*(engine.ask(prompt, answer) for prompt in prompts))
        stepping.cancel()
        each = (engine.host_seconds - seconds) / (engine.steps - steps)
        return {"sequences": count, "ms a step": 1000 * each}

    asyncio.run(decode(max(sequences), PROMPT, seed=0))  # warms up
    for count in sequences:
        row = asyncio.run(decode(count, ANSWER, seed=count))
        say({"side": side, "drafts": drafts, "vllm": __version__} | row)


def rows_of(side: str, drafts: int, sequences: list[int]) -> list[Row]:
    """What a configuration's process prints."""
    asked = ["benchmarks.step_host_cost", "--one", side]
    asked += ["--drafts", str(drafts), "--sequences", *map(str, sequences)]
    return said_by(asked, plugin=side == "plugin")


def table(rows: list[Row]) -> str:
    """Medians over rounds, and the plugin's to vLLM's, as Markdown."""
    stock, plugin = SIDES
    lines = [
        f"| drafts | sequences | {stock}, ms a step | {plugin} | ratio |",
        "|---:|---:|---:|---:|---:|",
    ]
    for drafts, count in sorted({(row["drafts"], row["sequences"]) for row in rows}):
        found = {
            side: statistics.median(
                row["ms a step"]
                for row in rows
                if (row["side"], row["drafts"], row["sequences"])
                == (side, drafts, count)
            )
            for side in SIDES
        }
        lines.append(
            f"| {drafts} | {count} | {found[stock]:.3f} | {found[plugin]:.3f} "
            f"| {found[plugin] / found[stock]:.2f}x |"
        )
    return "\n".join(lines)


def main() -> int:
    """Parse the command line; be one engine, or ask all and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--drafts", type=int, nargs="+", default=DRAFTS)
    parser.add_argument("--rounds", type=int, default=3, help="(%(default)s)")
    parser.add_argument("--out", type=Path, help="path without suffix")
    parser.add_argument("--one", choices=SIDES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        serve(args.one, args.drafts[0], args.sequences)
        return 0
    write_model(MODEL, SCRATCH / MODEL)
    rows: list[Row] = []
    for _ in range(args.rounds):
        for drafts in args.drafts:
            for side in SIDES:
                rows += rows_of(side, drafts, args.sequences)
    if args.out:
        found = {"machine": machine(), "rounds": args.rounds, "rows": rows}
        write(args.out, ".json", json.dumps(found, indent=1))
        write(args.out, ".md", table(rows))
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
