# SPDX-License-Identifier: Apache-2.0
"""How long the model's queue waits for copies to and from the host, measured on it.

Whoever issues copies never waits, and so does not see that the device does: where a
load takes longer than planned, or the ring has no room.
"""

from __future__ import annotations

from collections import deque

from hybrid_plugin.device.host.queues import Mark, Queue


class QueueWaits:
    """Adds up the waits of one queue, without waiting for it."""

    def __init__(self) -> None:
        """It has not waited."""
        self._issued: deque[tuple[Queue, Mark, Mark]] = deque()
        self._seconds = 0.0

    def wait(self, queue: Queue, mark: Mark) -> None:
        """Have the queue wait for a mark, and measure for how long it stands still."""
        before = queue.record(timed=True)
        queue.wait(mark)
        self._issued.append((queue, before, queue.record(timed=True)))

    @property
    def seconds(self) -> float:
        """Of all waits that are over."""
        while self._issued:
            queue, before, after = self._issued[0]
            seconds = queue.seconds_between(before, after)
            if seconds is None:
                break
            self._issued.popleft()
            self._seconds += seconds
        return self._seconds
