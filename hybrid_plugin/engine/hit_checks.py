# SPDX-License-Identifier: Apache-2.0
"""Checks of hits: a share of the requests that hit is served twice more, and compared.

Once with the same hit and once without any, for one token, when nothing else runs.  The
log probabilities of that token must agree but for rounding: if they do not, a state or
a page was not what its tokens say.  Neither run leaves anything in the cache.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, Generic, TypeVar
from zlib import crc32

from hybrid_plugin.core.stats import CacheStats

BOUND: Final = 0.75
"""Nats by which two log probabilities may differ: what bfloat16 moves them by, with
other splits of a prompt (`tests/engines/test_equality.py`)."""
TOP: Final = 5
"""Likeliest tokens that are compared."""
MOST_WAITING: Final = 8
"""Requests that wait for a moment when nothing runs; others are not checked."""

Request = TypeVar("Request")


class Run(StrEnum):
    """The two runs of a check."""

    RESTORED = "restored"
    COMPUTED = "computed"


@dataclass(slots=True, eq=False)
class HitCheck(Generic[Request]):
    """One request that is checked."""

    number: int
    request: Request
    """The engine's own, of which the prompt counts."""
    hit: int
    """Tokens that it had restored."""
    length: int
    """Tokens of its prompt."""
    seen: dict[Run, Mapping[int, float]] = field(default_factory=dict)
    """Log probabilities by token, of each run that is over."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a check found."""

    nats: float
    """By which a log probability differs, at most."""

    @property
    def is_ok(self) -> bool:
        """Whether that can be rounding."""
        return self.nats <= BOUND


def _is_chosen(number: int, fraction: float) -> bool:
    """Whether the hit of this number is checked; all ranks choose the same.

    Numbers are spread by a checksum, so that traffic that repeats itself every few
    requests does not have the same one of them checked each time.
    """
    return crc32(number.to_bytes(8, "little")) < fraction * 2**32


class HitChecks(Generic[Request]):
    """The checks of one engine, one at a time."""

    def __init__(self, fraction: float, stats: CacheStats) -> None:
        """Nothing was checked.

        Args:
            fraction: of the requests with a hit that are checked.
            stats: counts checks that are over.
        """
        self._fraction = fraction
        self._hits = 0
        self._waiting: list[HitCheck[Request]] = []
        self.running: HitCheck[Request] | None = None
        self._count = 0
        self._stats = stats

    @property
    def is_waiting(self) -> bool:
        """Whether a check is to begin when nothing else runs."""
        return bool(self._waiting) and self.running is None

    def offer(self, request: Request, hit: int, length: int) -> None:
        """Have a request checked, or not, that was just admitted.

        Args:
            request: the engine's.
            hit: tokens restored.
            length: tokens of its prompt.
        """
        if not hit:
            return
        self._hits += 1
        if not _is_chosen(self._hits, self._fraction):
            return
        if len(self._waiting) < MOST_WAITING:
            self._count += 1
            self._waiting.append(HitCheck(self._count, request, hit, length))

    def begin(self) -> HitCheck[Request]:
        """Begin the check that has waited longest."""
        self.running = self._waiting.pop(0)
        return self.running

    def take(self, run: Run, hit: int, top: Mapping[int, float]) -> Verdict | None:
        """Take what a run of the running check gave.

        Args:
            run: which of the two.
            hit: tokens that it had restored.
            top: log probabilities of its likeliest tokens.

        Returns:
            The verdict, once both are over; None before, and if there is none because
            the hit was gone.
        """
        check = self.running
        if check is None:
            raise ValueError("no check runs")
        check.seen[run] = top
        if run is Run.RESTORED and hit != check.hit:
            check.hit = 0
        if len(check.seen) < len(Run):
            return None
        self.running = None
        if not check.hit:
            return None
        verdict = Verdict(apart(check.seen[Run.RESTORED], check.seen[Run.COMPUTED]))
        self._stats.hit_checks += 1
        self._stats.hit_checks_failed += not verdict.is_ok
        return verdict

    def void(self) -> None:
        """Note that all that was cached is gone, the hits to be checked among it.

        Runs of before and after it, between which weights may have changed, are not
        compared.
        """
        self._waiting.clear()
        if self.running is not None:
            self.running.hit = 0

    def drop(self) -> None:
        """End the running check without a verdict: a run of it was aborted."""
        self.running = None


def apart(one: Mapping[int, float], other: Mapping[int, float]) -> float:
    """Nats by which two lists of likeliest tokens differ at either one's first token.

    A token that one of them does not list is no likelier there than its last one.
    """
    return max(_missing(one, other), _missing(other, one))


def _missing(one: Mapping[int, float], other: Mapping[int, float]) -> float:
    best = max(one, key=one.__getitem__)
    there = other.get(best)
    if there is None:
        return one[best] - min(other.values())
    return abs(one[best] - there)


def report(check: HitCheck[Any], tokens: Sequence[int], verdict: Verdict) -> str:
    """Keep what it takes to see a difference again in a file of the user's.

    Args:
        check: that found it.
        tokens: of the prompt.
        verdict: of the check.

    Returns:
        A sentence for the log.
    """
    found = {
        "nats": verdict.nats,
        "hit": check.hit,
        "tokens": list(tokens),
        **{f"{run}_logprobs": dict(check.seen[run]) for run in Run},
    }
    handle, path = tempfile.mkstemp(prefix="hybrid-hit-check-", suffix=".json")
    with os.fdopen(handle, "w") as file:
        json.dump(found, file)
    return (
        f"hybrid-plugin: a hit of {check.hit} of {check.length} tokens gave other log "
        f"probabilities than computing them, by {verdict.nats:.2f} nats: what was "
        f"cached is wrong; {path} has the tokens"
    )
