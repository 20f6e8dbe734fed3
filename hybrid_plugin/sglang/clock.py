# SPDX-License-Identifier: Apache-2.0
"""The time by which TTLs end: the same on every rank.

SGLang runs a scheduler on each rank, and what they do must be equal.  Its requests
carry no time that is: the front end's stamps stay there, and each rank takes its own.
So the rank that receives the requests sends its time along when it broadcasts them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

RESOLUTION_SECONDS = 1.0
"""The time is sent at most so often, because where no request came that costs a
broadcast of its own.  TTLs are said in seconds."""


@dataclass(frozen=True, slots=True)
class TimeStamp:
    """Travels with requests."""

    seconds: float


class RankClock:
    """Shows the time of the last stamp that came with a broadcast."""

    def __init__(self, source: Callable[[], float] = time.monotonic) -> None:
        """No stamp came yet, so the time is 0.

        Args:
            source: of the time on the rank that receives requests, in seconds.
        """
        self._source = source
        self._sent: float | None = None
        self._now = 0.0

    def __call__(self) -> float:
        """The time in seconds, since a moment that is the same on all ranks."""
        return self._now

    def broadcast(
        self, original: Callable[..., list[Any]], requests: list[Any] | None, *rest: Any
    ) -> list[Any]:
        """Broadcast requests with the time, and read the time that came.

        Args:
            original: broadcasts what the first rank passes; returns it on all ranks.
            requests: of the rank that receives them; None on the others.
            rest: passed on.
        """
        if requests is not None:
            requests = [*self._stamps(), *requests]
        received = original(requests, *rest)
        for one in received:
            if isinstance(one, TimeStamp):
                self._now = max(self._now, one.seconds)
        return [one for one in received if not isinstance(one, TimeStamp)]

    def _stamps(self) -> list[TimeStamp]:
        now = self._source()
        if self._sent is not None and now - self._sent < RESOLUTION_SECONDS:
            return []
        self._sent = now
        return [TimeStamp(now)]
