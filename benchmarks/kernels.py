# SPDX-License-Identifier: Apache-2.0
"""Speed of `hybrid_kernels` on one GPU, beside every peer that can be imported.

    python benchmarks/kernels.py --out benchmarks/results/kernels-h200

writes ``.json`` and ``.md``. Each call is captured in a CUDA graph, several turns
deep and over rotating slots, so that launch overhead and the L2 cache stay out of
the numbers; calls that cannot be captured run eagerly and are marked so. A number
is the median of repeated replays. Peers that cannot be imported are left out.

``--jobs N`` first compiles everything in `N` processes at a time.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from kernel_speed import copies, decode, keeping, norm, prefill, verify
from kernel_speed.report import Report
from kernel_speed.shapes import (
    BATCHES,
    CHANNELS,
    DELTA,
    KDA,
    PREFILLS,
    SSD,
    VERIFY_BATCHES,
)
from kernel_speed.timing import Point, Row, run, tune_quickly

Make = Callable[[], Point]
LIBRARIES = (
    "hybrid_kernels",
    "fla",
    "vllm",
    "sglang",
    "flashinfer",
    "mamba_ssm",
    "causal-conv1d",
)


def decodes(batches: tuple[int, ...]) -> Iterator[tuple[str, Make]]:
    """Decode updates, by section."""
    for batch in batches:
        for head in DELTA:
            for fused in (True, False):
                yield "delta", lambda h=head, n=batch, f=fused: decode.delta(h, n, f)
        for head in SSD:
            yield "ssd", lambda h=head, n=batch: decode.mamba2(h, n)
        for head in KDA:
            for fused in (True, False):
                yield "kda", lambda h=head, n=batch, f=fused: decode.kimi(h, n, f)
        yield "conv", lambda n=batch: decode.convolution(CHANNELS, n)


def verifies(batches: tuple[int, ...]) -> Iterator[tuple[str, Make]]:
    """Draft tokens, and commits of accepted ones, by section."""
    for batch in batches:
        for wide, heads in ((False, DELTA), (True, KDA)):
            name = "verify kda" if wide else "verify delta"
            for head in heads:
                for tree in (False, True):
                    yield (
                        name,
                        lambda h=head, n=batch, w=wide, t=tree: verify.delta_rule(
                            h, n, w, t
                        ),
                    )
                yield (
                    "verify commit",
                    lambda h=head, n=batch, w=wide: verify.commit(h, CHANNELS, n, w),
                )
        for head in SSD:
            for tree in (False, True):
                yield (
                    "verify ssd",
                    lambda h=head, n=batch, t=tree: verify.mamba2(h, n, t),
                )
            yield "verify commit", lambda h=head, n=batch: verify.commit(h, CHANNELS, n)
        yield "verify conv", lambda n=batch: verify.convolution(CHANNELS, n)


def prefills(sizes: tuple[tuple[int, int], ...]) -> Iterator[tuple[str, Make]]:
    """Prefills, by section; each model's layers are a section of their own."""
    for size in sizes:
        for head in DELTA:
            yield f"prefill {head.model}", lambda h=head, s=size: prefill.delta(h, *s)
        for head in SSD:
            yield f"prefill {head.model}", lambda h=head, s=size: prefill.mamba2(h, *s)
        for head in KDA:
            yield f"prefill {head.model}", lambda h=head, s=size: prefill.kimi(h, *s)
        yield "prefill conv", lambda s=size: prefill.convolution(CHANNELS, *s)


def keeps(passes: tuple[keeping.Pass, ...]) -> Iterator[tuple[str, Make]]:
    """Prefills that keep states on the way."""
    for size in passes:
        for head in DELTA:
            yield "keep", lambda h=head, s=size: keeping.delta(h, s)


def norms(tokens: tuple[int, ...]) -> Iterator[tuple[str, Make]]:
    """Norms behind a layer."""
    for size in tokens:
        for head in DELTA:
            yield "norm", lambda h=head, t=size: norm.gated(h, t)


def everything(compiling: bool) -> Iterator[tuple[str, Make]]:
    """All points; small ones are enough to compile."""
    yield from decodes((1, 8) if compiling else BATCHES)
    yield from verifies((1, 8) if compiling else VERIFY_BATCHES)
    yield from norms(norm.TOKENS[: 1 if compiling else None])
    for megabytes, pairs in copies.SIZES[: 1 if compiling else None]:
        for layers in (1, 32):
            yield (
                "copies",
                lambda m=megabytes, p=pairs, n=layers: copies.fork(m, p, n),
            )
    yield from prefills(((1, 128), (8, 16)) if compiling else PREFILLS)
    yield from keeps(keeping.PASSES[:1] if compiling else keeping.PASSES)


def rows(sections: str, library: str, compiling: bool) -> Iterator[Row]:
    """Measure, or compile, the points of some sections."""
    for section, make in everything(compiling):
        if sections in section:
            yield from run(make(), library, time=not compiling)
            torch.cuda.empty_cache()


def compile_all(jobs: int, sections: str) -> None:
    """Fill Triton's cache; each library's layer of each model in its own process."""
    names = sorted({name for name, _ in everything(True) if sections in name})
    pairs = [
        (name, library)
        for name in names
        for library in (LIBRARIES if name.startswith("prefill") else ("",))
    ]
    # Variants chosen while others use the GPU are worthless: fla must forget them.
    environment = {**os.environ, "FLA_CACHE_RESULTS": "0"}

    def work(pair: tuple[str, str]) -> None:
        flags = ["--compile", "--sections", pair[0], "--library", pair[1]]
        command = [sys.executable, __file__, "--out", "-", *flags]
        subprocess.run(command, check=False, env=environment)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(work, pairs))


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sections", default="", help="only those with this in them")
    parser.add_argument("--library", default="", help="only those that start so")
    parser.add_argument("--jobs", type=int, default=0, help="compile first, so many")
    parser.add_argument("--compile", action="store_true", help="do not measure")
    parser.add_argument("--note", action="append", default=[], help="added to the text")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after so many")
    options = parser.parse_args()
    started = time.monotonic()
    torch.manual_seed(0)
    tune_quickly()
    if options.compile:
        list(rows(options.sections, options.library, True))
        return
    if options.jobs:
        compile_all(options.jobs, options.sections)
        print(f"compiled in {time.monotonic() - started:.0f} s", file=sys.stderr)
    report = Report([], copies.bandwidth(), options.note)
    for row in rows(options.sections, options.library, False):
        report.rows.append(row)
        # Written as it grows: a run cut short keeps what it has.
        report.write(options.out)
        if time.monotonic() - started > options.seconds:
            report.notes.append("Cut short by the time limit.")
            break
    report.write(options.out)
    print(options.out.with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
