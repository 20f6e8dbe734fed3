# SPDX-License-Identifier: Apache-2.0
"""Our model classes beside the engines' own: chats, a crowd, and steady decoding.

Bamba on our class beside the engine's Granite-4 in the same sizes, whose layers are the
same apart from its factors; Jamba on our class beside vLLM's own, and in SGLang, which
has none, by itself.  The plugin serves these, with its automatic choice of kernels, so
that nothing but the class differs.  The engine's own class runs once more without the
plugin, with the engine's prefix cache.  Where `--only` names it, our class runs once
more with `"kernels": "ours"`, so that its passes keep states, and in vLLM short prompts
replay CUDA graphs; and there once more without these graphs.  Weights are dummies.
Engines take turns, as in `vllm_prefix`.

    python -m benchmarks.model_classes --engine vllm --out benchmarks/results/x
    python -m benchmarks.model_classes --engine sglang --models bamba --out x
    python -m benchmarks.model_classes --on cpu --out x          # sizes for a CPU
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks import rounds
from benchmarks.drafts import sides
from benchmarks.drafts.served import START_LIMIT_S, answer_until_closed
from benchmarks.drafts.table import COLUMNS, STEADY
from benchmarks.drafts.traffic import DECODE, SCALES, workloads
from benchmarks.elastic import stop_or_kill
from benchmarks.elastic_engine import Limit
from benchmarks.low_load.table import failures, header, row, spread, times
from benchmarks.low_load.table import rounds as rounds_of
from benchmarks.model_shapes import CLASSES, COMPARISONS, Class, write
from benchmarks.passes import engines
from benchmarks.prefix_sides import Side, machine, turns
from benchmarks.prefix_workloads import VOCABULARY
from benchmarks.rounds import check_known

GPU_MIB, CPU_MIB = 10 << 10, 64
"""On a GPU all of 128 sequences fit."""
ALONE = f"{DECODE} 1"
COMPARED = ("tokens/s", "TTFT p50 ms", "request ms", "step ms")


class Run:
    """What the command line asks for."""

    def __init__(self, args: argparse.Namespace) -> None:
        """Settle it."""
        self.args = args
        # Looking may take memory of the device: engines' processes are told.
        self.on = args.on or ("cpu" if machine()["device"] == "CPU" else "gpu")
        scale = SCALES[self.on]
        self.models: list[str] = args.models or list(COMPARISONS)
        self.workloads: list[str] = args.workloads or list(workloads(scale))
        check_known(self.workloads, list(workloads(scale)), "--workloads")
        self.setup = sides.Setup(
            model="",
            cache_mib=GPU_MIB if self.on == "gpu" else CPU_MIB,
            scale=scale,
            on_gpu=self.on == "gpu",
            running=max(scale.decoding),
        )
        self.results: dict[str, Any] = {}

    def arguments(self, one: Class) -> dict[str, Any]:
        """Of one side's engine, in its own words."""
        where, side = self._folder(one), self._side(one)
        return sides.arguments_of(where, self.args.engine, self.setup, side)

    def serve(self, name: str) -> None:
        """Be one side's engine."""
        starting = Limit(START_LIMIT_S)
        engine, scale = self.args.engine, self.setup.scale

        async def work(running: engines.Running) -> None:
            await answer_until_closed(engine, running, scale, VOCABULARY, starting)

        engines.run(engine, self.arguments(CLASSES[name]), work)

    def start(self, name: str, lane: int) -> Side:
        """Start one side's process, the `lane`-th of those that run."""
        command = [sys.executable, "-m", "benchmarks.model_classes", *sys.argv[1:]]
        command += ["--one", name, "--on", self.on]
        side = self._side(CLASSES[name])
        variables = sides.variables(self.args.engine, self.setup, side, lane)
        return Side(name, command, variables)

    def measure(self) -> None:
        """One model after the other, in turns, until all is done or time is over."""
        end = time.monotonic() + self.args.seconds
        for model, its_end in rounds.shares(self.models, end):
            chosen = COMPARISONS[model].sides(self.args.engine)
            if self.args.only:
                every = COMPARISONS[model].sides(self.args.engine, named=True)
                chosen = tuple(name for name in every if name in self.args.only)
            self._measure(chosen, its_end)

    def _measure(self, names: Sequence[str], end: float) -> None:
        with ExitStack() as stack:
            running = []
            for lane, name in enumerate(names):
                write(CLASSES[name], self._folder(CLASSES[name]), self.on == "gpu")
                running.append(self.start(name, lane))
                stack.push(stop_or_kill(running[-1]))
            for side in running:
                side.wait_until_ready()
            print("engines are ready", file=sys.stderr, flush=True)
            every = turns(running, self.args.rounds, self.workloads)
            for turn in rounds.in_time(every, end):
                for side, name, number in turn:
                    side.run(name, number)
                self._save(running)

    def _side(self, one: Class) -> sides.Configuration:
        if not one.plugin:
            return sides.Configuration(drafts=False)
        options = {"elastic": True, **one.options(self.args.engine)}
        return sides.of_plugin(options, drafts=False)

    def _folder(self, one: Class) -> Path:
        return Path(sides.SCRATCH[self.args.engine]) / f"class-{one.folder}"

    def _save(self, running: Sequence[Side]) -> None:
        self.results |= {side.name: side.result() for side in running}
        if self.args.out is None:
            return
        document = {
            "engine": self.args.engine,
            "shapes": {name: CLASSES[name].shape for name in self.results},
            "flags": {
                name: self.arguments(CLASSES[name]) | {"model": name, "model_path": ""}
                for name in self.results
            },
            "machine": machine(),
            "results": self.results,
        }
        facts = next((side.facts for side in running if side.facts), {})
        title = f"Model classes in {self.args.engine}"
        rounds.save(self.args.out, document, title, sides.versions(facts), self.text())

    def text(self) -> str:
        """The results as tables."""
        return "\n".join(table(self.results, self.workloads))


def table(results: dict[str, Any], order: Sequence[str]) -> Iterator[str]:
    """What each side did, and what our class takes beside the engine's own.

    Args:
        results: by side, as `Side.result` gives them.
        order: of the workloads.
    """
    shown = [c for c in (*COLUMNS, STEADY) if c.name != "tokens a verification"]
    yield "Medians over rounds; quartiles in brackets from four rounds on.\n"
    head = ["workload", "side", *(column.name for column in shown)]
    yield from header(head)
    for workload in order:
        for side in results:
            if found := rounds_of(results, side, workload):
                cells = [spread([c.value(r) for r in found], c.digits) for c in shown]
                yield row([workload, side, *cells])
    compared = [c for c in COLUMNS if c.name in COMPARED]
    yield "\nOur class, to the engine's own with the plugin and alone:\n"
    yield from header(["workload", "side", "to", *(c.name for c in compared)])
    pairs = [pair for one in COMPARISONS.values() for pair in one.pairs()]
    for workload in order:
        for one, other in pairs:
            if not results.keys() >= {one, other}:
                continue
            ours, theirs = (rounds_of(results, side, workload) for side in (one, other))
            if ours and theirs:
                cells = [times(ours, theirs, c.value) for c in compared]
                yield row([workload, one, other, *cells])
    yield from first_tokens(results)
    yield from failures(results)


def first_tokens(results: dict[str, Any]) -> Iterator[str]:
    """How long a short prompt takes that comes alone.

    Args:
        results: by side, as `Side.result` gives them.
    """
    found = {side: rounds_of(results, side, ALONE) for side in results}
    found = {side: rounds for side, rounds in found.items() if rounds}
    if not found:
        return
    shown = [c for c in COLUMNS if c.name.startswith("TTFT")]
    yield f"\nThe first token of one prompt (`{ALONE}`):\n"
    yield from header(["side", *(c.name for c in shown)])
    for side, every in found.items():
        yield row([side, *(spread([c.value(r) for r in every], 1) for c in shown)])


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", choices=sides.ENGINES, default="vllm")
    parser.add_argument("--models", nargs="+", choices=COMPARISONS)
    parser.add_argument("--only", nargs="+", choices=CLASSES, help="sides to run")
    parser.add_argument("--workloads", nargs="+", help="only these")
    parser.add_argument("--on", choices=("cpu", "gpu"), help="what is there")
    parser.add_argument("--rounds", type=int, default=3, help="(%(default)s)")
    parser.add_argument(
        "--seconds", type=float, default=1e9, help="begin nothing after so many"
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
