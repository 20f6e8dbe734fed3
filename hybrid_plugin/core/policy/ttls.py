# SPDX-License-Identifier: Apache-2.0
"""What TTLs are worth: how long they last in admissions, and how many were kept."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from hybrid_plugin.core.policy.pace import Pace
from hybrid_plugin.core.policy.reuse import ReuseModel
from hybrid_plugin.core.policy.reuse_classes import PromisedClass, assumed_chance

_ASSUMED_KEPT = 2.0
"""Number of promises that are assumed to have been kept, before any was observed."""
_REMEMBERED_PROMISES = 64
"""Promises after which one that was kept or broken counts 1/e."""


@dataclass(slots=True)
class Trust:
    """How many of the promises with similar TTLs were kept lately."""

    kept: float = 0.0
    broken: float = 0.0

    @property
    def share(self) -> float:
        """Between 0 and 1; 1 before any promise was broken."""
        kept = self.kept + _ASSUMED_KEPT
        return kept / (kept + self.broken)

    def observe(self, *, kept: float = 0.0, broken: float = 0.0) -> None:
        """Record one more promise, of which parts were kept and broken."""
        remembered = 1.0 - 1.0 / _REMEMBERED_PROMISES
        self.kept = self.kept * remembered + kept
        self.broken = self.broken * remembered + broken


class Ttls:
    """The pace, and how much TTLs are trusted, by their magnitude."""

    def __init__(self) -> None:
        """Nothing was measured, and no promise was broken."""
        self.pace = Pace()
        self._trusts: dict[int, Trust] = {}

    def trust(self, magnitude: int) -> Trust:
        """In TTLs of less than 2**`magnitude` seconds, but no less than half of it."""
        return self._trusts.setdefault(magnitude, Trust())

    def admissions(self, magnitude: int) -> float:
        """Admissions expected within the longest TTL of a magnitude; at least 1."""
        return self.pace.admissions_within(2.0**magnitude)


class ReuseWithTtls(ReuseModel):
    """Rates of reuse, where uses that were promised within a TTL are certain.

    They are, as far as promises with similar TTLs were kept.  When within its TTL a use
    comes is learned, as for other classes.
    """

    def __init__(self, ttls: Ttls) -> None:
        """Nothing was observed yet.

        Args:
            ttls: what is known of them.
        """
        super().__init__(assumed_chance)
        self._ttls = ttls

    def rate(self, kind: Hashable, age: int) -> float:
        """Expected uses per admission of content of a class."""
        if not isinstance(kind, PromisedClass):
            return super().rate(kind, age)
        left = self._ttls.admissions(kind.magnitude)
        if kind.has_begun:
            left = max(left - age, 1.0)
        trust = self._ttls.trust(kind.magnitude)
        return trust.share * self.rate_if_certain(kind, age, left)
