# SPDX-License-Identifier: Apache-2.0
"""From seconds of single passes to costs in tokens of prefill."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

BUSY_FROM = 4
"""Passes of at least the largest's tokens over this give the seconds of a token: they
keep the device busy, or show that nothing does."""


@dataclass(frozen=True)
class Timed:
    """One pass."""

    prefill_tokens: int
    prefills: int
    decodes: int
    """Sequences that it generated a token for."""
    beside: int
    """Sequences that were generating meanwhile, in this pass or between passes."""
    launch: float
    """Seconds of the host."""
    seconds: float
    """From the last pass's result, or its own launch, to its result."""


@dataclass(frozen=True)
class Costs:
    """In seconds, and in tokens of prefill."""

    smallest_pass: float
    """Seconds of the prefill pass of fewest tokens."""
    token: float
    """Seconds that a further token of prefill takes."""
    step: float
    """Seconds of a decode step, the median over numbers of sequences."""

    @property
    def pass_tokens(self) -> float:
        """`PASS_TOKENS`."""
        return self.smallest_pass / self.token

    @property
    def step_tokens(self) -> float:
        """`STEP_TOKENS`."""
        return self.step / self.token

    def move_tokens(self, milliseconds: float) -> float:
        """`MOVE_TOKENS`, of a move that takes so long."""
        return milliseconds / 1000 / self.token


def medians(passes: Iterable[Timed]) -> dict[Timed, int]:
    """One pass for all of a kind, with the medians of their times, and their number."""
    kinds: dict[tuple[int, int, int, int], list[Timed]] = defaultdict(list)
    for one in passes:
        kind = (one.beside, one.prefills, one.prefill_tokens, one.decodes)
        kinds[kind].append(one)
    return {
        Timed(
            tokens,
            prefills,
            decodes,
            beside,
            statistics.median(one.launch for one in found),
            statistics.median(one.seconds for one in found),
        ): len(found)
        for (beside, prefills, tokens, decodes), found in sorted(kinds.items())
    }


def fit(passes: Iterable[Timed]) -> Costs:
    """Costs from passes of one sequence, and from decode steps.

    Args:
        passes: any; those that mix kinds do not count.

    Raises:
        ValueError: without prefills of different sizes, without decode steps, or if
            more tokens take no more time.
    """
    kinds = medians(passes)
    alone = {
        one.prefill_tokens: one.seconds
        for one in kinds
        if one.prefills == 1 and not one.decodes and not one.beside
    }
    steps = [one.seconds for one in kinds if one.decodes and not one.prefills]
    if len(alone) < 2 or not steps:
        raise ValueError("there are not enough kinds of passes for a fit.")
    return Costs(
        smallest_pass=alone[min(alone)],
        token=_slope(alone),
        step=statistics.median(steps),
    )


def _slope(alone: Mapping[int, float]) -> float:
    large = {n: s for n, s in alone.items() if n >= max(alone) / BUSY_FROM}
    if len(large) < 2:
        large = dict(alone)
    slope = statistics.linear_regression(list(large), list(large.values())).slope
    if slope <= 0:
        raise ValueError("passes of more tokens take no more time.")
    return slope
