# SPDX-License-Identifier: Apache-2.0
"""How long a server may be silent before a request to it counts as failed.

A slow machine is no failure, and neither is a long queue: a request waits as long as
the server makes progress with any request.  How long a working server is silent
depends on the machine, so it is measured: the longest silence that ended is the probe,
and the limit is a multiple of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LEAST_LIMIT_S = 180.0
"""The limit on a machine of any speed."""
PROBES = 50
"""Times the longest silence so far that a server may be silent."""


class Patience:
    """Watches one server; shared by all requests to it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Nothing is in flight yet.

        Args:
            clock: tells the time in seconds.
        """
        self._clock = clock
        self._in_flight = 0
        self._last = clock()
        self._longest = 0.0

    @contextmanager
    def request(self) -> Iterator[None]:
        """A request is in flight; time without one is no silence."""
        if not self._in_flight:
            self._last = self._clock()
        self._in_flight += 1
        try:
            yield
        finally:
            self._in_flight -= 1

    def progress(self) -> None:
        """The server has done something for a request."""
        now = self._clock()
        if self._in_flight:
            self._longest = max(self._longest, now - self._last)
        self._last = now

    @property
    def limit_s(self) -> float:
        """Seconds that the server may be silent."""
        return max(LEAST_LIMIT_S, PROBES * self._longest)

    @property
    def left_s(self) -> float:
        """Seconds until the server has been silent for too long; at least 0."""
        return max(self._last + self.limit_s - self._clock(), 0.0)
