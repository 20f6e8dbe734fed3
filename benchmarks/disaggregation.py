# SPDX-License-Identifier: Apache-2.0
"""One server computes prompts and another one answers: the plugin's way and vLLM's.

The plugin's pair (`peers`, through host memory) and vLLM's (NixlConnector) stand behind
the same router, `hybrid-plugin route`; one server of each that does both runs beside
them.  Servers have equal bytes of cache on the device.  All sides are asked the same,
in turns, over HTTP, as users do; prefill servers are on the first GPU, decode servers
on the second.

* prompts of 2,000 to 6,000 tokens behind shared system prompts;
* chats, whose turns contain all that was said before.

    python -m benchmarks.disaggregation --model qwen3-next --experts 12 --out x
    python -m benchmarks.disaggregation ... --go-on --out x   # more rounds or sides
    python -m benchmarks.disaggregation --at-once 1 --out x   # on a CPU: bundled model

The bundled model has trained weights: there answers are compared with those of one
stock server.  Other models have dummies of real shapes, and their answers mean nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks import rounds
from benchmarks.prefill_decode import models, sides
from benchmarks.prefill_decode.running import RunningSide, warm_up
from benchmarks.prefill_decode.sides import Setup
from benchmarks.prefill_decode.table import table
from benchmarks.prefill_decode.traffic import GPU, SMALL, workloads
from benchmarks.prefix_sides import machine, turns
from benchmarks.rounds import check_known
from hybrid_plugin.tools.doctor.installed import loading_problem

START_LIMIT_S = {"gpu": 480, "cpu": 1200}
"""A server that takes longer hangs, and the other sides go on."""
GPU_MIB, GPU_HOST_MIB = 12 << 10, 16 << 10
CPU_MIB, CPU_HOST_MIB = 24, 64
STREAM_INTERVAL = 8


class Run:
    """What the command line asks for."""

    def __init__(self, args: argparse.Namespace) -> None:
        """Settle it.

        Raises:
            SystemExit: for a side or a workload that is not known, or if sides of the
                plugin would run without it.
        """
        self.args = args
        on = args.on or ("cpu" if machine()["device"] == "CPU" else "gpu")
        self.setup = setup(args, on)
        self.deployments = sides.deployments(self.setup)
        self.names = args.only or list(sides.USUAL)
        self.order = list(workloads(self.setup.scale))
        self.workloads = args.workloads or self.order
        check_known(self.names, self.deployments, "--only")
        check_known(self.workloads, self.order, "--workloads")
        chosen = [self.deployments[name] for name in self.names]
        problem = loading_problem("vllm")
        if problem and any(one.options is not None for one in chosen):
            raise SystemExit(f"what is measured would not be the plugin: {problem}")
        self.results: dict[str, Any] = {}
        if args.go_on:
            self.results = rounds.read(args.out)["results"]
        self._first = min(rounds.first_round(self.results, one) for one in self.names)

    def measure(self) -> None:
        """As many sides at a time as fit, in turns, until done or time is over."""
        end = time.monotonic() + self.args.seconds
        models.write(self.setup.model)
        groups = rounds.groups(self.names, self.args.at_once)
        for names, its_end in rounds.shares(groups, end):
            self._measure(names, its_end)

    def _measure(self, names: Sequence[str], end: float) -> None:
        """Sides that run together, until all is done or time is over."""
        with ExitStack() as stack:
            running = []
            for lane, name in enumerate(names):
                deployment = self.deployments[name]
                running.append(RunningSide(name, self.setup, deployment, lane))
                earlier = self.results.get(name, {}).get("workloads", {})
                running[-1].outcomes = earlier
                stack.callback(running[-1].stop)
            stack.callback(_end, running)
            limit = START_LIMIT_S["gpu" if self.setup.on_gpu else "cpu"]
            ready = min(end, time.monotonic() + limit)
            for side in running:
                side.wait_until_ready(ready)
            self._save(running)
            print("servers are ready", file=sys.stderr, flush=True)
            asyncio.run(warm_up(running))
            self._take_turns(running, end)

    def _take_turns(self, running: list[RunningSide], end: float) -> None:
        every = turns(running, self.args.rounds, self.workloads)
        for turn in rounds.in_time(every, end):
            for side, name, number in turn:
                side.run(name, self._first + number)
                self._save(running)
        self._save(running)

    def _save(self, running: Sequence[RunningSide]) -> None:
        self.results |= {side.name: side.result() for side in running}
        if self.args.out is None:
            return
        facts = next((side.facts for side in running if side.facts), {})
        rounds.save(
            self.args.out,
            self._document(),
            f"{self.setup.model}, prefill and decode servers",
            {**facts, **self._about()},
            self.text(),
        )

    def text(self) -> str:
        """The results as tables."""
        return table(self.results, self.order)

    def _about(self) -> dict[str, Any]:
        experts = self.setup.experts
        return {
            "device cache MiB of each server": self.setup.cache_mib,
            "host MiB of each of the plugin's": self.setup.host_mib,
            "requests at a time": self.setup.scale.concurrency,
            "tokens of a piece of an answer": self.setup.stream_interval,
            **({} if experts is None else {"experts": experts}),
        }

    def _document(self) -> dict[str, Any]:
        return {
            "setup": asdict(self.setup),
            "shapes": models.shape(self.setup.model),
            "flags": {
                name: sides.arguments(self.setup, self.deployments[name])
                for name in self.results
            },
            "machine": machine(),
            "results": self.results,
        }


def setup(args: argparse.Namespace, on: str) -> Setup:
    """What all sides of a run share."""
    gpu = on == "gpu"
    model = args.model or ("qwen3-next" if gpu else models.BUNDLED)
    trained = models.has_weights(model)
    scale = replace(GPU if gpu and not trained else SMALL, speaks=trained)
    if args.concurrency:
        scale = replace(scale, concurrency=args.concurrency)
    return Setup(
        model=model,
        cache_mib=args.cache_mib or (GPU_MIB if gpu else CPU_MIB),
        host_mib=args.host_mib or (GPU_HOST_MIB if gpu else CPU_HOST_MIB),
        scale=scale,
        on_gpu=gpu,
        experts=args.experts,
        stream_interval=args.stream_interval,
        flags=tuple(args.flag),
        variables=dict(pair.split("=", 1) for pair in args.variable),
    )


def _end(running: Iterable[RunningSide]) -> None:
    """Ask all to end, before any is waited for."""
    for side in running:
        side.end()


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=models.NAMES, help="(qwen3-next; bundled)")
    parser.add_argument("--experts", type=int, help="in place of the model's")
    parser.add_argument(
        "--cache-mib", type=int, help=f"of each server's device ({GPU_MIB}; {CPU_MIB})"
    )
    parser.add_argument(
        "--host-mib",
        type=int,
        help=f"of each of the plugin's servers ({GPU_HOST_MIB}; {CPU_HOST_MIB})",
    )
    parser.add_argument(
        "--concurrency",
        type=int,
        help=f"requests at a time ({GPU.concurrency}; {SMALL.concurrency})",
    )
    parser.add_argument(
        "--stream-interval",
        type=int,
        default=STREAM_INTERVAL,
        help="tokens of a piece of an answer, so that neither clients nor the router "
        "are what is measured (%(default)s)",
    )
    parser.add_argument("--rounds", type=int, default=3, help="(%(default)s)")
    parser.add_argument("--only", nargs="+", metavar="SIDE", help="sides to run")
    parser.add_argument("--workloads", nargs="+", metavar="NAME")
    parser.add_argument(
        "--at-once", type=int, default=4, help="sides that fit the devices together"
    )
    parser.add_argument(
        "--flag", action="append", default=[], help="another one of `vllm serve`"
    )
    parser.add_argument(
        "--variable",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="of the servers' environment, such as UCX_TLS=tcp,self",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=float("inf"),
        help="begin nothing after so many",
    )
    parser.add_argument("--out", type=Path, help="path without suffix")
    parser.add_argument(
        "--go-on", action="store_true", help="add rounds or sides to what --out has"
    )
    parser.add_argument("--on", choices=("cpu", "gpu"), help="what is there")
    return parser.parse_args()


def main() -> int:
    """Measure all and report."""
    run = Run(parse())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the servers too
    run.measure()
    print(run.text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
