# SPDX-License-Identifier: Apache-2.0
"""A folder of bundles: how fast it stores, loads, converts, looks up and starts.

    PYTHONPATH=. python benchmarks/bundle_folder.py --out benchmarks/results

writes ``bundle-folder.json`` and ``bundle-folder.md`` into the folder.  A bundle holds
the pages of a turn and the state at its end, in the shapes of a model on one rank.
Each time is the median over repeats, with what the machine can do beside it: the same
bytes written to one file and synced, and read from it into the same memory.  *Cold*
means that the system was asked to drop the file from memory before.  ``--small`` takes
small shapes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from array import array
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hybrid_plugin.tiers.bundle import Bundle, Layouts, PageBytes
from hybrid_plugin.tiers.disk import DiskTier
from hybrid_plugin.tiers.failure import Failure
from hybrid_plugin.tiers.fields import convolution, delta_state, selective_state
from hybrid_plugin.tiers.identity import Identity
from hybrid_plugin.tiers.keys import BundleName
from hybrid_plugin.tiers.row_layout import Field, RowLayout
from hybrid_plugin.tiers.sglang_fields import tensor
from hybrid_plugin.tiers.shelf import BundleShelf
from hybrid_plugin.tiers.stock import TierFolder
from hybrid_plugin.tiers.vllm_fields import PageOrder, attention

PAGE = 16
ROOM = 1 << 40


@dataclass(frozen=True)
class Model:
    """Shapes of one rank."""

    name: str
    attention_layers: int
    kv_heads: int
    head_dim: int
    state_layers: int
    channels: int
    state: tuple[int, int, int]
    is_mamba2: bool
    turn: int = 1000
    """Tokens of a bundle."""


MODELS = (
    Model("Qwen3-Next", 12, 2, 256, 36, 8192, (32, 128, 128), False),
    Model("Nemotron-H", 4, 8, 128, 24, 10240, (128, 64, 128), True),
)
MANY_LAYERS = Model("many layers", 12, 2, 4, 36, 8, (1, 2, 4), False)
"""Files as small as can be, with headers as long as those of Qwen3-Next."""
SMALL = (Model("small", 2, 2, 16, 3, 32, (2, 4, 8), False, turn=40),)


@dataclass
class Row:
    """What was measured of one model."""

    model: str
    bundle_mib: float
    state_mib: float
    seconds: dict[str, float] = field(default_factory=dict)

    def rate(self, name: str) -> float:
        """GB/s."""
        return self.bundle_mib * 2**20 / self.seconds[name] / 1e9


def vllm_layouts(model: Model) -> Layouts:
    """Packed pages, tokens before heads; slots with a convolution before each state."""
    layer_bytes = 4 * PAGE * model.kv_heads * model.head_dim
    fields = [
        f
        for layer in range(model.attention_layers)
        for f in attention(
            str(layer),
            "bfloat16",
            layer * layer_bytes,
            tokens=PAGE,
            heads=model.kv_heads,
            key_dim=model.head_dim,
            value_dim=model.head_dim,
            order=PageOrder.TOKENS,
        )
    ]
    page = RowLayout(model.attention_layers * layer_bytes, PAGE, tuple(fields))
    return Layouts({"kv": page}, _states(model, channels_first=False))


def sglang_layouts(model: Model) -> Layouts:
    """Packed pages: all layers' keys and values of a token; convolutions by channel."""
    size = 2 * model.kv_heads * model.head_dim
    names = [
        f"{n}.{h}" for n in range(model.attention_layers) for h in ("key", "value")
    ]
    fields = [
        tensor(
            name,
            "bfloat16",
            place * size,
            tokens=PAGE,
            heads=model.kv_heads,
            dim=model.head_dim,
            token_bytes=len(names) * size,
        )
        for place, name in enumerate(names)
    ]
    page = RowLayout(PAGE * len(names) * size, PAGE, tuple(fields))
    return Layouts({"kv": page}, _states(model, channels_first=True))


def _states(model: Model, channels_first: bool) -> RowLayout:
    fields: list[Field] = []
    place = 0
    a, b, c = model.state
    for layer in range(model.state_layers):
        name = f"s{layer}"
        conv = convolution(
            name,
            "bfloat16",
            place,
            channels=model.channels,
            taps=3,
            channels_first=channels_first,
        )
        state = (
            selective_state(name, "float32", conv.end, heads=a, channels=b, states=c)
            if model.is_mamba2
            else delta_state(name, "float32", conv.end, heads=a, values=b, keys=c)
        )
        fields += [conv, state]
        place = state.end
    return RowLayout(place, 0, tuple(fields))


def identity(model: Model) -> Identity:
    return Identity(model.name, "0" * 64, ("benchmark",), "bfloat16")


class Disk:
    """A tier with one rank, opened as a server does."""

    def __init__(self, place: Path, model: Model, layouts: Layouts) -> None:
        own = identity(model)
        ranks = {own.rank_name: layouts}
        self.folder = TierFolder(place, ranks)
        self.tier = DiskTier(self.folder.entries(), ROOM, own, ranks, 1e9)
        self.shelf = BundleShelf(place, own.rank_name, layouts)

    def store(
        self,
        namespace: str,
        tokens: array[int],
        start: int,
        pages: list[npt.NDArray[np.uint8]],
        state: npt.NDArray[np.uint8],
    ) -> Bundle:
        """Write a bundle; returns it."""
        size = sum(row.nbytes for row in pages) + state.nbytes
        storing = self.tier.begin_store(namespace, tokens, start, size)
        assert storing is not None
        run = {"kv": PageBytes(start, pages)}
        bundle = Bundle(storing.key, tokens, start, run, state)
        written = self.shelf.write(bundle)
        assert not isinstance(written, Failure), written
        self.tier.stored(storing.key, None)
        return bundle


class Pages:
    """Memory of a bundle, as a host pool has it: rows here and there in one block."""

    def __init__(self, layouts: Layouts, tokens: int) -> None:
        rng = np.random.default_rng(0)
        assert layouts.state is not None
        layout = layouts.pages["kv"]
        rows = -(-tokens // PAGE)
        block = rng.integers(0, 256, (2 * rows, layout.row_bytes), dtype=np.uint8)
        self.rows = [block[i] for i in rng.permutation(2 * rows)[:rows]]
        self.state = rng.integers(0, 256, layouts.state.row_bytes, dtype=np.uint8)


def median_seconds(
    run: Callable[[], object], repeats: int, before: Callable[[], None]
) -> float:
    """Median time of a call."""
    times = []
    for _ in range(repeats):
        before()
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def drop(path: Path) -> None:
    """Ask the system to forget what it keeps of a file."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(file)


def measure(model: Model, place: Path, repeats: int) -> Row:
    """Store, load and convert bundles of one model, and plain files beside them."""
    own, other = vllm_layouts(model), sglang_layouts(model)
    pages = Pages(own, model.turn)
    tokens = array("q", range(model.turn))
    names = count()
    disk = Disk(place / "own", model, own)

    def store() -> Bundle:
        return disk.store(str(next(names)), tokens, 0, pages.rows, pages.state)

    bundle = store()
    moved = sum(row.nbytes for row in pages.rows) + pages.state.nbytes
    row = Row(model.name, moved / 2**20, pages.state.nbytes / 2**20)
    path = disk.shelf.place(BundleName.from_text(bundle.key).key)
    plain = place / "plain"
    buffers = [*pages.rows, pages.state]

    def write_plain(path: Path) -> None:
        with path.open("xb", buffering=0) as file:
            for start in range(0, len(buffers), 1000):
                os.writev(file.fileno(), buffers[start : start + 1000])
            os.fsync(file.fileno())

    def read_plain() -> None:
        with plain.open("rb", buffering=0) as file:
            for start in range(0, len(buffers), 1000):
                os.readv(file.fileno(), buffers[start : start + 1000])

    def load(from_: BundleShelf) -> None:
        failure = from_.read(bundle)
        assert failure is None, failure

    nothing = lambda: None  # noqa: E731
    times = row.seconds
    write_plain(plain)
    # A new one each time: a file that is written again has its memory already.
    times["write a plain file"] = median_seconds(
        lambda: write_plain(place / f"plain-{next(names)}"), repeats, nothing
    )
    times["store"] = median_seconds(store, repeats, nothing)
    times["read a plain file"] = median_seconds(read_plain, repeats, nothing)
    times["load"] = median_seconds(lambda: load(disk.shelf), repeats, nothing)
    times["read a plain file, cold"] = median_seconds(
        read_plain, repeats, lambda: drop(plain)
    )
    times["load, cold"] = median_seconds(
        lambda: load(disk.shelf), repeats, lambda: drop(path)
    )
    disk.folder.close()
    converting = BundleShelf(place / "own", identity(model).rank_name, other)
    times["load and convert"] = median_seconds(
        lambda: load(converting), repeats, nothing
    )
    return row


def measure_index(
    place: Path, bundles: int, length: int, repeats: int
) -> dict[str, float]:
    """Look-ups in, and the start of, a folder of many small bundles."""
    model = MANY_LAYERS
    own = vllm_layouts(model)
    pages = Pages(own, model.turn)
    disk = Disk(place / "many", model, own)
    path = array("q", range(length))
    starts = [length * i // 20 for i in range(20)]
    rows = pages.rows * (length // 20 // PAGE + 2)

    def store(namespace: str, tokens: array[int], start: int) -> None:
        used = rows[: -(-len(tokens) // PAGE) - start // PAGE]
        disk.store(namespace, tokens, start, used, pages.state)

    for start, end in zip(starts, [*starts[1:], length], strict=True):
        store("path", path[:end], start)
    for number in range(bundles - 20):
        store("path", array("q", [number, *range(PAGE)]), 0)
    other = array("q", [-1, *path[1:]])
    times = {
        f"look up {length} tokens, all stored": median_seconds(
            lambda: disk.tier.find("path", path, length), repeats, lambda: None
        ),
        f"look up {length} tokens, none stored": median_seconds(
            lambda: disk.tier.find("path", other, length), repeats, lambda: None
        ),
    }
    disk.folder.close()

    def start_() -> None:
        Disk(place / "many", model, own).folder.close()

    times[f"start with {bundles} bundles"] = median_seconds(
        start_, max(repeats // 3, 1), lambda: None
    )
    return times


def as_markdown(rows: list[Row], index: dict[str, float], machine: str) -> str:
    """The tables."""
    names = list(rows[0].seconds)
    lines = [
        "# A folder of bundles",
        "",
        f"`benchmarks/bundle_folder.py` on {machine}.  GB/s, medians.",
        "",
        "| model | a bundle | its state | " + " | ".join(names) + " |",
        "|---|---|---|" + "---|" * len(names),
    ]
    lines += [
        f"| {row.model} | {row.bundle_mib:.0f} MiB | {row.state_mib:.0f} MiB | "
        + " | ".join(f"{row.rate(name):.2f}" for name in names)
        + " |"
        for row in rows
    ]
    lines += ["", "| | |", "|---|---|"]
    lines += [f"| {name} | {seconds * 1e3:.2f} ms |" for name, seconds in index.items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--folder", type=Path, help="on the disk to measure")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--bundles", type=int, default=5000)
    parser.add_argument("--length", type=int, default=100_000)
    parser.add_argument("--machine", default=platform.processor() or "this machine")
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    models = SMALL if args.small else MODELS
    with tempfile.TemporaryDirectory(dir=args.folder) as place:
        rows = [measure(m, Path(place, m.name), args.repeats) for m in models]
        index = measure_index(Path(place), args.bundles, args.length, args.repeats)
    args.out.mkdir(parents=True, exist_ok=True)
    result = {
        "machine": args.machine,
        "models": [asdict(row) for row in rows],
        "index": index,
    }
    (args.out / "bundle-folder.json").write_text(json.dumps(result, indent=2) + "\n")
    text = as_markdown(rows, index, args.machine)
    (args.out / "bundle-folder.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
