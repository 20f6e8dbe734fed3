# SPDX-License-Identifier: Apache-2.0
"""Elastic pools against every fixed split and against the engine alone, in one run.

Three phases follow each other, round after round: many short chats with a handful of
assistants, each of which has a system prompt, want state slots, a few long documents
want KV pages, the third wants both.  A fixed split suits one of them.  All engines get
equal bytes of cache memory and take turns, as in `vllm_prefix`.

    python -m benchmarks.elastic --engine vllm --out benchmarks/results/elastic-x
    python -m benchmarks.elastic_picture benchmarks/results/elastic-x.json x.svg
    python -m benchmarks.elastic --model tiny --cache-mib 12 --out ...   # on a CPU
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import fields, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks import elastic_sglang, elastic_vllm, rounds
from benchmarks.elastic_engine import START_LIMIT_S, Limit
from benchmarks.elastic_setup import Configuration, Setup, of_plugin
from benchmarks.elastic_table import table
from benchmarks.elastic_workloads import CPU, GPU, Scale, phases
from benchmarks.prefix_models import MODELS
from benchmarks.prefix_sides import Side, machine, turns, write

ENGINES: dict[str, ModuleType] = {"vllm": elastic_vllm, "sglang": elastic_sglang}
TINY = "tiny"
"""The model for machines without a GPU."""


class Run:
    """What the command line asks for."""

    def __init__(self, args: argparse.Namespace) -> None:
        """Settle it.

        Raises:
            SystemExit: for a configuration that is not known.
        """
        self.args = args
        # Looking may take memory of the device: engines' processes are told.
        self.on = args.on or ("cpu" if machine()["device"] == "CPU" else "gpu")
        self.engine = ENGINES[args.engine]
        self.setup = Setup(
            model=args.model,
            cache_mib=args.cache_mib,
            scale=scale(args.model, args.scale),
            experts=args.experts,
            on_gpu=self.on == "gpu",
        )
        self.configurations: dict[str, Configuration] = {
            **self.engine.STOCK,
            **of_plugin(args.ratios),
        }
        self.names = args.only or list(self.configurations)
        self.order = [p for p in phases(self.setup.scale) if p[0] in args.phases]
        unknown = [name for name in self.names if name not in self.configurations]
        if unknown:
            known = "; ".join(self.configurations)
            raise SystemExit(f"--only: {unknown[0]!r} is none of: {known}")

    def serve(self, name: str) -> None:
        """Be one configuration's engine."""
        starting = Limit(START_LIMIT_S)
        self.engine.serve(self.setup, self.configurations[name], starting)

    def start(self, name: str, lane: int) -> Side:
        """Start one configuration's process, the `lane`-th of those that run."""
        command = [sys.executable, "-m", "benchmarks.elastic", *sys.argv[1:]]
        command += ["--one", name, "--on", self.on]
        return Side(name, command, self.variables(name, lane))

    def variables(self, name: str, lane: int) -> dict[str, str]:
        """The environment of one configuration's process."""
        configuration = self.configurations[name]
        found: dict[str, str] = self.engine.variables(self.setup, configuration, lane)
        if self.args.gpus:
            gpu = self.args.gpus[lane % len(self.args.gpus)]
            found |= {"CUDA_VISIBLE_DEVICES": str(gpu)}
        return found

    def measure(self) -> dict[str, Any]:
        """Every configuration, so many of them at a time as fit."""
        self.engine.prepare(self.setup)
        results: dict[str, Any] = {name: {} for name in self.names}
        end = time.monotonic() + self.args.seconds
        groups = rounds.groups(self.names, self.args.at_once)
        for names, its_end in rounds.shares(groups, end):
            self._measure(names, its_end, results)
        return results

    def _measure(
        self, names: Sequence[str], end: float, results: dict[str, Any]
    ) -> None:
        """Configurations that run together, until all is done or time is over."""
        with ExitStack() as stack:
            sides = []
            for lane, name in enumerate(names):
                sides.append(self.start(name, lane))
                stack.push(stop_or_kill(sides[-1]))
            for side in sides:
                side.wait_until_ready()
            self._save(sides, results)
            every = turns(sides, self.args.rounds, self.order)
            for turn in rounds.in_time(every, end, "another phase"):
                for side, phase, seed in turn:
                    side.run(phase, seed)
                    self._save(sides, results)

    def _save(self, sides: Sequence[Side], results: dict[str, Any]) -> None:
        """Write what there is so far."""
        results |= {side.name: side.result() for side in sides}
        if self.args.out is None:
            return
        document = {
            "engine": self.args.engine,
            "default": self.engine.DEFAULT,
            "model": self.args.model,
            "shapes": MODELS[self.args.model] | self.setup.model_overrides,
            "cache_mib": self.args.cache_mib,
            "flags": self.engine.shared_arguments(self.setup)
            | {"model": self.args.model},
            "configurations": {
                name: {"flags": dict(c.flags), "options": c.options}
                for name, c in self.configurations.items()
            },
            "scale": vars(self.setup.scale),
            "gpus": len(self.args.gpus or [0]),
            "phases": self.order,
            "machine": machine(),
            "results": results,
        }
        write(self.args.out, ".json", as_json(document))
        write(self.args.out, ".md", self.table(results))

    def table(self, results: dict[str, Any]) -> str:
        """The results in Markdown."""
        return table(results, self.order, list(self.engine.STOCK))


def stop_or_kill(side: Side) -> Callable[..., None]:
    """What to do with a side at the end: wait for it only if nothing went wrong."""

    def end(wrong: type[BaseException] | None, *_: object) -> None:
        if wrong is not None:
            side.kill()
        side.stop()

    return end


def as_json(document: dict[str, Any]) -> str:
    """Indented, but with each list of numbers on one line."""
    text = json.dumps(document, indent=1)
    return re.sub(r"\[[\s\d.,e+-]+\]", lambda found: re.sub(r"\s+", "", found[0]), text)


def scale(model: str, changes: Sequence[str]) -> Scale:
    """Traffic that suits the model, with changes like `chats=300`.

    Raises:
        SystemExit: for a change that cannot be made.
    """
    base = CPU if model == TINY else GPU
    known = [field.name for field in fields(Scale)]
    found: dict[str, int] = {}
    for change in changes:
        name, _, value = change.partition("=")
        if name not in known or not value.isdecimal() or int(value) < 1:
            raise SystemExit(f"--scale takes NAME=NUMBER of {', '.join(known)}")
        found[name] = int(value)
    return replace(base, **found)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--engine", choices=ENGINES, default="vllm")
    parser.add_argument("--model", choices=MODELS, default="qwen3-next")
    parser.add_argument("--experts", type=int, help="in place of the model's")
    parser.add_argument(
        "--scale", nargs="*", default=[], metavar="NAME=NUMBER", help="more or less"
    )
    parser.add_argument(
        "--cache-mib", type=int, default=12 << 10, help="of each engine (%(default)s)"
    )
    parser.add_argument(
        "--ratios",
        type=float,
        nargs="*",
        default=[0.15, 0.3, 0.5, 0.8],
        help="fixed splits: shares of the memory for states (%(default)s)",
    )
    parser.add_argument(
        "--phases",
        choices=("A", "B", "C"),
        nargs="+",
        default=("A", "B", "C"),
        help="that each round has (all)",
    )
    parser.add_argument("--rounds", type=int, default=2, help="(%(default)s)")
    parser.add_argument(
        "--seconds",
        type=float,
        default=float("inf"),
        help="begin no phase after so long, nor one that the longest so far would "
        "not fit before (no limit)",
    )
    parser.add_argument("--only", nargs="*", help="configurations to run")
    parser.add_argument(
        "--at-once", type=int, default=4, help="engines that fit the device together"
    )
    parser.add_argument(
        "--gpus",
        type=int,
        nargs="+",
        help="equal ones to spread the engines over, where they do not fit on one; "
        "they take turns all the same",
    )
    parser.add_argument("--out", type=Path, help="path without suffix")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--on", choices=("cpu", "gpu"), help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    """Be one engine, or measure all and report."""
    args = parse()
    run = Run(args)
    if args.one:
        run.serve(args.one)
    else:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the engines too
        print(run.table(run.measure()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
