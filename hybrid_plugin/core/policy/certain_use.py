# SPDX-License-Identifier: Apache-2.0
"""The worth of content that will certainly be used within some time.

It is a Gittins index, as in `reuse`, but of a use that is spread over the time left.
"""

from __future__ import annotations

import math

from hybrid_plugin.core.policy.exposure import INTERVALS, interval_of, interval_start

_NEGLIGIBLE = 1e-3


def index_if_certain(rates: list[float], age: int, within: float) -> float:
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
