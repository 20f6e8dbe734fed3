# SPDX-License-Identifier: Apache-2.0
"""Promises: what an application says of content: it will be used within a TTL."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Promise:
    """A conversation goes on within a TTL: its snapshots are used once more."""

    ttl: float
    """Seconds from the end of its request, above 0."""
    positions: frozenset[int] = frozenset()
    """Where snapshots may lie for the positions that the request named."""
    until: float | None = None
    """When the TTL ends; None while the request runs."""
    is_settled: bool = False
    """Whether it is known to have been kept or broken."""

    @property
    def magnitude(self) -> int:
        """Equal for TTLs of the same power of two of seconds."""
        return int(self.ttl).bit_length()

    def ends(self, now: float) -> float:
        """When the TTL ends, or would if the request ended at `now`."""
        return now + self.ttl if self.until is None else self.until
