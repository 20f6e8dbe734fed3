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

Time is counted in admissions.  Ages are divided into intervals that double in length;
between the middles of two, the index is interpolated.  Otherwise all content of one
class in an interval would be worth the same, and its size decide, not its age.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from hybrid_plugin.core.policy.certain_use import index_if_certain
from hybrid_plugin.core.policy.exposure import (
    INTERVALS,
    Exposure,
    interval_of,
    interval_start,
)

REMEMBERED = 2000
"""Admissions after which an observation counts 1/e, because traffic changes."""
ASSUMED_OBSERVATIONS = 2.0
"""Number of observations that the assumed chance of a use counts as."""
SMOOTHING = 8.0
"""Number of observations that a smooth rate counts as in each interval: without it, the
few observations of an interval would rank content at random."""
ASSUMED_INTERVALS = 6
"""Number of intervals over which the assumed uses are spread."""
EXPONENTS = (0.0, 0.5, 1.0)
"""Powers of the age with which rates of use are assumed to fall."""
ONSETS = (2, 3, 4, 5, 6)
"""Intervals in which uses are assumed to begin where they do not begin at once: before
a client goes on, others are admitted, the more of them the more run at once.  These
and `ONSET_EXPONENT` restored most in `benchmarks/cache_curves.py` and
`benchmarks/prefill_server.py`; with later ones too much stays for which nobody comes
back.
"""
ONSET_EXPONENT = 1.5
"""Power of the age with which rates are assumed to fall behind it."""
_BEFORE_ONSET = 1e-3
"""Chance of a use in an interval before it, to that in its first one: unlikely, and no
more."""
_REFRESH = 8
"""New observations after which the rates of a class are computed again, and the share
of all that they have to be: an eighth more hardly changes a rate."""
_LASTING = 32
"""Admissions, and as many as those observations, after which they are computed again at
the latest: content that is there was not used meanwhile, even if nothing else was seen.
"""
_FADING = REMEMBERED // _REFRESH
"""Admissions in which as large a share of all observations fades."""
_NEGLIGIBLE = 1e-3

_LENGTHS = tuple(
    float(interval_start(i + 1) - interval_start(i)) for i in range(INTERVALS)
)


class _Law(NamedTuple):
    """How rates of use depend on the age, up to a factor."""

    shape: tuple[float, ...]
    """The rate in each interval."""
    logarithms: tuple[float, ...]
    assumed_time: float
    """For which content is assumed to have been seen: the sum of the shape over it."""


def _law(shape: Sequence[float], first: int) -> _Law:
    """A law whose assumed uses are spread over intervals from the `first` on."""
    intervals = slice(first, first + ASSUMED_INTERVALS)
    time = sum(map(operator.mul, _LENGTHS[intervals], shape[intervals]))
    return _Law(tuple(shape), tuple(map(math.log, shape)), ASSUMED_OBSERVATIONS * time)


_POWER_LAWS = tuple(
    _law([length**-exponent for length in _LENGTHS], 0) for exponent in EXPONENTS
)


def _late_law(onset: int) -> _Law:
    """The law of uses that begin in an interval."""
    before = [_BEFORE_ONSET / length for length in _LENGTHS[:onset]]
    first = _LENGTHS[onset]
    behind = [
        (length / first) ** -ONSET_EXPONENT / first for length in _LENGTHS[onset:]
    ]
    return _law([*before, *behind], onset)


_LAWS = (*_POWER_LAWS, *map(_late_law, ONSETS))


def _zeros() -> list[float]:
    return [0.0] * INTERVALS


def _unknown() -> list[float | None]:
    return [None] * INTERVALS


@dataclass(slots=True)
class _Observations:
    """What was seen of one class."""

    assumed: float
    """Chance of a use within an interval, before anything was observed."""
    uses: list[float] = field(default_factory=_zeros)
    """By interval of the age at which content was used."""
    exposure: Exposure = field(default_factory=Exposure)
    last: int = 0
    """Admission until which observations have faded."""
    computed: int = 0
    """Admission at which the rates were computed."""
    new: int = _REFRESH
    """Observations since then, and pieces of content that came."""
    enough: float = 0.0
    """New observations after which they are computed again."""
    rates: list[float] = field(default_factory=_zeros)
    """Uses by admission within an interval, of content that was not used before it."""
    chances: list[float] = field(default_factory=_zeros)
    """Of a use within an interval, of content that was not used before it."""
    times: list[float] = field(default_factory=_zeros)
    """Expected time held within an interval, likewise."""
    indices: list[float | None] = field(default_factory=_unknown)
    """The Gittins index at the start of each interval, where it was asked for."""
    chance: float = 0.0
    """Of being used at all."""

    def forget(self, now: int) -> None:
        """Let observations fade, and add the time that content was there since."""
        exposure = self.exposure
        kept = math.exp((self.last - now) / REMEMBERED)
        self.uses = [count * kept for count in self.uses]
        exposure.held = [time * kept for time in exposure.held]
        exposure.collect(now)
        self.last, self.enough = now, 0.0

    def refresh(self, now: int) -> None:
        """Compute the rates."""
        self.forget(now)
        uses, held = self.uses, self.exposure.held
        self.rates = _rates(_LAWS, uses, held, self.assumed)
        seen, evidence = ASSUMED_INTERVALS, 0.0
        for i, (rate, length) in enumerate(zip(self.rates, _LENGTHS, strict=True)):
            self.chances[i] = chance = 1.0 - math.exp(-rate * length)
            self.times[i] = chance / rate
            if held[i] > _NEGLIGIBLE:
                seen = max(seen, i + 1)
                evidence += held[i] / length
        # The assumed chance is that of the first intervals, in which later onsets would
        # leave less of it.
        likely = _rates(_POWER_LAWS, uses, held, self.assumed)[:seen]
        self.chance = 1.0 - math.exp(-sum(map(operator.mul, likely, _LENGTHS)))
        self.indices = _unknown()
        self.new, self.enough = 0, max(_REFRESH, evidence / _REFRESH)
        self.computed = now

    def index(self, interval: int) -> float:
        """The Gittins index at the start of an interval."""
        found = self.indices[interval]
        if found is None:
            found = self.indices[interval] = _gittins(
                self.chances, self.times, interval
            )
        return found

    def index_at(self, age: int) -> float:
        """The Gittins index at an age, a mean of those of the intervals around it."""
        interval = interval_of(age)
        here = self.index(interval)
        if interval == 0:
            return here
        part = math.log2(age / interval_start(interval)) - 0.5
        other = interval + (1 if part > 0 else -1)
        if not 0 < other < INTERVALS:
            return here
        return float(here * (self.index(other) / here) ** abs(part))


def _rates(
    laws: Sequence[_Law], uses: list[float], held: list[float], assumed: float
) -> list[float]:
    """Uses by admission in each interval, of what was seen there and of all laws.

    Args:
        laws: as in `_average`, and so are the other arguments.
    """
    rates = []
    smooth = _average(laws, uses, held, assumed)
    for rate, used, time, length in zip(smooth, uses, held, _LENGTHS, strict=True):
        # Uses expected of one piece of content that is there for the interval.
        expected = min(rate * length, 1.0)
        rates.append((used + SMOOTHING * expected) / (time + SMOOTHING * length))
    return rates


def _average(
    laws: Sequence[_Law], uses: list[float], held: list[float], assumed: float
) -> list[float]:
    """Rates of use by interval, an average over laws.

    Requests for a shared document come at a constant rate, a conversation is the less
    likely to go on the longer it rests: rates fall with a power of the age.  Where many
    requests run at once, no conversation goes on before many others were admitted.
    Without laws that begin later, content that cannot have been used yet would look as
    if it never were, and be evicted before it could show otherwise.  Laws are weighed
    by how likely each makes what was seen (Bayesian model averaging; uses are a Poisson
    process).

    Args:
        laws: to average.
        uses: seen, by interval.
        held: admissions that content was there, by interval.
        assumed: uses of one piece of content in each of a law's first intervals.
    """
    seen = sum(uses)
    total = seen + ASSUMED_OBSERVATIONS * ASSUMED_INTERVALS * assumed
    scales, likelihoods = [], []
    for law in laws:
        time = sum(map(operator.mul, held, law.shape))
        scale = total / (time + law.assumed_time)
        scales.append(scale)
        likelihoods.append(
            seen * math.log(scale)
            + sum(map(operator.mul, uses, law.logarithms))
            - scale * time
        )
    best = max(likelihoods)
    weights = [math.exp(likelihood - best) for likelihood in likelihoods]
    whole = sum(weights)
    factors = [w * s / whole for w, s in zip(weights, scales, strict=True)]
    return [
        sum(map(operator.mul, factors, values))
        for values in zip(*(law.shape for law in laws), strict=True)
    ]


class ReuseModel:
    """Rates of reuse by class and age.

    Content is observed from `enter` to `leave`.  Every method takes about constant
    time, amortised.
    """

    def __init__(self, assumed: Callable[[Hashable], float]) -> None:
        """Nothing was observed yet.

        Args:
            assumed: chance that content of a class is ever used, above 0 and below 1,
                for classes of which little or nothing was observed.
        """
        self._assumed = assumed
        self._classes: dict[Hashable, _Observations] = {}
        self._now = 0

    def enter(self, kind: Hashable, since: int, now: int) -> int:
        """Observe a piece of content of a class from now on.

        Args:
            kind: its class.
            since: admission at which it was used before, from which its age counts.
            now: number of admissions so far.

        Returns:
            What `leave` wants to know.
        """
        seen = self._of(kind, now)
        seen.new += 1
        return seen.exposure.enter(since, now)

    def leave(self, kind: Hashable, group: int, now: int) -> None:
        """Observe it no more, because it was used, evicted, or is of another class.

        Args:
            kind: its class.
            group: as `enter` returned it.
            now: number of admissions so far.
        """
        self._of(kind, now).exposure.leave(group, now)

    def observe(self, kind: Hashable, age: int, now: int, *, used: bool) -> None:
        """Record that content of a class was used, or evicted.

        Args:
            kind: its class.
            age: admissions since it was used before.
            now: number of admissions so far.
            used: whether it was used; otherwise it was evicted.
        """
        seen = self._of(kind, now)
        interval = interval_of(age)
        # It was there for this admission as well.
        seen.exposure.held[interval] += 1.0
        if used:
            seen.uses[interval] += 1.0
        seen.new += 1

    def rate(self, kind: Hashable, age: int) -> float:
        """Expected uses per admission of content of a class: its Gittins index."""
        return self._fresh(kind).index_at(age)

    def rate_if_certain(self, kind: Hashable, age: int, within: float) -> float:
        """The Gittins index of content that is certain to be used in time.

        When it is used is that of its class, given that it is used in time.

        Args:
            kind: its class.
            age: admissions since it was used before.
            within: admissions in which it will be used, at least 1.

        Returns:
            Expected uses per admission, at most 1, and at least 1 / `within` and those
            of an uncertain use.
        """
        seen = self._fresh(kind)
        # Between intervals the uncertain use is interpolated, and may be worth more.
        uncertain = min(seen.index_at(age), 1.0)
        return max(index_if_certain(seen.rates, age, within), uncertain)

    def chance(self, kind: Hashable) -> float:
        """Probability that content of a class is used at all, if it is kept."""
        return self._fresh(kind).chance

    def _of(self, kind: Hashable, now: int) -> _Observations:
        self._now = now
        seen = self._classes.get(kind)
        if seen is None:
            chance = 1.0 - (1.0 - self._assumed(kind)) ** (1.0 / ASSUMED_INTERVALS)
            seen = self._classes[kind] = _Observations(chance, last=now)
        if now - seen.last >= _FADING:
            seen.forget(now)
        return seen

    def _fresh(self, kind: Hashable) -> _Observations:
        seen = self._of(kind, self._now)
        lasting = max(_LASTING, seen.enough)
        if seen.new >= seen.enough or self._now - seen.computed >= lasting:
            seen.refresh(self._now)
        return seen


def _gittins(chances: list[float], times: list[float], first: int) -> float:
    """The index at the start of an interval.

    Args:
        chances: of a use within the interval, of what was not used before it.
        times: expected time held within the interval, likewise.
        first: that interval.
    """
    best = uses = held = 0.0
    unused = 1.0
    for chance, time in zip(chances[first:], times[first:], strict=True):
        uses += unused * chance
        held += unused * time
        best = max(best, uses / held)
        unused *= 1.0 - chance
        if unused < _NEGLIGIBLE:
            break
    return best
