# SPDX-License-Identifier: Apache-2.0
"""Pace: how many admissions fit into a span of time.

Content ages by admissions, applications speak of seconds.  The core has no clock: the
adapter tells the time, so that equal calls have equal results on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from hybrid_plugin.core.policy.exposure import INTERVALS, interval_start

REMEMBERED_ADMISSIONS = 256
"""Number of admissions over which the time between two is averaged."""
MOST_ADMISSIONS = float(interval_start(INTERVALS - 1))
"""More are not told apart."""


@dataclass(slots=True)
class Pace:
    """The time, and the average time between two admissions."""

    now: float = 0.0
    """Seconds, of a clock that starts anywhere."""
    seconds_apart: float = 0.0
    """Average time between two admissions; 0 before it was measured."""
    _admitted_at: float | None = None
    _count: int = 0

    def pass_to(self, now: float) -> None:
        """Set the time; what is earlier than the time so far changes nothing."""
        self.now = max(self.now, now)

    def admitted(self) -> None:
        """Note an admission."""
        if self._admitted_at is not None:
            self._count = min(self._count + 1, REMEMBERED_ADMISSIONS)
            apart = self.now - self._admitted_at
            self.seconds_apart += (apart - self.seconds_apart) / self._count
        self._admitted_at = self.now

    def admissions_within(self, seconds: float) -> float:
        """Admissions expected within a span of time; at least 1.

        The most there can be where nothing was measured, or no time passed.
        """
        if seconds >= self.seconds_apart * MOST_ADMISSIONS:
            return MOST_ADMISSIONS
        return max(seconds / self.seconds_apart, 1.0)
