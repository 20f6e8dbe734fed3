# SPDX-License-Identifier: Apache-2.0
"""What moving memory between the pools costs on a GPU, part by part.

    python benchmarks/memory_moves.py --out benchmarks/results/memory-moves-h200

Moves are measured as the executor makes them: granules of a layer-major KV pool
give their memory to a slot-major state pool and take it back, at the shapes of
Qwen3-Next (12 layers, 38 MiB a slot), for several sizes of the blocks that the
driver maps at a time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hybrid_plugin.core.commands import Map, Pool, Unmap
from hybrid_plugin.device.arena import ElasticArena
from hybrid_plugin.device.cuda_arena import CudaArena
from hybrid_plugin.device.executor import Executor
from hybrid_plugin.device.virtual_arena import ByteRange

LAYERS = 12
PAGE_BYTES = 32 << 10
"""Of one layer."""
SLOT_BYTES = 38 << 20
DEVICE = torch.device("cuda", 0)


def milliseconds(work: Callable[[], Any]) -> float:
    """Wall time of a call and of all the device does for it."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - begin)


def used() -> int:
    """Bytes taken on the device, by the driver's count."""
    free, total = torch.cuda.mem_get_info(DEVICE)
    return total - free


class Pools:
    """A KV pool and a state pool over one budget."""

    def __init__(self, budget: int, block: int) -> None:
        self.block = block
        self.slot_blocks = -(-SLOT_BYTES // block)
        self.times: dict[str, float] = {}
        self.before = used()
        begin = time.perf_counter()
        self.arena = CudaArena(budget + block, DEVICE, block)
        refusal = self.arena.hold(budget)
        assert refusal is None, refusal
        self.times["hold s"] = time.perf_counter() - begin
        begin = time.perf_counter()
        granules = budget // (LAYERS * block)
        slots = budget // (self.slot_blocks * block)
        pages = self.arena.reserve(LAYERS * granules * block)
        states = self.arena.reserve(slots * self.slot_blocks * block)
        self.times["reserve s"] = time.perf_counter() - begin
        per_granule = block // PAGE_BYTES
        rows = pages.memory.view(LAYERS, granules * per_granule, -1)
        self.kv = ElasticArena(list(rows), pages, self.arena, per_granule)
        slot_rows = states.memory.view(slots, -1)
        self.states = ElasticArena([slot_rows], states, self.arena, 1)
        self.executor = Executor({Pool.KV: self.kv, Pool.STATE: self.states})


def move(pools: Pools, size: int, rounds: int) -> dict[str, Any]:
    """Move about `size` bytes to the states and back, several times."""
    granules = size // (LAYERS * pools.block)
    slots = granules * LAYERS // pools.slot_blocks
    kv, states = tuple(range(1, granules + 1)), tuple(range(1, slots + 1))
    scattered = tuple(range(1, 2 * granules, 2))
    pools.executor.run([Map(Pool.KV, kv)])
    times: dict[str, list[float]] = {}
    taken: set[int] = set()
    for _ in range(rounds):
        for name, commands in {
            "to states ms": [Unmap(Pool.KV, kv), Map(Pool.STATE, states)],
            "to pages ms": [Unmap(Pool.STATE, states), Map(Pool.KV, kv)],
        }.items():
            took = milliseconds(lambda commands=commands: pools.executor.run(commands))
            times.setdefault(name, []).append(took)
            taken.add(used())
    pools.executor.run([Unmap(Pool.KV, kv), Map(Pool.KV, scattered)])
    took = milliseconds(
        lambda: pools.executor.run([Unmap(Pool.KV, scattered), Map(Pool.STATE, states)])
    )
    pools.executor.run([Unmap(Pool.STATE, states)])
    return {
        "MiB": granules * LAYERS * pools.block >> 20,
        **{name: round(statistics.median(found), 3) for name, found in times.items()},
        "scattered granules, to states ms": round(took, 3),
        "most taken beyond budget MiB": round(
            (max(taken) - pools.before - pools.arena.budget) / 2**20, 1
        ),
        "driver's count constant": len(taken) == 1,
    }


def calls(pools: Pools) -> dict[str, float]:
    """Microseconds a block of each kind of call, 1 GiB."""
    arena, block = pools.arena, pools.block
    count = (1 << 30) // block
    place = arena.reserve(count * block)
    size = count * block
    found: dict[str, float] = {}

    def timed(name: str, work: Callable[[], Any]) -> None:
        found[name] = round(1000 * milliseconds(work) / count, 2)

    driver, ok = arena._driver, arena._driver.CUresult.CUDA_SUCCESS
    handles = [arena._free.pop() for _ in range(count)]

    def map_all() -> None:
        for i, handle in enumerate(handles):
            error = driver.cuMemMap(place.address + i * block, block, 0, handle, 0)[0]
            assert error == ok, error

    def unmap_each() -> None:
        for i in range(count):
            error = driver.cuMemUnmap(place.address + i * block, block)[0]
            assert error == ok, error

    timed(
        "cuMemUnmap of holes, one call",
        lambda: arena._call("cuMemUnmap", place.address, size),
    )
    timed("cuMemMap", map_all)
    timed(
        "cuMemSetAccess, one call",
        lambda: arena._allow(place.address, size, writing=True),
    )
    timed(
        "cuMemUnmap, one call", lambda: arena._call("cuMemUnmap", place.address, size)
    )
    timed("cuMemMap again", map_all)
    arena._allow(place.address, size, writing=True)
    timed("cuMemUnmap, a call a block", unmap_each)
    timed("holes again", lambda: arena._fill_holes(place.address, size))
    arena._free += handles
    return found


def waits(pools: Pools) -> dict[str, float]:
    """Whether the driver's calls wait for a kernel that runs meanwhile."""
    arena, block = pools.arena, pools.block
    place = arena.reserve(64 * block)
    assert arena.map([ByteRange(place, 0, 64 * block)]) is None
    busy = torch.cuda.Stream()
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    found: dict[str, float] = {}

    def behind_kernel(name: str, call: Callable[[], Any]) -> None:
        torch.cuda.synchronize()
        with torch.cuda.stream(busy):
            start.record()
            torch.cuda._sleep(100_000_000)
            stop.record()
        begin = time.perf_counter()
        call()
        found[f"{name}: call ms"] = round(1000 * (time.perf_counter() - begin), 3)
        torch.cuda.synchronize()
        found[f"{name}: kernel ms"] = round(start.elapsed_time(stop), 3)

    size = 64 * block
    handles = [arena._behind[place.address + i * block] for i in range(64)]
    behind_kernel("unmap", lambda: arena._call("cuMemUnmap", place.address, size))

    def map_all() -> None:
        for i, handle in enumerate(handles):
            arena._call("cuMemMap", place.address + i * block, block, 0, handle, 0)

    behind_kernel("map", map_all)
    behind_kernel("access", lambda: arena._allow(place.address, size, writing=True))
    arena.unmap([ByteRange(place, 0, size)])
    return found


def measure(budget: int, block: int, rounds: int) -> dict[str, Any]:
    """All numbers for one size of blocks."""
    pools = Pools(budget, block)
    sizes = [size << 20 for size in (24, 96, 480, 1024)]
    found = {
        "block MiB": block >> 20,
        "start": {name: round(took, 3) for name, took in pools.times.items()},
        "moves": [
            move(pools, size, rounds) for size in sizes if size >= LAYERS * block
        ],
        "calls": calls(pools),
        "waits": waits(pools),
    }
    pools.arena.close()
    return found


def report(found: dict[str, Any]) -> str:
    """The numbers as Markdown."""
    lines = ["# Moving memory between the pools", "", found["machine"], ""]
    lines += [f"{found['budget GiB']} GiB are held. Medians, device idle.", ""]
    lines += ["| block MiB | moved MiB | to states ms | to pages ms | scattered ms |"]
    lines += ["|---|---|---|---|---|"]
    lines += [
        f"| {sizes['block MiB']} | {m['MiB']} | {m['to states ms']} | "
        f"{m['to pages ms']} | {m['scattered granules, to states ms']} |"
        for sizes in found["blocks"]
        for m in sizes["moves"]
    ]
    named = list(found["blocks"][0]["calls"])
    lines += ["", "Microseconds a block of each call, and seconds at the start:", ""]
    lines += ["| block MiB | " + " | ".join(named) + " | hold s | reserve s |"]
    lines += ["|---" * (len(named) + 3) + "|"]
    for sizes in found["blocks"]:
        cells = [sizes["block MiB"], *sizes["calls"].values(), *sizes["start"].values()]
        lines += ["| " + " | ".join(map(str, cells)) + " |"]
    waiting = found["blocks"][0]["waits"]
    lines += ["", "While a kernel runs on another stream, smallest blocks:", ""]
    lines += [f"* {name} {value}" for name, value in waiting.items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--budget-gib", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--block-mib", type=int, nargs="*", default=[2, 4, 8, 16])
    parser.add_argument("--out", type=Path, help="path without suffix")
    args = parser.parse_args()
    torch.empty(1, device=DEVICE)
    found: dict[str, Any] = {
        "machine": f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}",
        "budget GiB": args.budget_gib,
        "blocks": [
            measure(args.budget_gib << 30, size << 20, args.rounds)
            for size in args.block_mib
        ],
    }
    text = report(found)
    print(text, json.dumps(found))
    if args.out:
        args.out.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
        args.out.with_suffix(".md").write_text(text)


if __name__ == "__main__":
    main()
