# SPDX-License-Identifier: Apache-2.0
"""A thread that runs when a test says so."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any


class LaterThread(Executor):
    """Runs its jobs, first to last, when it is told to."""

    def __init__(self) -> None:
        self._jobs: list[tuple[Future[Any], Callable[..., Any], Any]] = []

    def submit(self, work: Callable[..., Any], /, *args: Any, **_: Any) -> Any:
        job: Future[Any] = Future()
        self._jobs.append((job, work, args))
        return job

    @property
    def discards(self) -> bool:
        """Whether it would wait for other threads."""
        return bool(self._jobs) and self._jobs[0][1].__name__ == "_discard"

    def step(self) -> bool:
        """Run the next job; False if there is none."""
        if not self._jobs:
            return False
        job, work, args = self._jobs.pop(0)
        job.set_result(work(*args))
        return True
