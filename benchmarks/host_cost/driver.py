# SPDX-License-Identifier: Apache-2.0
"""What every driver does: serve one request, and note where the time goes."""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass, field
from typing import Protocol

PAGE = 16
PHASES = ("hash", "match", "admit", "commit", "finish")


@dataclass
class Laps:
    """Seconds of this thread's CPU time per phase, for one request."""

    seconds: dict[str, float] = field(default_factory=dict)
    _since: float = 0.0

    def start(self) -> None:
        """Begin a phase."""
        self._since = time.thread_time()

    def stop(self, phase: str) -> None:
        """End it, and begin the next."""
        now = time.thread_time()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._since
        self._since = time.thread_time()

    @property
    def total(self) -> float:
        """Seconds of all phases."""
        return sum(self.seconds.values())


class Driver(Protocol):
    """A cache behind the calls that its engine makes for one request.

    *match* finds the hit of a new request, by what *hash* made of its tokens if the
    cache needs that; *admit* gives it pages, and a state slot where there are
    states; *commit* makes the prompt's KV reusable once it is computed; *finish*
    ends the request, with an answer whose KV stays as well.
    """

    name: str

    def serve(self, prompt: array[int], answer: array[int]) -> tuple[int, Laps]:
        """Serve a request; returns its hit in tokens, and the times."""
        ...

    def entries(self) -> int | None:
        """Nodes of the tree, or blocks that can be found; None if it cannot tell."""
        ...
