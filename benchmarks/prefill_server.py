# SPDX-License-Identifier: Apache-2.0
"""What a prefill server restores of prompts and then of chats, and in how many steps.

vLLM's engine and scheduler with its own cache or the plugin's, at a model's shapes and
equal bytes, and no model (`no_model`): every request asks for one token, as a prefill
server is asked.  Prompts share their system prompts and nothing else; the chats that
follow share theirs, and every turn contains the one before.  Answers come from another
server, so that a turn can be restored as far as the last prompt.

    python -m benchmarks.prefill_server --out benchmarks/results/NAME
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.prefill_decode.traffic import GPU, text, workloads
from benchmarks.prefix_models import write_model
from benchmarks.prefix_sides import machine, say, write
from benchmarks.prefix_workloads import Ask, Reply
from benchmarks.vllm_bookkeeping import SCRATCH, Row, engine_arguments, said_by
from benchmarks.vllm_prefix import DEFAULT, PLUGIN

MODEL = "qwen3-next"
ROUNDS = 3
GIBS = (8, 10, 12, 15)
DECODING = 30
"""Steps of the prefill server at least while another one answers."""


def prefilled(ask: Ask) -> Ask:
    """Asks for one token, and answers with others, as a decode server would."""

    async def asked(prompt: Sequence[int], max_tokens: int) -> Reply:
        reply = await ask(prompt, 1)
        for _ in range(DECODING):
            await asyncio.sleep(0)
        tokens = text(random.Random(len(prompt)), GPU, max_tokens)
        return replace(reply, tokens=tuple(tokens))

    return asked


def arguments(name: str, cache_gib: int) -> dict[str, Any]:
    """Of one side's engine."""
    return engine_arguments(name, MODEL, cache_gib) | {
        "max_num_seqs": GPU.concurrency,
        "max_model_len": GPU.longest + 1,
    }


def serve(name: str, cache_gib: int) -> None:
    """Be one side's process: print a row for each workload of each round."""
    from benchmarks.no_model.vllm_engine import SteppedEngine

    engine = SteppedEngine(arguments(name, cache_gib))
    ask = prefilled(engine.ask)
    for number in range(ROUNDS):
        for workload, run in workloads(GPU).items():
            steps = engine.steps
            replies = engine.drive(run(ask, random.Random(number)))
            prompts = sum(reply.prompt_tokens for reply in replies)
            cached = sum(reply.cached_tokens for reply in replies)
            row = {"workload": workload, "round": number, "restored": cached / prompts}
            say(row | {"steps": engine.steps - steps})


def rows_of(name: str, cache_gib: int) -> list[Row]:
    """What one side's process prints."""
    asked = ["benchmarks.prefill_server", "--one", name, "--gib", str(cache_gib)]
    found = said_by(asked, plugin=name == PLUGIN)
    return [{"side": name, "cache_gib": cache_gib, **row} for row in found]


def table(rows: Sequence[Row]) -> str:
    """A line for each size and workload, with all rounds of both sides."""
    sides = list(dict.fromkeys(row["side"] for row in rows))
    heads = [f"{side}, {what}" for side in sides for what in ("restored %", "steps")]
    lines = [
        f"| GiB | workload | {' | '.join(heads)} |",
        "|---|---|" + "---|" * 2 * len(sides),
    ]
    cells: dict[tuple[int, str], dict[str, list[Row]]] = {}
    for row in rows:
        of = cells.setdefault((row["cache_gib"], row["workload"]), {})
        of.setdefault(row["side"], []).append(row)
    for (gib, workload), found in cells.items():
        values = []
        for side in sides:
            rounds = found.get(side, [])
            values.append(", ".join(f"{100 * row['restored']:.1f}" for row in rounds))
            values.append(", ".join(str(row["steps"]) for row in rounds))
        lines.append(f"| {gib} | {workload} | {' | '.join(values)} |")
    return "\n".join(lines)


def main() -> int:
    """Be one engine, or ask all and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gib", type=int, nargs="+", default=list(GIBS))
    parser.add_argument("--out", type=Path, help="path without suffix")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        serve(args.one, args.gib[0])
        return 0
    write_model(MODEL, SCRATCH / MODEL)
    rows = [
        row
        for gib in args.gib
        for name in (DEFAULT, PLUGIN)
        for row in rows_of(name, gib)
    ]
    if args.out:
        found = {"machine": machine(), "model": MODEL, "rounds": ROUNDS, "rows": rows}
        write(args.out, ".json", json.dumps(found, indent=1))
        write(args.out, ".md", table(rows))
    print(table(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
