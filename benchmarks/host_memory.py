# SPDX-License-Identifier: Apache-2.0
"""A device cache that is far too small, with and without host memory behind it.

Beside the plugin with host memory run the plugin without any, the engine without any,
the engine's own offloading to host memory with equal bytes (vLLM's OffloadingConnector,
SGLang's HiCache; on GPUs), and the plugin with all those bytes on the device, which is
the most that host memory could do.  All sides answer the same requests in turns, as in
`vllm_prefix`; weights are dummies of real shapes.

* agents: many with long contexts take turns; most have lost their place on the device
  when they come back.
* return: prefixes of 10,000 tokens, other content until the device has forgotten
  them, and the prefixes again: time to the first token, restored and recomputed.
* decoding, and decoding beside prompts: what a token costs while what prompts leave is
  copied to the host.

    python -m benchmarks.host_memory --engine vllm --out benchmarks/results/x
    python -m benchmarks.host_memory --engine vllm --out ... --go-on   # more rounds
    python -m benchmarks.host_memory --quick --out x                   # on a CPU
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks import rounds
from benchmarks.elastic import stop_or_kill
from benchmarks.elastic_engine import Limit
from benchmarks.host_tier import sides, traffic
from benchmarks.host_tier.served import START_LIMIT_S, answer_until_closed
from benchmarks.host_tier.sides import Tiers
from benchmarks.host_tier.table import table
from benchmarks.host_tier.traffic import workloads
from benchmarks.passes import engines
from benchmarks.prefix_models import MODELS
from benchmarks.prefix_sides import Side, machine, turns
from benchmarks.rounds import check_known

TINY = "tiny"
"""The model for machines without a GPU."""
GPU_MIB, GPU_HOST_GB = 3 << 10, 8.0
CPU_MIB, CPU_HOST_GB = 8, 0.1


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
        self.tiers = tiers(args, self.on)
        self.configurations = sides.configurations(args.engine, self.tiers)
        self.names = args.only or sides.usual(args.engine, self.tiers)
        self.workloads = args.workloads or list(workloads(self.tiers.scale))
        check_known(self.names, self.configurations, "--only")
        check_known(self.workloads, workloads(self.tiers.scale), "--workloads")
        self.results: dict[str, Any] = {}
        if args.go_on:
            self.results = rounds.read(args.out)["results"]

    def serve(self, name: str) -> None:
        """Be one side's engine."""
        starting = Limit(START_LIMIT_S)
        engine = self.args.engine
        given = sides.arguments(engine, self.tiers, self.configurations[name])

        async def work(running: engines.Running) -> None:
            await answer_until_closed(engine, running, self.tiers.scale, starting)

        engines.run(engine, given, work)

    def start(self, name: str, lane: int) -> Side:
        """Start one side's process, the `lane`-th of those that run."""
        command = [sys.executable, "-m", "benchmarks.host_memory", *sys.argv[1:]]
        command += ["--one", name, "--on", self.on]
        one = self.configurations[name]
        variables = sides.variables(self.args.engine, self.tiers, one, lane)
        side = Side(name, command, variables)
        side.outcomes = self.results.get(name, {}).get("workloads", {})
        return side

    def measure(self) -> dict[str, Any]:
        """As many sides at a time as fit, in turns, until done or time is over."""
        end = time.monotonic() + self.args.seconds
        some = self.tiers.setup(self.configurations[self.names[0]])
        sides.ENGINES[self.args.engine].prepare(some)
        first = min(rounds.first_round(self.results, name) for name in self.names)
        groups = rounds.groups(self.names, self.args.at_once)
        for names, its_end in rounds.shares(groups, end):
            self._measure(names, first, its_end)
        return self.results

    def _measure(self, names: Sequence[str], first: int, end: float) -> None:
        """Sides that run together, until all is done or time is over."""
        with ExitStack() as stack:
            running = []
            for lane, name in enumerate(names):
                running.append(self.start(name, lane))
                stack.push(stop_or_kill(running[-1]))
            for side in running:
                side.wait_until_ready()
            self._save(running)
            print("engines are ready", file=sys.stderr, flush=True)
            every = turns(running, self.args.rounds, self.workloads)
            for turn in rounds.in_time(every, end):
                for side, name, number in turn:
                    side.run(name, first + number)
                    self._save(running)

    def _save(self, running: Sequence[Side]) -> None:
        self.results |= {side.name: side.result() for side in running}
        if self.args.out is None:
            return
        facts = next((side.facts for side in running if side.facts), {})
        rounds.save(
            self.args.out,
            self._document(),
            f"{self.tiers.model}, host memory behind a small cache",
            {**facts, **self._about()},
            self.text(),
        )

    def text(self) -> str:
        """The results as tables."""
        return table(self.results, list(workloads(self.tiers.scale)))

    def _about(self) -> dict[str, Any]:
        experts = self.tiers.experts
        return {
            "device cache MiB": self.tiers.cache_mib,
            "host GB": self.tiers.host_gb,
            **({} if experts is None else {"experts": experts}),
        }

    def _document(self) -> dict[str, Any]:
        engine = self.args.engine
        return {
            "engine": engine,
            "tiers": asdict(self.tiers),
            "shapes": MODELS[self.tiers.model],
            "flags": {
                name: sides.arguments(engine, self.tiers, one)
                | {"model": self.tiers.model, "model_path": self.tiers.model}
                for name, one in self.configurations.items()
                if name in self.results
            },
            "machine": machine(),
            "results": self.results,
        }


def tiers(args: argparse.Namespace, on: str) -> Tiers:
    """What all sides of a run share."""
    small = args.quick or on == "cpu"
    model = args.model or (TINY if small else "qwen3-next")
    cache_mib = args.cache_mib or (CPU_MIB if small else GPU_MIB)
    scale = traffic.CPU if small else traffic.GPU
    scale = replace(
        scale, agents=args.agents or scale.agents, turns=args.turns or scale.turns
    )
    return Tiers(
        model=model,
        cache_mib=cache_mib,
        host_gb=args.host_gb or (CPU_HOST_GB if small else GPU_HOST_GB),
        scale=traffic.overflowing(scale, model, cache_mib << 20),
        on_gpu=on == "gpu",
        experts=args.experts,
    )


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", choices=sides.ENGINES, default="vllm")
    parser.add_argument("--model", choices=MODELS, help=f"(qwen3-next; {TINY})")
    parser.add_argument("--experts", type=int, help="in place of the model's")
    parser.add_argument(
        "--cache-mib", type=int, help=f"of each engine's device ({GPU_MIB}; {CPU_MIB})"
    )
    parser.add_argument(
        "--host-gb",
        type=float,
        help=f"of host memory, 10^9 bytes each ({GPU_HOST_GB}; {CPU_HOST_GB})",
    )
    parser.add_argument(
        "--agents", type=int, help=f"({traffic.GPU.agents}; {traffic.CPU.agents})"
    )
    parser.add_argument(
        "--turns",
        type=int,
        help=f"of each agent ({traffic.GPU.turns}; {traffic.CPU.turns})",
    )
    parser.add_argument("--rounds", type=int, default=2, help="(%(default)s)")
    parser.add_argument(
        "--quick", action="store_true", help="the traffic and model of a CPU"
    )
    parser.add_argument("--only", nargs="+", metavar="SIDE", help="sides to run")
    parser.add_argument("--workloads", nargs="+", metavar="NAME")
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
    parser.add_argument(
        "--go-on", action="store_true", help="add rounds to what --out has"
    )
    parser.add_argument("--on", choices=("cpu", "gpu"), help=argparse.SUPPRESS)
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
