# SPDX-License-Identifier: Apache-2.0
"""Serving a task in a side's process: tasks come as lines, rows go out as lines."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from benchmarks.curves.loads import Traces
from benchmarks.curves.protocol import Load
from benchmarks.curves.shapes import Task
from benchmarks.prefix_workloads import Reply

MARK = "CURVE "
"""Begins the lines that are meant for the driver: engines log to the same stream."""
_LIMIT_S = 900
"""Of a task in a process of its own; an engine may go round in circles."""


class Engine(Protocol):
    """What serves requests, step by step."""

    steps: int
    tokens: int
    """Computed in all steps, those of prompts and of answers."""

    def ask(
        self, prompt: Sequence[int], max_tokens: int, answer: Sequence[int]
    ) -> Coroutine[Any, Any, Reply]:
        """Serve a request."""

    def drive(self, serving: Coroutine[Any, Any, list[Reply]]) -> list[Reply]:
        """Step until the clients are done."""


def measure(engine: Engine, load: Load, seed: int) -> dict[str, Any]:
    """Serve a workload and count.

    Returns:
        `recomputed` are tokens of prompts that were computed, and all that was
        computed again after a preemption.
    """

    async def ask(prompt: Sequence[int], answer: Sequence[int]) -> Reply:
        reply = await engine.ask(prompt, len(answer), answer)
        if reply.tokens != tuple(answer):
            raise RuntimeError("A request was answered otherwise than it was to be.")
        return reply

    begin, steps, tokens = time.thread_time(), engine.steps, engine.tokens
    replies = engine.drive(load.run(ask, random.Random(seed)))
    prompts = sum(r.prompt_tokens for r in replies)
    cached = sum(r.cached_tokens for r in replies)
    generated = sum(len(r.tokens) for r in replies)
    return {
        "requests": len(replies),
        "prompt_tokens": prompts,
        "cached_tokens": cached,
        "restored": cached / prompts,
        "recomputed": engine.tokens - tokens - (generated - len(replies)),
        "steps": engine.steps - steps,
        "seconds": round(time.thread_time() - begin, 1),
    }


def serve_tasks(
    serve: Callable[[Task, Load], dict[str, Any]], *, forked: bool = False
) -> None:
    """Be a side's process: the first line has the traces, every other a task.

    Args:
        serve: a task.
        forked: whether each is served in a copy of this process, which must have no
            threads; for engines of which a process can have one.
    """
    header = json.loads(sys.stdin.readline())
    places = {name: Path(path) for name, path in header.items() if path is not None}
    loads = Traces(**places).loads()
    for line in sys.stdin.read().splitlines():
        task = Task(**json.loads(line))
        work = partial(_row, task, loads[task.workload], serve)
        if forked:
            _in_a_copy(work, task)
        else:
            _say(work())


def _row(
    task: Task, load: Load, serve: Callable[[Task, Load], dict[str, Any]]
) -> dict[str, Any]:
    """Of a task; if it cannot be served, with what stands against that."""
    try:
        return task.as_dict() | serve(task, load)
    except Exception as error:
        traceback.print_exc()
        return task.as_dict() | {"failed": f"{type(error).__name__}: {error}"[:300]}


def _say(row: dict[str, Any]) -> None:
    print(MARK + json.dumps(row), flush=True)


def _in_a_copy(work: Callable[[], dict[str, Any]], task: Task) -> None:
    """Tell a task's row from a forked process, and wait for its end."""
    child = os.fork()
    if not child:
        status = 1
        signal.alarm(_LIMIT_S)  # ends it with a status of its own
        try:
            _say(work())
            status = 0
        finally:
            os._exit(status)  # an engine's threads would keep it
    _, status = os.waitpid(child, 0)
    if status:
        ended = f"its process ended with status {os.waitstatus_to_exitcode(status)}"
        _say(task.as_dict() | {"failed": ended})
