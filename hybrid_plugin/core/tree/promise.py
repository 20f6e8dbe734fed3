# SPDX-License-Identifier: Apache-2.0
"""Promises: what an application says of content: it will be used within a TTL."""

from __future__ import annotations

from dataclasses import dataclass

from hybrid_plugin.core.policy.pace import Pace


@dataclass(slots=True, eq=False)
class Promise:
    """A conversation goes on within a TTL: its snapshots are used once more."""

    ttl: float
    """Seconds from the end of its request."""
    pace: Pace
    positions: frozenset[int] = frozenset()
    """Positions that the request named, at page ends."""
    until: float | None = None
    """When the TTL ends; None while the request runs."""
    is_settled: bool = False
    """Whether it is known to have been kept or broken."""

    @property
    def ends(self) -> float:
        """When the TTL ends, or would if the request ended now."""
        return self.pace.now + self.ttl if self.until is None else self.until

    @property
    def holds(self) -> bool:
        """Whether its TTL goes on."""
        return self.ends > self.pace.now

    @property
    def elapsed(self) -> float:
        """The part of its TTL that is over, between 0 and 1."""
        return 1.0 - max(self.ends - self.pace.now, 0.0) / self.ttl

    @property
    def magnitude(self) -> int:
        """Equal for TTLs of the same power of two of seconds."""
        return int(self.ttl).bit_length()
