# SPDX-License-Identifier: Apache-2.0
"""The tasks of a grid: every cache at every point that was asked for."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence

from benchmarks.curves.loads import Stream, record
from benchmarks.curves.protocol import Load
from benchmarks.curves.shapes import LEVELS, Task, levels


def memory_of(text: str) -> int | float:
    """A level from 1 to `LEVELS`, or GiB such as `8GiB`.

    Raises:
        argparse.ArgumentTypeError: for anything else.
    """
    try:
        if text.endswith("GiB"):
            return float(text.removesuffix("GiB"))
        if (level := int(text)) in range(1, LEVELS + 1):
            return level
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(
        f"takes levels from 1 to {LEVELS}, or sizes such as 8GiB; got {text!r}"
    )


def tasks(
    *,
    shapes: Sequence[str],
    loads: Mapping[str, Load],
    memory: Sequence[int | float],
    seeds: Sequence[int],
    caches: Sequence[str],
) -> list[Task]:
    """Every cache at every point.

    Args:
        shapes: of models.
        loads: workloads by name.
        memory: levels (int) or GiB (float).
        seeds: of the workloads.
        caches: by name.
    """
    found = []
    for workload, load in loads.items():
        for seed in seeds:
            stream = record(load, seed)
            for shape in shapes:
                for level, budget in _memories(shape, stream, memory):
                    found += [
                        Task(
                            shape=shape,
                            workload=workload,
                            seed=seed,
                            level=level,
                            memory=budget,
                            longest=max(stream.lengths) + 1,
                            cache=cache,
                        )
                        for cache in caches
                    ]
    return sorted(found, key=lambda task: list(shapes).index(task.shape))


def _memories(
    shape: str, stream: Stream, memory: Sequence[int | float]
) -> Iterator[tuple[int | None, int]]:
    by_level = levels(shape, stream)
    for size in memory:
        if isinstance(size, int):
            yield size, by_level[size - 1]
        else:
            yield None, int(size * 2**30)
