# SPDX-License-Identifier: Apache-2.0
"""What the plugin costs where it cannot help: prompts that share nothing.

Three servers of one engine are started once: with the plugin, stock with prefix
caching on, and stock with it off.  Round after round each gets new random
prompts, one server at a time, in an order that rotates.  The ratios are paired:
plugin by stock within one round, so that what slows the machine down for a while
slows both down; the median over all rounds is the result.

    python benchmarks/cold_overhead.py --rounds 30

writes `benchmarks/results/cold-overhead-vllm-cpu.json` and `.md`.  On a GPU, where
the bundled model takes next to no time, what is measured is the host's work alone:
CUDA graphs are on, rounds are larger, and `--out` should name the device.
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
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import torch

from hybrid_plugin.tools.demo.engines import VllmEngine
from hybrid_plugin.tools.demo.measure import SETTLE_S
from hybrid_plugin.tools.demo.report import machine
from hybrid_plugin.tools.demo.run import bundled_model
from hybrid_plugin.tools.demo.server import DemoError, Server, free_port
from hybrid_plugin.tools.demo.workloads import message

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


ON_GPU = torch.cuda.is_available()
WAKE_UP = Shape("wake-up", requests=8, prompt=40, answer=32)
"""Sent before every measurement: a server is slow after a rest."""
SHAPES = (
    Shape("long prompts", requests=16, prompt=600, answer=8),
    Shape("long answers", requests=16, prompt=40, answer=96),
)
GPU_SHAPES = (
    Shape("long prompts", requests=64, prompt=600, answer=8),
    Shape("long answers", requests=16, prompt=40, answer=96),
    Shape("long answers", requests=64, prompt=40, answer=96, concurrency=32),
)
GPU_FLAGS = (
    "--gpu-memory-utilization=0.05",  # how much must be free at the start, no more
    "--gdn-prefill-backend=triton",
)


@dataclass
class Side:
    """A server, and the throughput of each round by shape."""

    name: str
    server: Server
    tokens_per_s: dict[Shape, list[float]] = field(default_factory=dict)


def prompts(rng: random.Random, shape: Shape) -> list[str]:
    """Random text, so that not even two tokens in a row are shared for long."""
    letters = string.ascii_letters + string.digits + " "
    return [
        "".join(rng.choices(letters, k=shape.prompt)) for _ in range(shape.requests)
    ]


async def send(side: Side, shape: Shape, texts: Sequence[str]) -> float:
    """Send one round; returns prompt and answer tokens per second.

    Answers come in one piece: to read streams would keep the client busier than
    the servers are.

    Raises:
        DemoError: if a request failed or anything was found in the cache.
    """
    gate = asyncio.Semaphore(shape.concurrency)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)

    async def one(client: httpx.AsyncClient, text: str) -> int:
        body = {
            "model": "tiny",
            "messages": [message("user", text)],
            "max_tokens": shape.answer,
            "temperature": 0,
            "ignore_eos": True,
        }
        async with gate:
            response = await client.post("/v1/chat/completions", json=body)
        if response.is_error:
            raise DemoError(f"The {side.name} server answered with {response.text}.")
        usage = response.json()["usage"]
        if (usage["prompt_tokens_details"] or {}).get("cached_tokens"):
            raise DemoError(f"The {side.name} server found a prompt in its cache.")
        return int(usage["total_tokens"])

    url = side.server.url
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as client:
        begin = time.monotonic()
        tokens = await asyncio.gather(*(one(client, text) for text in texts))
        seconds = time.monotonic() - begin
    return sum(tokens) / seconds


def measure(
    sides: Sequence[Side], shapes: Sequence[Shape], rounds: int, warm_up: int
) -> None:
    """Run all rounds, and note each in its side."""
    rng = random.Random(time.time_ns())
    for number in range(-warm_up, rounds):
        for turn, shape in enumerate(shapes):
            first = (number + turn) % len(sides)
            for side in [*sides[first:], *sides[:first]]:
                speed = one_round(side, shape, rng)
                if number >= 0:
                    side.tokens_per_s.setdefault(shape, []).append(speed)
        load = os.getloadavg()[0]
        name = f"round {number + 1} of {rounds}" if number >= 0 else "warm-up"
        print(f"{name}, load {load:.1f}", flush=True)


def one_round(side: Side, shape: Shape, rng: random.Random) -> float:
    """Measure one server once, when the one before it is at rest."""
    if not ON_GPU:
        time.sleep(SETTLE_S)
    asyncio.run(send(side, WAKE_UP, prompts(rng, WAKE_UP)))
    return asyncio.run(send(side, shape, prompts(rng, shape)))


def summary(sides: Sequence[Side], shapes: Sequence[Shape]) -> list[dict[str, Any]]:
    """Medians, and the plugin's paired ratio to each stock server."""
    by_name = {side.name: side.tokens_per_s for side in sides}
    return [
        {
            **asdict(shape),
            "tokens_per_s": {
                name: {
                    "median": round(statistics.median(speeds[shape]), 1),
                    "best": round(max(speeds[shape]), 1),
                    "rounds": [round(speed, 1) for speed in speeds[shape]],
                }
                for name, speeds in by_name.items()
            },
            "plugin_to": {
                name: ratio(by_name[PLUGIN][shape], by_name[name][shape])
                for name in (STOCK_ON, STOCK_OFF)
            },
        }
        for shape in shapes
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
    device = data["device"]
    lines = [
        f"# Cold overhead, vLLM on {device or 'a CPU'}",
        "",
        f"vLLM {data['engine_version']}, "
        + (f"one {device}, " if device else "")
        + f"{data['machine']['cores']} cores of "
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
        if ON_GPU:
            engine = replace(engine, device_flags=GPU_FLAGS)
        port = free_port()
        launch = engine.launch(bundled_model().resolve(), port, plugin=plugin)
        title = f"cold-{name.replace(', ', '-').replace(' ', '-')}"
        log = logs / f"{title}.log"
        # Servers that start together must not write to one compile cache.
        cache = {"VLLM_CACHE_ROOT": str(logs.resolve() / title)}
        launch = replace(launch, environment={**launch.environment, **cache})
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
    shapes = GPU_SHAPES if ON_GPU else SHAPES
    with ExitStack() as stack:
        sides = []
        for side in start(args.cache_mib, Path("build")):
            stack.callback(side.server.stop)
            sides.append(side)
        for side in sides:
            side.server.wait_until_ready()
        measure(sides, shapes, args.rounds, args.warm_up)
    return {
        "engine": "vllm",
        "engine_version": VllmEngine(0).version(),
        "device": torch.cuda.get_device_name(0) if ON_GPU else None,
        "machine": machine(),
        "load": [round(load, 1) for load in os.getloadavg()],
        "rounds": args.rounds,
        "cache_bytes": args.cache_mib * 2**20,
        "target": TARGET,
        "traffic": summary(sides, shapes),
    }


if __name__ == "__main__":
    sys.exit(main())
