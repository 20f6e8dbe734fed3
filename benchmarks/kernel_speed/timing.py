# SPDX-License-Identifier: Apache-2.0
"""Timing one call of each library at one point."""

from __future__ import annotations

import functools
import statistics
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import triton

Call = Callable[[int], torch.Tensor]
"""Runs turn `index` of `ROTATE`, on slots of its own, and returns the output."""

ROTATE = 4
OURS = "hybrid_kernels"
_SECONDS = 0.06
_SMALL = 2**29


@dataclass(frozen=True)
class Point:
    """One operation at one size, in every library that has it."""

    op: str
    shape: str
    size: str
    calls: dict[str, Call | None]
    pool: torch.Tensor
    """States that calls change."""
    moved: float | None = None
    """Bytes that any implementation must read and write."""


@dataclass
class Row:
    """One measurement."""

    op: str
    shape: str
    size: str
    library: str
    microseconds: float
    gigabytes_per_second: float | None
    mode: str
    difference: float | None
    """Of the output from ours, relative, in the 2-norm; None if not compared."""


def tune_quickly() -> None:
    """Let peers' autotuners take 10 ms for each variant instead of 100."""
    driver = triton.runtime.driver.active
    quick = functools.partial(triton.testing.do_bench, warmup=2, rep=10)
    driver.get_benchmarker = lambda: quick


def run(point: Point, only: str = "", time: bool = True) -> Iterator[Row]:
    """Measure the libraries that start so, or only run each once, which compiles it."""
    saved = point.pool.clone() if point.pool.nbytes < _SMALL else None
    ours: torch.Tensor | None = None
    for library, call in point.calls.items():
        if call is None or not library.startswith(only):
            continue
        try:
            output = call(0).clone()
            torch.cuda.synchronize()
            difference = None
            if saved is not None:
                point.pool.copy_(saved)
                ours = output if library == OURS else ours
                difference = None if ours is output else _difference(output, ours)
            if not time:
                continue
            microseconds, mode = measure(call)
        except Exception as error:  # a peer may fail in any way
            print(f"{point.op} {point.size} {library}: {error!r}", file=sys.stderr)
            traceback.print_exc(limit=-3)
            continue
        finally:
            if saved is not None:
                point.pool.copy_(saved)
        rate = None if point.moved is None else point.moved / microseconds / 1e3
        names = (point.op, point.shape, point.size, library)
        yield Row(*names, microseconds, rate, mode, difference)


def measure(call: Call) -> tuple[float, str]:
    """Microseconds per call, and how it ran."""

    def turns() -> None:
        for index in range(ROTATE):
            call(index)

    turns()
    torch.cuda.synchronize()
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            turns()
        return _replays(graph.replay), "graph"
    except Exception:
        torch.cuda.synchronize()
        return _replays(turns), "eager"


def _replays(replay: Callable[[], object]) -> float:
    """Median microseconds of one of the turns in a replay."""
    times: list[float] = []
    for number in range(24):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        replay()
        end.record()
        end.synchronize()
        if number >= 2:
            times.append(begin.elapsed_time(end) / ROTATE)
        if number >= 6 and sum(times) * ROTATE > _SECONDS * 1e3:
            break
    return statistics.median(times) * 1e3


def _difference(output: torch.Tensor, ours: torch.Tensor | None) -> float | None:
    if ours is None or output.numel() != ours.numel():
        return None
    mine = ours.double().flatten()
    return float((output.double().flatten() - mine).norm() / mine.norm())
