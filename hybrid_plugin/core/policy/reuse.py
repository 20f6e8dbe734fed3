# SPDX-License-Identifier: Apache-2.0
"""ReuseModel: learns when cached content is used again, from what was seen.

Content is divided into classes: what it is, and what happened to it so far.  For each
class the model counts, by age, how often content was used again, and how long it was
there to be used.  Their quotient is the hazard rate of survival analysis: content that
is evicted is no longer observed, but is not counted as useless.

The worth of keeping content is a Gittins index (Gittins, 1979): the largest quotient of
expected uses and expected time held, over all times at which one could give up.  It
looks ahead, so that content which is never used within its first moments, but always
later, is not given up in its first moments.  (LHD, Beckmann et al., NSDI 2018, ranks
objects by a similar quotient.)

Time is counted in admissions.  Ages are divided into intervals that double in length.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

INTERVALS = 24
"""Ages up to 2**23 admissions are told apart."""
REMEMBERED = 2000
"""Admissions after which an observation counts 1/e, because traffic changes."""
ASSUMED_OBSERVATIONS = 2.0
"""Number of observations that the assumed chance of a use counts as."""
SMOOTHING = 4.0
"""Number of observations that a smooth rate counts as in each interval: without it, the
few observations of an interval would rank content at random."""
ASSUMED_INTERVALS = 6
"""Number of intervals over which the assumed uses are spread."""
EXPONENTS = (0.0, 0.5, 1.0)
"""Powers of the age with which rates of use are assumed to fall."""
_REFRESH = 8
"""Observations of a class after which its rates are computed anew."""
_NEGLIGIBLE = 1e-3


def interval_of(age: int) -> int:
    """Index of the interval of ages that contains `age`: 0, 1, 2 to 3, 4 to 7, ..."""
    return min(age.bit_length(), INTERVALS - 1)


def interval_start(index: int) -> int:
    """The lowest age of an interval."""
    return 0 if index == 0 else 1 << (index - 1)


_LENGTHS = tuple(
    float(interval_start(i + 1) - interval_start(i)) for i in range(INTERVALS)
)


_POWERS = tuple(
    tuple(length**-exponent for length in _LENGTHS) for exponent in EXPONENTS
)


_ASSUMED_TIMES = tuple(
    ASSUMED_OBSERVATIONS
    * sum(map(operator.mul, _LENGTHS[:ASSUMED_INTERVALS], shape[:ASSUMED_INTERVALS]))
    for shape in _POWERS
)
"""By exponent, the time for which content is assumed to have been seen."""


def _zeros() -> list[float]:
    return [0.0] * INTERVALS


@dataclass(slots=True)
class _Observations:
    """What was seen of one class."""

    assumed: float
    """Chance of a use within an interval, before anything was observed."""
    uses: list[float] = field(default_factory=_zeros)
    """By interval of the age at which content was used."""
    held: list[float] = field(default_factory=_zeros)
    """Admissions that content was there, by interval of its age."""
    last: int = 0
    """Admission of the last observation."""
    new: int = _REFRESH
    """Observations since what follows was computed."""
    indices: list[float] = field(default_factory=_zeros)
    """The Gittins index at the start of each interval."""
    rates: list[float] = field(default_factory=_zeros)
    """Uses by admission in each interval, of what was not used before."""
    chance: float = 0.0
    """Of being used at all."""

    def forget(self, now: int) -> None:
        """Let observations fade."""
        if now > self.last:
            kept = math.exp((self.last - now) / REMEMBERED)
            self.uses = [count * kept for count in self.uses]
            self.held = [time * kept for time in self.held]
            self.last = now

    def refresh(self) -> None:
        """Compute the rates."""
        chances, times, rates = [], [], []
        smooth = _average_of_power_laws(self.uses, self.held, self.assumed)
        for i, length in enumerate(_LENGTHS):
            # Uses expected of one piece of content that is there for the interval.
            expected = min(smooth[i] * length, 1.0)
            rate = (self.uses[i] + SMOOTHING * expected) / (
                self.held[i] + SMOOTHING * length
            )
            rates.append(rate)
            chances.append(1.0 - math.exp(-rate * length))
            times.append(chances[-1] / rate)
        self.rates = rates
        self.indices = _gittins(chances, times)
        seen = [i for i, held in enumerate(self.held) if held > _NEGLIGIBLE]
        count = max(ASSUMED_INTERVALS, seen[-1] + 1 if seen else 0)
        self.chance = 1.0 - math.prod([1.0 - chance for chance in chances[:count]])
        self.new = 0


def _average_of_power_laws(
    uses: list[float], held: list[float], assumed: float
) -> list[float]:
    """Rates of use by interval that fall with a power of the age.

    Requests for a shared document come at a constant rate, a conversation is the less
    likely to go on the longer it rests.  Exponents are weighed by how likely each makes
    what was seen (Bayesian model averaging; uses are a Poisson process).

    Args:
        uses: seen, by interval.
        held: admissions that content was there, by interval.
        assumed: uses of one piece of content in each of the first intervals.
    """
    total = sum(uses) + ASSUMED_OBSERVATIONS * ASSUMED_INTERVALS * assumed
    laws, likelihoods = [], []
    for shape, assumed_time in zip(_POWERS, _ASSUMED_TIMES, strict=True):
        scale = total / (sum(map(operator.mul, held, shape)) + assumed_time)
        law = [scale * power for power in shape]
        laws.append(law)
        likelihoods.append(
            sum(
                used * math.log(rate) - rate * time
                for used, time, rate in zip(uses, held, law, strict=True)
            )
        )
    best = max(likelihoods)
    weights = [math.exp(likelihood - best) for likelihood in likelihoods]
    whole = sum(weights)
    return [
        sum(map(operator.mul, weights, rates)) / whole
        for rates in zip(*laws, strict=True)
    ]


class ReuseModel:
    """Rates of reuse by class and age; every method takes constant time."""

    def __init__(self, assumed: Callable[[Hashable], float]) -> None:
        """Nothing was observed yet.

        Args:
            assumed: chance that content of a class is ever used, above 0 and below 1,
                for classes of which little or nothing was observed.
        """
        self._assumed = assumed
        self._classes: dict[Hashable, _Observations] = {}

    def hold(self, kind: Hashable, age: int, now: int) -> None:
        """Record that content of a class was not used until an interval of ages ended.

        Without this, content that stays unused for ever would never be seen.

        Args:
            kind: its class.
            age: at which the next interval begins.
            now: number of admissions so far.
        """
        seen = self._of(kind)
        seen.forget(now)
        ended = interval_of(age) - 1
        seen.held[ended] += _LENGTHS[ended]
        seen.new += 1

    def observe(self, kind: Hashable, age: int, now: int, *, used: bool) -> None:
        """Record that content of a class was used, or evicted.

        `hold` was called for the intervals that it outlived.

        Args:
            kind: its class.
            age: admissions since it was used before.
            now: number of admissions so far.
            used: whether it was used; otherwise it was evicted.
        """
        seen = self._of(kind)
        seen.forget(now)
        last = interval_of(age)
        seen.held[last] += min(age - interval_start(last) + 1.0, _LENGTHS[last])
        if used:
            seen.uses[last] += 1.0
        seen.new += 1

    def rate(self, kind: Hashable, age: int) -> float:
        """Expected uses per admission of content of a class: its Gittins index."""
        return self._fresh(kind).indices[interval_of(age)]

    def rate_if_certain(self, kind: Hashable, age: int, within: float) -> float:
        """The Gittins index of content that is certain to be used in time.

        When it is used is that of its class, given that it is used in time.

        Args:
            kind: its class.
            age: admissions since it was used before.
            within: admissions in which it will be used, at least 1.

        Returns:
            Expected uses per admission, at least 1 / `within` and at most 1.
        """
        return _gittins_if_certain(self._fresh(kind).rates, age, within)

    def chance(self, kind: Hashable) -> float:
        """Probability that content of a class is used at all, if it is kept."""
        return self._fresh(kind).chance

    def _of(self, kind: Hashable) -> _Observations:
        seen = self._classes.get(kind)
        if seen is None:
            chance = 1.0 - (1.0 - self._assumed(kind)) ** (1.0 / ASSUMED_INTERVALS)
            seen = self._classes[kind] = _Observations(chance)
        return seen

    def _fresh(self, kind: Hashable) -> _Observations:
        seen = self._of(kind)
        if seen.new >= _REFRESH:
            seen.refresh()
        return seen


def _gittins(chances: list[float], times: list[float]) -> list[float]:
    """The index at the start of each interval.

    Args:
        chances: of a use within the interval, of what was not used before it.
        times: expected time held within the interval, likewise.
    """
    indices = []
    for first in range(INTERVALS):
        best = uses = held = 0.0
        unused = 1.0
        for i in range(first, INTERVALS):
            uses += unused * chances[i]
            held += unused * times[i]
            best = max(best, uses / held)
            unused *= 1.0 - chances[i]
            if unused < _NEGLIGIBLE:
                break
        indices.append(best)
    return indices


def _gittins_if_certain(rates: list[float], age: int, within: float) -> float:
    """The index at an age of what will be used in `within` admissions.

    Args:
        rates: of use in each interval, by which the use is spread over the time left.
        age: at which it was not used yet.
        within: admissions in which it is used.
    """
    parts: list[tuple[float, float, float]] = []
    """By part of the time left: chance of the use, its average and its latest time."""
    unused, start = 1.0, 0.0
    for i in range(interval_of(age), INTERVALS):
        stop = interval_start(i + 1) - age if i + 1 < INTERVALS else within
        stop = min(stop, within)
        length = stop - start
        chance = -math.expm1(-rates[i] * length)
        average = start + _average_time(rates[i] * length) * length
        parts.append((unused * chance, average, stop))
        unused *= 1.0 - chance
        start = stop
        if stop >= within:
            break
    whole = sum(chance for chance, _, _ in parts)
    best = uses = waited = 0.0
    for chance, average, latest in parts:
        uses += chance / whole
        waited += chance / whole * average
        best = max(best, uses / (waited + (1.0 - uses) * latest))
    return min(best, 1.0)


def _average_time(expected: float) -> float:
    """When something is used on average, as a part of the interval it is used in.

    Args:
        expected: uses in the interval, which come at a constant rate.
    """
    if expected < _NEGLIGIBLE:
        return 0.5
    return 1.0 / expected - math.exp(-expected) / -math.expm1(-expected)
