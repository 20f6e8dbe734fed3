# SPDX-License-Identifier: Apache-2.0
"""Rates of reuse where an application promised a use within a TTL.

A promise makes the use certain, not the moment.  The use is spread over the TTL, as
uses of content with such TTLs were seen to be.  It counts as much as promises with such
TTLs were kept lately.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from hybrid_plugin.core.policy.pace import Pace
from hybrid_plugin.core.policy.reuse import ReuseModel
from hybrid_plugin.core.policy.reuse_classes import promised_magnitude

_ASSUMED_KEPT = 2.0
"""Number of promises that are assumed to have been kept, before any was observed."""
_REMEMBERED_PROMISES = 64
"""Promises after which one that was kept or broken counts 1/e."""


@dataclass(slots=True)
class Trust:
    """The share of the promises of similar TTLs that were kept."""

    kept: float = 0.0
    broken: float = 0.0

    @property
    def share(self) -> float:
        """Between 0 and 1; 1 before any promise was broken."""
        kept = self.kept + _ASSUMED_KEPT
        return kept / (kept + self.broken)

    def observe(self, *, kept: float = 0.0, broken: float = 0.0) -> None:
        """Record what became of one promise, in whole or in part."""
        remembered = 1.0 - 1.0 / _REMEMBERED_PROMISES
        self.kept = self.kept * remembered + kept
        self.broken = self.broken * remembered + broken


@dataclass(slots=True)
class Certainty:
    """How certain a promised use is, and within how many admissions it comes."""

    pace: Pace = field(default_factory=Pace)
    _trusts: dict[int, Trust] = field(default_factory=dict)

    def trust(self, magnitude: int) -> Trust:
        """Of promises with TTLs of that magnitude."""
        return self._trusts.setdefault(magnitude, Trust())

    def admissions(self, magnitude: int) -> float:
        """Expected within the longest TTL of that magnitude."""
        return self.pace.admissions_within(float(1 << magnitude))


class PromisedReuse(ReuseModel):
    """Rates of reuse, learned and promised."""

    def __init__(
        self, assumed: Callable[[Hashable], float], certainty: Certainty
    ) -> None:
        """Nothing was observed yet.

        Args:
            assumed: as for `ReuseModel`.
            certainty: of promised uses.
        """
        super().__init__(assumed)
        self._certainty = certainty

    def rate(self, kind: Hashable, age: int) -> float:
        """Expected uses per admission: the Gittins index of the class.

        Of content that was promised a use at least what the promise is worth.
        """
        learned = super().rate(kind, age)
        magnitude = promised_magnitude(kind)
        if magnitude is None:
            return learned
        within = self._certainty.admissions(magnitude)
        share = self._certainty.trust(magnitude).share
        return max(learned, share * self.rate_if_certain(kind, age, within))
