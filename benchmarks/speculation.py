# SPDX-License-Identifier: Apache-2.0
"""Drafts in an engine: stock with and without its prefix cache, and the plugin.

All engines get equal bytes for KV, states and what drafts need besides, and answer the
same traffic in turns, as in `vllm_prefix`: chats, a crowd that does not fit at once,
and steady decoding at 1, 32 and 128 sequences that share nothing.  Weights are dummies
and drafts come from the model's own layer of multi-token prediction; how many are
accepted is forced by the engines' own switches.

    python -m benchmarks.speculation --engine vllm --model qwen3.5-4b --quick --out x
    python -m benchmarks.speculation --engine sglang --model nemotron-h-8b --out x
    python -m benchmarks.speculation --engine vllm --on cpu --out x  # bundled model
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import rounds
from benchmarks.drafts import shapes, sides
from benchmarks.drafts.served import START_LIMIT_S, answer_until_closed
from benchmarks.drafts.sides import Configuration, Setup
from benchmarks.drafts.table import table
from benchmarks.drafts.traffic import SCALES, workloads
from benchmarks.elastic import stop_or_kill
from benchmarks.elastic_engine import Limit
from benchmarks.passes import engines
from benchmarks.prefix_sides import Side, machine, turns
from benchmarks.rounds import check_known

ACCEPTANCE = 2.5
"""Tokens of a verification of three drafts: what published heads reach."""
QUICK_ROUNDS, ROUNDS = 2, 5
CPU_MIB, GPU_MIB = 12, 16 << 10


class Run:
    """What the command line asks for."""

    def __init__(self, args: argparse.Namespace) -> None:
        """Settle it.

        Raises:
            SystemExit: for a side or a workload that is not known.
        """
        self.args = args
        # Looking may take memory of the device: engines' processes are told.
        self.on = args.on or ("cpu" if machine()["device"] == "CPU" else "gpu")
        self.setup = setup(args, self.on)
        if args.engine == "vllm" and self.on == "cpu" and self.setup.acceptance:
            raise SystemExit("--acceptance: vLLM's CPU build forces none; leave it out")
        extra = [(name, json.loads(options)) for name, options in args.extra]
        self.configurations = sides.configurations(args.engine) | {
            f"{sides.PLUGIN}, {name}": sides.of_plugin({"elastic": True, **options})
            for name, options in extra
        }
        usual = sides.usual(args.engine, self.on == "gpu", args.quick)
        named = [f"{sides.PLUGIN}, {name}" for name, _ in extra]
        self.names = args.only or [*usual, *named]
        self.workloads = list(workloads(self.setup.scale))
        check_known(self.names, self.configurations, "--only")
        check_known(args.workloads or (), self.workloads, "--workloads")
        self.results: dict[str, Any] = {}

    def serve(self, name: str) -> None:
        """Be one side's engine."""
        starting = Limit(START_LIMIT_S)
        engine, side = self.args.engine, self.configurations[name]
        given = sides.arguments(engine, self.setup, side)

        async def work(running: engines.Running) -> None:
            known = shapes.vocabulary(self.setup.model)
            scale = self.setup.scale
            await answer_until_closed(engine, running, scale, known, starting)

        engines.run(engine, given, work)

    def start(self, name: str, lane: int) -> Side:
        """Start one side's process, the `lane`-th of those that run."""
        command = [sys.executable, "-m", "benchmarks.speculation", *sys.argv[1:]]
        command += ["--one", name, "--on", self.on]
        side: Configuration = self.configurations[name]
        variables = sides.variables(self.args.engine, self.setup, side, lane)
        return Side(name, command, variables)

    def measure(self) -> dict[str, Any]:
        """As many sides at a time as fit, in turns, until done or time is over."""
        end = time.monotonic() + self.args.seconds
        shapes.write(self.setup.model, sides.SCRATCH[self.args.engine])
        for names in rounds.groups(self.names, self.args.at_once):
            with ExitStack() as stack:
                running = []
                for lane, name in enumerate(names):
                    running.append(self.start(name, lane))
                    stack.push(stop_or_kill(running[-1]))
                for side in running:
                    side.wait_until_ready()
                self._save(running)
                print("engines are ready", file=sys.stderr, flush=True)
                self._take_turns(running, end)
        return self.results

    def _take_turns(self, running: list[Side], end: float) -> None:
        count = self.args.rounds or (QUICK_ROUNDS if self.args.quick else ROUNDS)
        every = turns(running, count, self.args.workloads or self.workloads)
        for turn in rounds.in_time(every, end):
            for side, name, number in turn:
                side.run(name, number)
            self._save(running)

    def _save(self, running: list[Side]) -> None:
        self.results |= {side.name: side.result() for side in running}
        if self.args.out is None:
            return
        facts = next((side.facts for side in running if side.facts), {})
        rounds.save(
            self.args.out,
            self._document(),
            f"{self.setup.model}, drafts in {self.args.engine}",
            {**sides.versions(facts), **self._about()},
            self.text(),
        )

    def text(self) -> str:
        """The results as a table."""
        return table(self.results, self.workloads)

    def _about(self) -> dict[str, Any]:
        forced = self.setup.acceptance
        return {
            "drafts": f"{self.setup.drafts} by {self.setup.drafter}",
            "acceptance": "as it comes" if forced is None else f"forced to {forced}",
            "cache MiB": self.setup.cache_mib,
            "states": self.setup.state_dtype if self.setup.on_gpu else "as they come",
        }

    def _document(self) -> dict[str, Any]:
        return {
            "engine": self.args.engine,
            "setup": asdict(self.setup),
            "shapes": shapes.shape(self.setup.model),
            "flags": {
                name: sides.arguments(
                    self.args.engine, self.setup, self.configurations[name]
                )
                | {"model": self.setup.model, "model_path": self.setup.model}
                for name in self.results
            },
            "machine": machine(),
            "results": self.results,
        }


def setup(args: argparse.Namespace, on: str) -> Setup:
    """What all sides of a run share."""
    gpu = on == "gpu"
    acceptance = args.acceptance
    if acceptance is None and gpu:
        acceptance = ACCEPTANCE
    scale = SCALES[on]
    return Setup(
        model=args.model or ("qwen3.5-4b" if gpu else shapes.BUNDLED),
        cache_mib=args.cache_mib or (GPU_MIB if gpu else CPU_MIB),
        scale=scale,
        on_gpu=gpu,
        drafts=args.drafts,
        acceptance=acceptance or None,
        drafter=args.drafter,
        state_dtype=args.state_dtype,
        running=max(scale.decoding) if gpu else scale.crowd,
        libraries=args.libraries,
    )


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", choices=sides.ENGINES, default="vllm")
    parser.add_argument("--model", choices=shapes.NAMES)
    parser.add_argument("--on", choices=("cpu", "gpu"), help="what is there")
    parser.add_argument("--cache-mib", type=int, help=f"of each engine ({GPU_MIB})")
    parser.add_argument("--drafts", type=int, default=3, help="(%(default)s)")
    parser.add_argument(
        "--acceptance",
        type=float,
        help="tokens of a verification, forced; 0 for what drafts are worth, as on a "
        f"CPU ({ACCEPTANCE})",
    )
    parser.add_argument("--drafter", choices=("mtp", "ngram"), default="mtp")
    parser.add_argument(
        "--state-dtype", choices=sides.STATE_DTYPES, default=sides.STATE_DTYPES[0]
    )
    parser.add_argument(
        "--libraries",
        action="store_true",
        help="let engines prefill gated delta nets with what they take by default, "
        "such as FlashInfer's kernels, and not with Triton's",
    )
    parser.add_argument("--quick", action="store_true", help="fewer sides and rounds")
    parser.add_argument("--rounds", type=int, help=f"({ROUNDS})")
    parser.add_argument("--only", nargs="+", metavar="SIDE", help="sides to run")
    parser.add_argument("--workloads", nargs="+", metavar="NAME")
    parser.add_argument(
        "--extra",
        nargs=2,
        action="append",
        default=[],
        metavar=("NAME", "OPTIONS"),
        help="another side of the plugin, with options as JSON",
    )
    parser.add_argument(
        "--at-once", type=int, default=8, help="engines that fit the device together"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=float("inf"),
        help="begin nothing after so many",
    )
    parser.add_argument("--out", type=Path, help="path without suffix")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    """Be one engine, or measure all and report."""
    run = Run(parse())
    if run.args.one:
        run.serve(run.args.one)
    else:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the engines too
        run.measure()
        print(run.text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
