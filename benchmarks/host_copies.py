# SPDX-License-Identifier: Apache-2.0
"""How fast prefixes go to the host and come back, and what decoding loses meanwhile.

    PYTHONPATH=.:kernels python benchmarks/host_copies.py --out benchmarks/results

writes ``host-copies.json`` and ``host-copies.md`` into the folder; needs PyTorch and
Triton alone.  The rows are those of Qwen3-Next and of Nemotron-H 8B on one GPU, and the
copies are the plugin's own (`hybrid_plugin/device/host`).

* A prefix, its KV and its state, is stored, and loaded to other places; it is compared
  before anything is timed.  Times are medians, from idle to idle.  *Held up* is how
  long the model's stream takes for the gathers, and waits for room in the ring;
  *issuing* is the host's time.
* A step of decoding is a chain of products of a matrix and a few rows, which reads as
  many bytes as the weights have.  Between two steps pages are stored, loaded, or both,
  at a constant rate.

``--tiny`` is for a machine without a GPU.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.curves.shapes import STATE_ITEMSIZE
from benchmarks.prefix_models import (
    attention_and_state_layers,
    slot_bytes,
    token_bytes,
)
from hybrid_plugin.core.commands import Await, Load, Map, Pool, Store
from hybrid_plugin.core.tiers.host_plan import HostPlan, plan_host
from hybrid_plugin.device.host.copies import HostCopies
from hybrid_plugin.device.host.ring import RingSizes, rings_for

MIB = 1 << 20
PAGE = 16
"""Tokens in a page."""
LAYOUTS = ("packed", "layers")
"""All layers of a page or slot side by side, or each in a tensor of its own."""
PLACES = ("in order", "scattered")
"""How the rows of the host lie that belong to neighbouring pages."""


@dataclass(frozen=True)
class Sizes:
    """What is measured."""

    shapes: tuple[str, ...]
    tokens: int
    """Of the prefix."""
    host_bytes: int
    pieces: tuple[int, ...]
    """Bytes of a piece of the rings."""
    ring_bytes: int
    """Bytes of a ring, whatever its pieces."""
    repeats: int
    width: int
    """Of the square matrices of a decoding step."""
    matrices: int
    batch: int
    pages: tuple[int, ...]
    """Pages that are copied in a step."""
    steps: int


LARGE = Sizes(
    ("qwen3-next", "nemotron-h-8b"),
    10_000,
    4 << 30,
    tuple(n * MIB for n in (2, 4, 8, 16, 32)),
    128 * MIB,
    15,
    8192,
    24,
    16,
    (8, 32, 64),
    200,
)
TINY = Sizes(("tiny",), 200, 8 * MIB, (4096, 65536), 131072, 2, 32, 2, 2, (2,), 3)


@dataclass(frozen=True)
class Moved:
    """A prefix, stored and loaded."""

    shape: str
    layout: str
    places: str
    piece: int
    """Bytes."""
    bytes: int
    store_gb_per_second: float
    load_gb_per_second: float
    store_held_up_ms: float
    store_issuing_ms: float
    load_issuing_ms: float


@dataclass(frozen=True)
class Slowed:
    """Decoding beside copies."""

    shape: str
    layout: str
    copies: str
    pages: int
    """That are copied in a step, each way."""
    ms: float
    """Of a step."""
    slower: float
    """Than without copies: 0.01 is a hundredth."""
    gb_per_second: float
    """Copied, each way."""


class Prefix:
    """Pages and a slot, in two places of the device, and rows for them."""

    def __init__(
        self, shape: str, layout: str, sizes: Sizes, rings: RingSizes | None = None
    ) -> None:
        """Make pools of twice the prefix, of random content.

        Args:
            shape: of the model.
            layout: one of `LAYOUTS`.
            sizes: of the benchmark.
            rings: by default those of the plugin.
        """
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        attention, states = attention_and_state_layers(shape)
        self.count = -(-sizes.tokens // PAGE)
        page = PAGE * token_bytes(shape)
        slot = slot_bytes(shape, STATE_ITEMSIZE.get(shape, 4))
        self.page_bytes = page
        self.bytes = self.count * page + slot
        self.pools = {
            Pool.KV: self._parts(2 * self.count + 1, page, 2 * attention, layout),
            Pool.STATE: self._parts(3, slot, 2 * states, layout),
        }
        plan = plan_host({Pool.KV: page, Pool.STATE: slot}, sizes.host_bytes)
        self.copies = HostCopies(self.pools, plan, rings=rings)
        self.rows = self._map(plan)

    def _parts(
        self, ids: int, size: int, layers: int, layout: str
    ) -> list[torch.Tensor]:
        count = layers if layout == "layers" and size % layers == 0 else 1
        return [
            torch.randint(
                -128, 128, (ids, size // count), dtype=torch.int8, device=self.device
            )
            for _ in range(count)
        ]

    def _map(self, plan: HostPlan) -> range:
        """Rows for pages, all blocks but one having some."""
        self.copies.run(Map(Pool.host(Pool.STATE), (1,)))
        granules = tuple(range(1, plan.blocks - 2))
        self.copies.run(Map(Pool.host(Pool.KV), granules))
        rows = range(1, (len(granules) + 1) * plan.rows_per_block(Pool.KV))
        assert len(rows) >= self.count, "the host has too little memory"
        return rows

    def row_ids(self, places: str, count: int) -> tuple[int, ...]:
        """Rows for so many pages."""
        if places == "in order":
            return tuple(self.rows[:count])
        return tuple(random.Random(count).sample(self.rows, count))

    def store(self, places: str) -> None:
        """Store all of it."""
        ids = tuple(range(1, self.count + 1))
        self.copies.run(Store(Pool.KV, ids, self.row_ids(places, self.count)))
        self.copies.run(Store(Pool.STATE, (1,), (1,)))

    def load(self, places: str, ticket: int = 1) -> None:
        """Load all of it to its other place."""
        ids = tuple(range(self.count + 1, 2 * self.count + 1))
        self.copies.run(Load(Pool.KV, self.row_ids(places, self.count), ids, ticket))
        self.copies.run(Load(Pool.STATE, (1,), (2,), ticket))

    def check(self, places: str) -> None:
        """Store and load it once, and compare.

        Raises:
            AssertionError: if it is not the same.
        """
        for part in self.pools[Pool.KV]:
            part[self.count + 1 :] = 0
        for part in self.pools[Pool.STATE]:
            part[2] = 0
        self.store(places)
        self.load(places)
        self.copies.run(Await(1))
        for part in self.pools[Pool.KV]:
            there, here = part[self.count + 1 :], part[1 : self.count + 1]
            assert torch.equal(there, here), "pages differ"
        for part in self.pools[Pool.STATE]:
            assert torch.equal(part[2], part[1]), "states differ"

    def wait(self) -> None:
        """Have the host wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()


@dataclass(frozen=True)
class Times:
    """Of one order, in seconds."""

    all: float
    """From idle to idle."""
    issuing: float
    held_up: float
    """From the first of the model's stream to its next work."""


def timed(prefix: Prefix, work: Callable[[], object]) -> Times:
    """Issue work to an idle device, and wait for it."""
    prefix.wait()
    gpu = prefix.device.type == "cuda"
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if gpu else []
    begin = time.perf_counter()
    if gpu:
        marks[0].record()
    work()
    if gpu:
        marks[1].record()
    issued = time.perf_counter()
    prefix.wait()
    end = time.perf_counter()
    held = marks[0].elapsed_time(marks[1]) / 1e3 if gpu else issued - begin
    return Times(end - begin, issued - begin, held)


def moved(shape: str, layout: str, sizes: Sizes) -> Iterator[Moved]:
    """A prefix in all sizes of pieces and orders of rows."""
    for piece in sizes.pieces:
        pieces = max(sizes.ring_bytes // piece, 2)
        prefix = Prefix(shape, layout, sizes, RingSizes(piece, pieces, pieces))
        for places in PLACES:
            prefix.check(places)
            yield _moved(prefix, places, piece, shape, layout, sizes.repeats)
        prefix.copies.close()


def _moved(
    prefix: Prefix, places: str, piece: int, shape: str, layout: str, repeats: int
) -> Moved:
    def load() -> None:
        prefix.load(places)
        prefix.copies.run(Await(1))

    stores = [timed(prefix, lambda: prefix.store(places)) for _ in range(repeats)]
    loads = [timed(prefix, load) for _ in range(repeats)]

    def middle(times: list[Times], name: str) -> float:
        return statistics.median(getattr(one, name) for one in times)

    return Moved(
        shape,
        layout,
        places,
        piece,
        prefix.bytes,
        prefix.bytes / middle(stores, "all") / 1e9,
        prefix.bytes / middle(loads, "all") / 1e9,
        middle(stores, "held_up") * 1e3,
        middle(stores, "issuing") * 1e3,
        middle(loads, "issuing") * 1e3,
    )


class Decoding:
    """Steps that read weights, beside copies of a prefix's pages."""

    def __init__(self, prefix: Prefix, sizes: Sizes) -> None:
        """Make the weights."""
        kind = torch.bfloat16 if prefix.device.type == "cuda" else torch.float32
        shape = (sizes.matrices, sizes.width, sizes.width)
        self._weights = torch.randn(shape, device=prefix.device, dtype=kind)
        self._weights *= sizes.width**-0.5
        self._state = torch.randn(
            sizes.batch, sizes.width, device=prefix.device, dtype=kind
        )
        self._prefix = prefix
        self._steps = sizes.steps
        self._next = 0

    def _step(self) -> None:
        state = self._state
        for weight in self._weights:
            state = state @ weight
        self._state.copy_(state)

    def _copy(self, pages: int, kinds: Sequence[str], step: int) -> None:
        """Store some pages and load others; what was loaded before is awaited."""
        prefix, run = self._prefix, self._prefix.copies.run
        first = self._next % (prefix.count - pages)
        self._next = first + pages
        rows = tuple(prefix.rows[first : first + pages])
        if "store" in kinds:
            run(Store(Pool.KV, tuple(range(first + 1, first + pages + 1)), rows))
        if "load" in kinds:
            if step:
                run(Await(step - 1))
            # Far from what is stored: the one need not wait for the other.
            first = (first + prefix.count // 2) % (prefix.count - pages)
            rows = tuple(prefix.rows[first : first + pages])
            there = prefix.count + 1 + first
            run(Load(Pool.KV, rows, tuple(range(there, there + pages)), step))

    def seconds(self, pages: int, kinds: Sequence[str]) -> float:
        """Of a step, on average."""
        self._step()
        prefix = self._prefix

        def work() -> None:
            for step in range(self._steps):
                self._copy(pages, kinds, step)
                self._step()
            if "load" in kinds:
                prefix.copies.run(Await(self._steps - 1))

        return timed(prefix, work).all / self._steps


def slowed(shape: str, layout: str, sizes: Sizes) -> Iterator[Slowed]:
    """Decoding without copies, and beside them."""
    prefix = Prefix(shape, layout, sizes)
    prefix.check("in order")
    decoding = Decoding(prefix, sizes)
    alone = statistics.median(decoding.seconds(1, ()) for _ in range(5))
    yield Slowed(shape, layout, "none", 0, alone * 1e3, 0.0, 0.0)
    for kinds in (("store",), ("load",), ("store", "load")):
        for pages in sizes.pages:
            each = statistics.median(decoding.seconds(pages, kinds) for _ in range(3))
            yield Slowed(
                shape,
                layout,
                " and ".join(kinds),
                pages,
                each * 1e3,
                each / alone - 1,
                pages * prefix.page_bytes / each / 1e9,
            )
    prefix.copies.close()


def tables(
    rows: Sequence[Moved], steps: Sequence[Slowed], sizes: Sizes, where: str
) -> str:
    """All measurements in Markdown."""
    lines = [
        f"# Copies to host memory and back on {where}",
        "",
        f"A prefix of {sizes.tokens} tokens in pages of {PAGE}, with its state:",
        "",
        "| model | pools | host rows | piece | MiB | store GB/s | load GB/s "
        "| held up ms | issuing a store ms | issuing a load ms |",
        "|---|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {r.shape} | {r.layout} | {r.places} | {_size(r.piece)} "
        f"| {r.bytes / MIB:.0f} | {r.store_gb_per_second:.1f} "
        f"| {r.load_gb_per_second:.1f} | {r.store_held_up_ms:.2f} "
        f"| {r.store_issuing_ms:.2f} | {r.load_issuing_ms:.2f} |"
        for r in rows
    ]
    lines += [
        "",
        f"Steps of decoding that read {_weights(sizes)} of weights:",
        "",
        "| model | pools | copies | pages in a step | GB/s each way | ms | slower |",
        "|---|---|---|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {s.shape} | {s.layout} | {s.copies} | {s.pages} | {s.gb_per_second:.1f} "
        f"| {s.ms:.3f} | {s.slower:+.1%} |"
        for s in steps
    ]
    return "\n".join(lines) + "\n"


def _weights(sizes: Sizes) -> str:
    return f"{sizes.matrices} matrices of {sizes.width} x {sizes.width}"


def _size(count: int) -> str:
    return f"{count // MIB} MiB" if count >= MIB else f"{count / 1024:g} KiB"


def main(arguments: list[str] | None = None) -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="a folder")
    parser.add_argument("--tiny", action="store_true", help="sizes for a test")
    options = parser.parse_args(arguments)
    sizes = TINY if options.tiny else LARGE
    torch.manual_seed(0)
    kinds = [(shape, layout) for shape in sizes.shapes for layout in LAYOUTS]
    rows = [row for kind in kinds for row in moved(*kind, sizes)]
    steps = [step for kind in kinds for step in slowed(*kind, sizes)]
    on_gpu = torch.cuda.is_available()
    where = torch.cuda.get_device_name() if on_gpu else "a CPU"
    text = tables(rows, steps, sizes, where)
    print(text)
    options.out.mkdir(parents=True, exist_ok=True)
    found = {
        "device": where,
        "torch": torch.__version__,
        "rings": asdict(rings_for(torch.device("cuda" if on_gpu else "cpu"))),
        "moved": list(map(asdict, rows)),
        "slowed": list(map(asdict, steps)),
    }
    (options.out / "host-copies.json").write_text(json.dumps(found, indent=1) + "\n")
    (options.out / "host-copies.md").write_text(text)


if __name__ == "__main__":
    main()
