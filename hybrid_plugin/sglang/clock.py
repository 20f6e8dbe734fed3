# SPDX-License-Identifier: Apache-2.0
"""The time, and what a rank measured: the same on every rank.

SGLang runs a scheduler on each rank, and what they do must be equal.  Its requests
carry no time that is: the front end's stamps stay there, and each rank takes its own.
So the rank that receives the requests sends its time along when it broadcasts them,
and how long its prefills take; with pipeline parallelism, each stage passes both on.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

RESOLUTION_SECONDS = 1.0
"""Where no request comes, the time is sent at most so often unless somebody waits for a
moment: it costs a broadcast of its own.  TTLs are said in seconds."""


@dataclass(frozen=True, slots=True)
class TimeStamp:
    """Travels with requests."""

    seconds: float
    token_seconds: float | None = None
    """Prefill of one token on the rank that sent it; None before it was measured."""


class RankClock:
    """Shows the time of the last stamp that came with a broadcast."""

    def __init__(self, source: Callable[[], float] = time.monotonic) -> None:
        """No stamp came yet, so the time is 0.

        Args:
            source: of the time on the rank that receives requests, in seconds.
        """
        self._source = source
        self._sent: float | None = None
        self._came: list[TimeStamp] = []
        """With the last broadcast, for the next stage of a pipeline."""
        self._now = 0.0
        self.is_fine = False
        """Whether somebody waits for a moment: then every broadcast has the time."""
        self.measured: Callable[[], float | None] = lambda: None
        """Returns the time of one token's prefill on this rank, in seconds."""
        self.token_seconds: float | None = None
        """The same as of the last stamp."""

    def __call__(self) -> float:
        """The time in seconds, since a moment that is the same on all ranks."""
        return self._now

    def broadcast(
        self,
        original: Callable[..., list[Any]],
        requests: list[Any] | None,
        local: list[Any] | None = None,
        *,
        first_stage: bool = True,
    ) -> list[Any]:
        """Broadcast requests with the time, and read the time that came.

        Args:
            original: broadcasts what the first rank passes; returns it on all ranks.
            requests: of the rank that receives them; None on the others.
            local: what that rank adds for those that share its queue.  With
                data-parallel attention, only the first of all ranks can send anything
                but new requests otherwise.
            first_stage: of a pipeline.  Later ones get the time with the requests that
                the stage before them sends (`relayed`).
        """
        if requests is not None:
            stamps = [one for one in requests if isinstance(one, TimeStamp)]
            requests = [one for one in requests if not isinstance(one, TimeStamp)]
            local = list(local or ())
            local += self._stamps(requests or local) if first_stage else stamps
        received = original(requests, local)
        self._came = [one for one in received if isinstance(one, TimeStamp)]
        for stamp in self._came:
            self._now = max(self._now, stamp.seconds)
            self.token_seconds = stamp.token_seconds
        return [one for one in received if not isinstance(one, TimeStamp)]

    def relayed(self, requests: list[Any]) -> list[Any]:
        """Requests that go on to the next stage, with the time that came with them."""
        stamps, self._came = self._came, []
        return [*requests, *stamps]

    def _stamps(self, others: list[Any]) -> list[TimeStamp]:
        now = self._source()
        recent = self._sent is not None and now - self._sent < RESOLUTION_SECONDS
        if recent and not others and not self.is_fine:
            return []
        self._sent = now
        return [TimeStamp(now, self.measured())]
