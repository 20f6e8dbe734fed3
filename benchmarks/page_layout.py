# SPDX-License-Identifier: Apache-2.0
"""Attention and the KV write on packed pages, against each layer's pages apart.

    PYTHONPATH=. python benchmarks/page_layout.py --out benchmarks/results/layout

writes ``page-layout.json`` and ``page-layout.md`` into the folder.  Every kernel of
vLLM and SGLang that can be imported here is called for all layers of a model in turn,
on random pages; runs on both layouts alternate.  A time is the median over repeats,
per layer; a ratio above 1 says that packed pages are slower.  Both layouts hold the
same values, so their outputs are compared as well.  What cannot run is listed with
the reason.  ``--device cpu`` takes small shapes.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.page_layout_cache import Batch, Cache, Load, Shape
from benchmarks.page_layout_kernels import CPU_KERNELS, KERNELS, Call

SHAPES = (
    Shape("Qwen3-Next", layers=12, query_heads=16, kv_heads=2, width=256),
    Shape("Falcon-H1", layers=44, query_heads=12, kv_heads=2, width=128),
)
LOADS = (
    Load("decode", sequences=32, context=4096, new=1),
    Load("prefill", sequences=1, context=8192, new=2048),
)
SMALL_SHAPES = (
    Shape("Qwen3-Next, small", layers=3, query_heads=4, kv_heads=2, width=64),
    Shape("Falcon-H1, small", layers=5, query_heads=6, kv_heads=2, width=32),
)
SMALL_LOADS = (
    Load("decode", sequences=3, context=96, new=1),
    Load("prefill", sequences=1, context=160, new=64),
)
_PER_SAMPLE = 3
"""Passes over all layers that are timed as one."""


@dataclass(frozen=True)
class Row:
    """One kernel at one shape and load."""

    kernel: str
    model: str
    load: str
    apart_us: float
    """Of one layer."""
    packed_us: float
    ratio: float
    """Packed to apart: the median of the ratios of neighbouring runs."""
    largest_difference: float
    """Between the outputs on both layouts."""
    cache_mib: float


@dataclass(frozen=True)
class Skipped:
    """A kernel that did not run."""

    kernel: str
    model: str
    load: str
    reason: str


def measure(name: str, batch: Batch, repeats: int) -> Row:
    """Time a kernel on both layouts, in turns.

    Raises:
        Exception: whatever keeps the kernel from running here.
    """
    make, by_page = (KERNELS | CPU_KERNELS)[name]
    caches = [Cache(batch, packed=packed, by_page=by_page) for packed in (False, True)]
    apart, packed = (make(batch, cache) for cache in caches)
    layers = batch.shape.layers
    largest = 0.0
    for layer in (0, layers - 1):
        expected = apart(layer).clone()
        found = packed(layer)
        largest = max(largest, float((found.float() - expected.float()).abs().max()))
    times: list[tuple[float, float]] = []
    for turn in range(repeats + 1):
        calls = (apart, packed) if turn % 2 else (packed, apart)
        pair = [_seconds(call, layers, batch.device) for call in calls]
        times.append((pair[0], pair[1]) if turn % 2 else (pair[1], pair[0]))
    times = times[1:]  # the first warms up
    return Row(
        name,
        batch.shape.name,
        batch.load.name,
        statistics.median(one for one, _ in times) * 1e6,
        statistics.median(other for _, other in times) * 1e6,
        statistics.median(other / one for one, other in times),
        largest,
        caches[0].bytes / 2**20,
    )


def _seconds(call: Call, layers: int, device: torch.device) -> float:
    """Of one layer, on average over all of them."""
    done = _clock(device)
    for _ in range(_PER_SAMPLE):
        for layer in range(layers):
            call(layer)
    return done() / (_PER_SAMPLE * layers)


def _clock(device: torch.device) -> Callable[[], float]:
    """Start to measure; the function returned says how long it took."""
    if device.type == "cpu":
        begin = time.perf_counter()
        return lambda: time.perf_counter() - begin
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    first.record()

    def stop() -> float:
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) / 1e3

    return stop


def run(
    shapes: tuple[Shape, ...],
    loads: tuple[Load, ...],
    device: torch.device,
    repeats: int,
    budget_s: float,
) -> tuple[list[Row], list[Skipped]]:
    """Every kernel at every shape and load; none is begun after `budget_s` seconds."""
    rows, skipped = [], []
    begin = time.perf_counter()
    on_cpu = device.type == "cpu"
    dtype = torch.float32 if on_cpu else torch.bfloat16
    names = [*KERNELS, *(CPU_KERNELS if on_cpu else ())]
    for shape in shapes:
        for load in loads:
            torch.manual_seed(0)
            batch = Batch(shape, load, device, dtype)
            for name in names:
                try:
                    if time.perf_counter() - begin > budget_s:
                        raise TimeoutError(f"after {budget_s:g} seconds")
                    rows.append(measure(name, batch, repeats))
                except Exception as error:
                    text = (str(error) or repr(error)).splitlines()[0]
                    reason = f"{type(error).__name__}: {text:.160}"
                    skipped.append(Skipped(name, shape.name, load.name, reason))
                gc.collect()
                if not on_cpu:
                    torch.cuda.empty_cache()
    return rows, skipped


def table(rows: list[Row], skipped: list[Skipped], where: str) -> str:
    """All of it in Markdown."""
    lines = [
        f"# Packed pages against layers apart on {where}",
        "",
        "| kernel | model | step | apart us | packed us | ratio | difference |",
        "|---|---|---|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {r.kernel} | {r.model} | {r.load} | {r.apart_us:.1f} | {r.packed_us:.1f} | "
        f"{r.ratio:.3f} | {r.largest_difference:g} |"
        for r in rows
    ]
    if skipped:
        lines += ["", "Not run:", ""]
        reasons: dict[tuple[str, str], list[str]] = {}
        for one in skipped:
            where = f"{one.model} {one.load}"
            reasons.setdefault((one.kernel, one.reason), []).append(where)
        lines += [
            f"* {kernel} ({', '.join(places)}): {reason}"
            for (kernel, reason), places in reasons.items()
        ]
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="a folder")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument(
        "--seconds", type=float, default=75, help="begin nothing after so long"
    )
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    on_gpu = options.device == "cuda"
    shapes = SHAPES if on_gpu else SMALL_SHAPES
    loads = LOADS if on_gpu else SMALL_LOADS
    with torch.inference_mode():
        rows, skipped = run(shapes, loads, device, options.repeats, options.seconds)
    where = torch.cuda.get_device_name() if on_gpu else "a CPU"
    text = table(rows, skipped, where)
    print(text)
    options.out.mkdir(parents=True, exist_ok=True)
    found = {
        "device": where,
        "torch": torch.__version__,
        "rows": list(map(asdict, rows)),
        "skipped": list(map(asdict, skipped)),
    }
    (options.out / "page-layout.json").write_text(json.dumps(found, indent=1) + "\n")
    (options.out / "page-layout.md").write_text(text)


if __name__ == "__main__":
    main()
