# SPDX-License-Identifier: Apache-2.0
"""The processes that serve tasks: one for each side, in its own environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

from benchmarks.curves.serving import MARK
from benchmarks.curves.shapes import Task

Row = dict[str, Any]

_VARIABLES = {
    "HYBRID_PLUGIN": "0",  # ours does not read it, and others are to be stock
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
_TASKS_OF_A_PROCESS = 40
"""Engines leave something behind in their process; a new one starts clean."""


@dataclass(frozen=True)
class Side:
    """One implementation, and the Python that has it."""

    name: str
    python: Path
    module: str


def run_side(
    side: Side,
    tasks: Sequence[Task],
    traces: dict[str, str | None],
    done: Callable[[Row], None],
) -> None:
    """Serve tasks in one process.

    Args:
        side: what serves them.
        tasks: in this order.
        traces: arguments of `Traces`.
        done: gets each row as it comes.

    Raises:
        RuntimeError: if the process ends before its tasks are done.
    """
    lines = [json.dumps(traces), *(json.dumps(task.as_dict()) for task in tasks)]
    process = subprocess.Popen(
        [str(side.python), "-m", side.module],
        env=os.environ | _VARIABLES,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("\n".join(lines) + "\n")
    process.stdin.close()
    count = 0
    for line in process.stdout:
        if line.startswith(MARK):
            done(json.loads(line.removeprefix(MARK)))
            count += 1
    if process.wait() or count < len(tasks):
        raise RuntimeError(
            f"{side.name} ended with status {process.returncode} after {count} of "
            f"{len(tasks)} tasks; its last words are above."
        )


def _batches(tasks: Sequence[Task]) -> list[Sequence[Task]]:
    starts = range(0, len(tasks), _TASKS_OF_A_PROCESS)
    return [tasks[start : start + _TASKS_OF_A_PROCESS] for start in starts]


def run_sides(
    work: Sequence[tuple[Side, Sequence[Task]]],
    traces: dict[str, str | None],
    done: Callable[[Row], None],
    jobs: int,
) -> None:
    """Serve the tasks of all sides, in so many processes at a time.

    Raises:
        RuntimeError: if a process ended early; the others are finished first.
    """
    waiting: SimpleQueue[tuple[Side, Sequence[Task]]] = SimpleQueue()
    for side, all_tasks in work:
        for batch in _batches(all_tasks):
            waiting.put((side, batch))
    errors: list[Exception] = []

    def serve() -> None:
        while True:
            try:
                side, tasks = waiting.get_nowait()
            except Empty:
                return
            try:
                run_side(side, tasks, traces, done)
            except Exception as error:
                print(error, file=sys.stderr)
                errors.append(error)

    threads = [Thread(target=serve) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise RuntimeError(f"{len(errors)} processes failed; the first: {errors[0]}")
