# SPDX-License-Identifier: Apache-2.0
"""Two to four requests at a time: stock settings beside the plugin's kernels and pools.

Requests arrive at the times of a Poisson process, or so many run at a time ("closed").
The rate is what the first side that starts answers with that many at a time, measured
before the first round, and equal for all sides.  Answers differ in length.  All sides
of a round get the same contents at the same times; each round has contents of its own.
With random arrivals the wall time is mostly the schedule's: `request ms`, the mean
time of a request, tells what a faster engine saves, and the wall time of closed cells.

Each side's engine has a process of its own; they take turns, as in `vllm_prefix`.  In
it every forward pass is written down: the host's time to launch it, and the time until
its result is there.

    python -m benchmarks.low_concurrency --engine vllm --out benchmarks/results/x
    python -m benchmarks.low_concurrency --engine vllm --out ... --go-on  # more rounds
    python -m benchmarks.low_concurrency --model tiny --cache-mib 12 --scale 0.05 \\
        --requests 6 --rounds 2 --out x                                   # on a CPU
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks import rounds
from benchmarks.elastic import stop_or_kill
from benchmarks.elastic_setup import Configuration
from benchmarks.low_load import sides
from benchmarks.low_load.cells import CLOSED, POISSON, cells
from benchmarks.low_load.observed import answer_until_closed
from benchmarks.low_load.table import table
from benchmarks.low_load.traffic import PLANS
from benchmarks.passes import engines
from benchmarks.prefix_models import MODELS
from benchmarks.prefix_sides import Side, machine, turns
from benchmarks.rounds import check_known

CALIBRATION = 1 << 20
"""The round before the first, in which rates are found."""


class Run:
    """What the command line asks for."""

    def __init__(self, args: argparse.Namespace) -> None:
        """Settle it.

        Raises:
            SystemExit: for a side that is not known.
        """
        self.args = args
        self.on = args.on or ("cpu" if machine()["device"] == "CPU" else "gpu")
        self.setup = sides.setup(args.model, args.cache_mib, self.on == "gpu")
        self.configurations = sides.configurations(args.engine, args.model)
        self.names = args.only or [
            n for n in self.configurations if n not in (sides.GRAPHS, sides.DEFAULT)
        ]
        check_known(self.names, self.configurations, "--only")
        self.cells = cells(args.plans, args.running, args.arrivals)
        earlier = rounds.read(args.out) if args.go_on else {}
        self.rates: dict[str, float] = earlier.get("rates", {})
        self.results: dict[str, Any] = earlier.get("results", {})

    def serve(self, name: str) -> None:
        """Be one side's engine."""
        given = self._arguments(self.configurations[name])

        async def work(running: engines.Running) -> None:
            await answer_until_closed(running, self.args.requests, self.args.scale)

        engines.run(self.args.engine, given, work)

    def _arguments(self, configuration: Configuration) -> dict[str, Any]:
        return sides.arguments(
            self.args.engine,
            self.setup,
            configuration,
            libraries=self.args.libraries,
        )

    def start(self, name: str, lane: int) -> Side:
        """Start one side's process, the `lane`-th of those that run."""
        command = [sys.executable, "-m", "benchmarks.low_concurrency", *sys.argv[1:]]
        command += ["--one", name, "--on", self.on]
        configuration: Configuration = self.configurations[name]
        variables = sides.variables(self.args.engine, self.setup, configuration, lane)
        side = Side(name, command, variables)
        side.outcomes = self.results.get(name, {}).get("workloads", {})
        return side

    def measure(self) -> dict[str, Any]:
        """All sides in turns, until all is done or time is over."""
        end = time.monotonic() + self.args.seconds
        sides.ENGINES[self.args.engine].prepare(self.setup)
        with ExitStack() as stack:
            running = []
            for lane, name in enumerate(self.names):
                running.append(self.start(name, lane))
                stack.push(stop_or_kill(running[-1]))
            for side in running:
                side.wait_until_ready()
            started = [side for side in running if side.facts is not None]
            if not started:
                raise SystemExit("no engine has started: their logs are above")
            print("engines are ready", file=sys.stderr, flush=True)
            self._find_rates(started[0])
            self._take_turns(running, end)
        return self.results

    def _find_rates(self, side: Side) -> None:
        for cell in self.cells:
            if cell.arrivals == POISSON and cell.name not in self.rates:
                closed = cell.closed.name
                side.run(closed, CALIBRATION, rate=0.0)
                outcome = side.outcomes[closed].pop()
                self.rates[cell.name] = outcome["requests"] / outcome["wall_s"]
        side.outcomes = {name: found for name, found in side.outcomes.items() if found}

    def _take_turns(self, running: list[Side], end: float) -> None:
        names = [cell.name for cell in self.cells]
        done = [
            one["seed"]
            for side in running
            for found in side.outcomes.values()
            for one in found
        ]
        first = max(done, default=-1) + 1
        for turn in rounds.in_time(turns(running, self.args.rounds, names), end):
            for side, name, number in turn:
                side.run(name, first + number, rate=self.rates.get(name, 0.0))
            self._save(running)

    def _save(self, running: list[Side]) -> None:
        self.results |= {side.name: side.result() for side in running}
        if self.args.out is None:
            return
        document = {
            "engine": self.args.engine,
            "model": self.args.model,
            "shapes": MODELS[self.args.model],
            "cache_mib": self.args.cache_mib,
            "requests": self.args.requests,
            "scale": self.args.scale,
            "libraries": self.args.libraries,
            "rates": self.rates,
            "flags": {
                name: self._arguments(configuration)
                | {"model": self.args.model, "model_path": self.args.model}
                for name, configuration in self.configurations.items()
                if name in self.results
            },
            "machine": machine(),
            "results": self.results,
        }
        facts = next((side.facts for side in running if side.facts), {})
        title = f"{self.args.model}, few requests at a time"
        rounds.save(self.args.out, document, title, facts, table(self.results))


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", choices=sides.ENGINES, default="vllm")
    parser.add_argument("--model", choices=MODELS, default="qwen3-next")
    parser.add_argument(
        "--cache-mib", type=int, default=8 << 10, help="of each engine (%(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="(%(default)s)")
    parser.add_argument(
        "--requests", type=int, default=20, help="of a cell and round (%(default)s)"
    )
    parser.add_argument(
        "--running", type=int, nargs="+", default=[2, 4], help="at a time (2 4)"
    )
    parser.add_argument(
        "--arrivals", nargs="+", choices=(POISSON, CLOSED), default=[POISSON, CLOSED]
    )
    parser.add_argument(
        "--plans", nargs="+", choices=PLANS, default=list(PLANS), metavar="PLAN"
    )
    parser.add_argument("--only", nargs="+", metavar="SIDE", help="sides to run")
    parser.add_argument(
        "--libraries",
        action="store_true",
        help="let the engine prefill gated delta nets with what it takes by default, "
        "FlashInfer where it is installed, not with its own Triton kernels",
    )
    parser.add_argument(
        "--scale", type=float, default=1.0, help="of all lengths (%(default)s)"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=float("inf"),
        help="begin nothing after so many",
    )
    parser.add_argument("--out", type=Path, help="path without suffix")
    parser.add_argument(
        "--go-on", action="store_true", help="add rounds to what --out has"
    )
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--on", choices=("cpu", "gpu"), help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    """Be one engine, or measure all and report."""
    run = Run(parse())
    if run.args.one:
        run.serve(run.args.one)
    else:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the engines too
        print(table(run.measure()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
