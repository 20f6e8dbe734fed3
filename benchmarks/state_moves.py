# SPDX-License-Identifier: Apache-2.0
"""Copies of slots and pages: our kernel beside what the plugin and SGLang did before.

    PYTHONPATH=.:kernels python benchmarks/state_moves.py --out benchmarks/results/moves

writes ``state-moves.json`` and ``state-moves.md`` into the folder; needs PyTorch and
Triton alone.  Each way first copies once and is checked.  A time is the median over
repeats, uploading the ids included, from when the device starts to when it is done;
ratios are to the kernel.  ``--tiny`` is for a machine without a GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from hybrid_plugin.device.arena import Arena, to_device
from hybrid_plugin.device.rows import rows_of

MIB = 1 << 20
KERNEL = "kernel"
Way = Callable[[list[int], list[int]], object]


@dataclass(frozen=True)
class Sizes:
    """What is copied."""

    slot_bytes: int
    layers: int
    """Of states in a slot."""
    slots: tuple[int, ...]
    """How many are copied at once."""
    page_bytes: int
    pages: tuple[int, ...]
    tensors: tuple[int, ...]
    repeats: int


LARGE = Sizes(75 * MIB, 30, (1, 8), 16 << 10, (16, 512), (10, 40), 30)
TINY = Sizes(3 * 4096, 3, (1, 2), 256, (2, 5), (2, 3), 2)


@dataclass(frozen=True)
class Case:
    """One pool and how many of its ids are copied."""

    name: str
    layout: str
    count: int
    tensors: list[torch.Tensor]
    """`[layers, ids, ...]` or `[ids, ...]` each; ids are dimension `ids`."""
    ids: int

    def parts(self) -> list[torch.Tensor]:
        """`[ids, bytes]` each."""
        layers = self.tensors
        if self.ids:
            layers = [layer for tensor in self.tensors for layer in tensor]
        return [rows_of(layer) for layer in layers]


@dataclass(frozen=True)
class Row:
    """One measurement."""

    case: str
    layout: str
    way: str
    microseconds: float
    times_the_kernel: float
    gigabytes_per_second: float
    """Read and written."""


def cases(sizes: Sizes, device: torch.device) -> Iterator[Callable[[], Case]]:
    """Every pool, made only when it is measured."""
    for count in sizes.slots:
        for layout in ("layer-major (fixed)", "slot-major (elastic)"):
            yield lambda n=count, kind=layout: _slots(sizes, n, kind, device)  # type: ignore[misc]
    for tensors in sizes.tensors:
        for count in sizes.pages:
            for layout in ("contiguous", "strided"):
                yield lambda n=count, t=tensors, kind=layout: _pages(  # type: ignore[misc]
                    sizes, n, t, kind, device
                )


def _slots(sizes: Sizes, count: int, layout: str, device: torch.device) -> Case:
    ids = 2 * count + 1
    name = f"{count} x {_size(sizes.slot_bytes)} slots"
    words = sizes.slot_bytes // 4
    if layout.startswith("slot"):
        tensors = [torch.randn(ids, words, device=device)]
        return Case(name, layout, count, tensors, 0)
    # A short convolution state and a long state in each layer, as in GDN.
    each = words // sizes.layers
    shapes = (each // 16, each - each // 16)
    tensors = [torch.randn(sizes.layers, ids, n, device=device) for n in shapes]
    return Case(name, layout, count, tensors, 1)


def _pages(
    sizes: Sizes, count: int, tensors: int, layout: str, device: torch.device
) -> Case:
    ids, words = 2 * count + 1, sizes.page_bytes // 4
    wide = words if layout == "contiguous" else 2 * words
    made = [torch.randn(ids, wide, device=device)[:, :words] for _ in range(tensors)]
    name = f"{count} pages of {_size(sizes.page_bytes)} in {tensors} tensors"
    return Case(name, layout, count, made, 0)


def ways(case: Case) -> dict[str, Way]:
    """Each way to copy ids over others, all by lists on the host."""
    parts = case.parts()
    arena, device = Arena(parts), parts[0].device

    def upload(ids: list[int]) -> torch.Tensor:
        return to_device(torch.tensor(ids, dtype=torch.int64), device)

    def one_by_one(sources: list[int], destinations: list[int]) -> None:
        for source, destination in zip(sources, destinations, strict=True):
            for part in parts:
                part[destination].copy_(part[source])

    def indexed(sources: list[int], destinations: list[int]) -> None:
        source, destination = upload(sources), upload(destinations)
        for part in parts:
            part[destination] = part[source]

    def gathered(sources: list[int], destinations: list[int]) -> None:
        source, destination = upload(sources), upload(destinations)
        for tensor in case.tensors:
            if case.ids:
                tensor[:, destination] = tensor[:, source]
            else:
                tensor[destination] = tensor[source]

    return {
        KERNEL: arena.copy,
        "torch, one id and tensor at a time": one_by_one,
        "torch, indexed, a tensor at a time": indexed,
        "SGLang's gather and scatter": gathered,
    }


def measure(case: Case, repeats: int) -> list[Row]:
    """The median of each way.

    Raises:
        AssertionError: if one copies anything else.
    """
    sources = list(range(1, case.count + 1))
    destinations = list(range(case.count + 1, 2 * case.count + 1))
    parts = case.parts()
    moved = 2 * case.count * sum(part.shape[1] for part in parts)
    medians = {}
    for name, way in ways(case).items():
        for part in parts:
            part[destinations] = -1
        way(sources, destinations)
        for part in parts:
            assert torch.equal(part[destinations], part[sources]), name
        times = [
            _seconds(lambda w=way: w(sources, destinations), parts[0].device)  # type: ignore[misc]
            for _ in range(repeats)
        ]
        medians[name] = statistics.median(times)
    return [
        Row(
            case.name,
            case.layout,
            name,
            seconds * 1e6,
            seconds / medians[KERNEL],
            moved / seconds / 1e9,
        )
        for name, seconds in medians.items()
    ]


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    if device.type == "cpu":
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    first.record()
    call()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) / 1e3


def _size(count: int) -> str:
    return f"{count // MIB} MiB" if count >= MIB else f"{count / 1024:g} KiB"


def table(rows: list[Row], where: str) -> str:
    """All measurements in Markdown."""
    lines = [
        f"# Copies of slots and pages on {where}",
        "",
        "| what | layout | way | us | times the kernel | GB/s |",
        "|---|---|---|---:|---:|---:|",
    ]
    lines += [
        f"| {r.case} | {r.layout} | {r.way} | {r.microseconds:.1f} | "
        f"{r.times_the_kernel:.2f} | {r.gigabytes_per_second:.0f} |"
        for r in rows
    ]
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="a folder")
    parser.add_argument("--tiny", action="store_true", help="sizes for a test")
    options = parser.parse_args(arguments)
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    sizes = TINY if options.tiny else LARGE
    torch.manual_seed(0)
    rows = [
        row for make in cases(sizes, device) for row in measure(make(), sizes.repeats)
    ]
    where = torch.cuda.get_device_name() if on_gpu else "a CPU"
    text = table(rows, where)
    print(text)
    options.out.mkdir(parents=True, exist_ok=True)
    found = {
        "device": where,
        "torch": torch.__version__,
        "rows": list(map(asdict, rows)),
    }
    (options.out / "state-moves.json").write_text(json.dumps(found, indent=1) + "\n")
    (options.out / "state-moves.md").write_text(text)


if __name__ == "__main__":
    main()
