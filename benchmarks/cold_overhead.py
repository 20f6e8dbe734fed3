# SPDX-License-Identifier: Apache-2.0
"""What the plugin costs where it cannot help: prompts that share nothing.

Three servers of one engine are started once: with the plugin, stock with prefix
caching on, and stock with it off.  Round after round each gets new random
prompts, one server at a time, in an order that rotates.  The ratios are paired:
plugin by stock within one round, so that what slows the machine down for a while
slows both down; the median over all rounds is the result.

    python benchmarks/cold_overhead.py --rounds 30

writes `benchmarks/results/cold-overhead-vllm-cpu.json` and `.md`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import string
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hybrid_plugin.demo.client import Client
from hybrid_plugin.demo.engines import VllmEngine
from hybrid_plugin.demo.measure import SETTLE_S
from hybrid_plugin.demo.report import machine
from hybrid_plugin.demo.run import bundled_model
from hybrid_plugin.demo.server import DemoError, Server, free_port
from hybrid_plugin.demo.workloads import message

RESULTS = Path(__file__).parent / "results"
TARGET = 0.97
PLUGIN, STOCK_ON, STOCK_OFF = "plugin", "stock, cache on", "stock, cache off"


@dataclass(frozen=True)
class Shape:
    """One kind of traffic."""

    name: str
    requests: int
    prompt: int
    answer: int
    concurrency: int = 8


SHAPES = (
    Shape("long prompts", requests=16, prompt=600, answer=8),
    Shape("long answers", requests=16, prompt=40, answer=96),
)


@dataclass
class Side:
    """A server, and the throughput of each round by shape."""

    name: str
    server: Server
    tokens_per_s: dict[str, list[float]] = field(default_factory=dict)


def prompts(rng: random.Random, shape: Shape) -> list[str]:
    """Random text, so that not even two tokens in a row are shared for long."""
    letters = string.ascii_letters + string.digits + " "
    return [
        "".join(rng.choices(letters, k=shape.prompt)) for _ in range(shape.requests)
    ]


async def send(side: Side, shape: Shape, texts: Sequence[str]) -> float:
    """Send one round; returns prompt and answer tokens per second.

    Raises:
        DemoError: if a request failed or anything was found in the cache.
    """
    extra = {"ignore_eos": True}
    client = Client(side.server.url, "tiny", extra, logprobs=False)
    gate = asyncio.Semaphore(shape.concurrency)

    async def one(text: str) -> int:
        async with gate:
            answer = await client.ask([message("user", text)], shape.answer)
        if answer.error is not None or answer.cached_tokens:
            raise DemoError(
                f"The {side.name} server answered with {answer.error or 'a hit'}."
            )
        return answer.prompt_tokens + answer.generated_tokens

    begin = time.monotonic()
    tokens = await asyncio.gather(*(one(text) for text in texts))
    seconds = time.monotonic() - begin
    await client.close()
    return sum(tokens) / seconds


def measure(sides: Sequence[Side], rounds: int, warm_up: int) -> None:
    """Run all rounds, and note each in its side."""
    rng = random.Random(time.time_ns())
    for number in range(-warm_up, rounds):
        start = number % len(sides)
        for side in [*sides[start:], *sides[:start]]:
            time.sleep(SETTLE_S)
            asyncio.run(send(side, SHAPES[1], prompts(rng, SHAPES[1])[:8]))
            for shape in SHAPES:
                speed = asyncio.run(send(side, shape, prompts(rng, shape)))
                if number >= 0:
                    side.tokens_per_s.setdefault(shape.name, []).append(speed)
        load = os.getloadavg()[0]
        name = f"round {number + 1} of {rounds}" if number >= 0 else "warm-up"
        print(f"{name}, load {load:.1f}", flush=True)


def summary(sides: Sequence[Side]) -> list[dict[str, Any]]:
    """Medians, and the plugin's paired ratio to each stock server."""
    by_name = {side.name: side.tokens_per_s for side in sides}
    return [
        {
            **asdict(shape),
            "tokens_per_s": {
                name: {
                    "median": round(statistics.median(speeds[shape.name]), 1),
                    "best": round(max(speeds[shape.name]), 1),
                    "rounds": [round(speed, 1) for speed in speeds[shape.name]],
                }
                for name, speeds in by_name.items()
            },
            "plugin_to": {
                name: ratio(by_name[PLUGIN][shape.name], by_name[name][shape.name])
                for name in (STOCK_ON, STOCK_OFF)
            },
        }
        for shape in SHAPES
    ]


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Mapping[str, float]:
    """Of paired rounds: the median, its quartiles, and best against best."""
    paired = sorted(a / b for a, b in zip(ours, theirs, strict=True))
    low, middle, high = (
        statistics.quantiles(paired, n=4, method="inclusive")
        if len(paired) > 1
        else paired * 3
    )
    best = max(ours) / max(theirs)
    names = ("quartile_1", "median", "quartile_3", "best_to_best")
    return dict(
        zip(names, (round(x, 4) for x in (low, middle, high, best)), strict=True)
    )


def markdown(data: Mapping[str, Any]) -> str:
    """The same as a table."""
    lines = [
        "# Cold overhead, vLLM on a CPU",
        "",
        f"vLLM {data['engine_version']}, {data['machine']['cores']} cores of "
        f"{data['machine']['processor']}, bundled tiny model in bfloat16, "
        f"{data['rounds']} rounds, nothing shared between prompts. Made by "
        "`benchmarks/cold_overhead.py`.",
        "",
        "Tokens per second (prompt and answer), median of rounds; ratios are of "
        "paired rounds, median (quartiles), and of each side's best round.",
        "",
        f"| traffic | {PLUGIN} | {STOCK_ON} | {STOCK_OFF} | plugin / on | "
        "plugin / off | best rounds, / on | best rounds, / off |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in data["traffic"]:
        what = (
            f"{row['name']}: {row['requests']} x {row['prompt']} + {row['answer']} "
            f"tokens, {row['concurrency']} at a time"
        )
        speeds = [f"{s['median']:,.0f}" for s in row["tokens_per_s"].values()]
        ratios = [
            f"{r['median']:.3f} ({r['quartile_1']:.3f} to {r['quartile_3']:.3f})"
            for r in row["plugin_to"].values()
        ]
        best = [f"{r['best_to_best']:.3f}" for r in row["plugin_to"].values()]
        lines.append("| " + " | ".join([what, *speeds, *ratios, *best]) + " |")
    loads = ", ".join(str(load) for load in data["load"])
    lines += [
        "",
        f"Load of the machine over the last 1, 5 and 15 minutes: {loads} (the "
        "benchmark alone makes 1 to 2). Where it is higher, others used it, medians "
        "scatter, and the ratio of each side's best round says more.",
        "",
    ]
    return "\n".join(lines)


def start(cache_mib: int, logs: Path) -> Iterator[Side]:
    """Start the three servers; each is yielded before it is ready."""
    for name, plugin, flags in (
        (PLUGIN, True, ()),
        (STOCK_ON, False, ()),
        (STOCK_OFF, False, ("--no-enable-prefix-caching",)),
    ):
        engine = VllmEngine(cache_mib * 2**20, stock_flags=flags)
        port = free_port()
        launch = engine.launch(bundled_model().resolve(), port, plugin=plugin)
        log = logs / f"cold-{name.replace(', ', '-').replace(' ', '-')}.log"
        server = Server(name, launch, port, log)
        server.start()
        yield Side(name, server)


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30, help="(%(default)s)")
    parser.add_argument("--warm-up", type=int, default=2, help="rounds not counted")
    parser.add_argument("--cache-mib", type=int, default=64, help="(%(default)s)")
    parser.add_argument("--out", type=Path, default=RESULTS / "cold-overhead-vllm-cpu")
    args = parser.parse_args()
    try:
        data = run(args)
    except DemoError as error:
        print(error, file=sys.stderr)
        return 1
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.with_suffix(".json").write_text(json.dumps(data, indent=2) + "\n")
    args.out.with_suffix(".md").write_text(markdown(data))
    print(markdown(data))
    return 0


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Start the servers, measure, and end them."""
    with ExitStack() as stack:
        sides = []
        for side in start(args.cache_mib, Path("build")):
            stack.callback(side.server.stop)
            sides.append(side)
        for side in sides:
            side.server.wait_until_ready()
        measure(sides, args.rounds, args.warm_up)
    return {
        "engine": "vllm",
        "engine_version": VllmEngine(0).version(),
        "machine": machine(),
        "load": [round(load, 1) for load in os.getloadavg()],
        "rounds": args.rounds,
        "cache_bytes": args.cache_mib * 2**20,
        "target": TARGET,
        "traffic": summary(sides),
    }


if __name__ == "__main__":
    sys.exit(main())
