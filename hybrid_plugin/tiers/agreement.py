# SPDX-License-Identifier: Apache-2.0
"""What became of writes and fetches, and how ranks agree on it.

Ranks finish at different times, and one may fail alone.  Whoever decides for them hears
of a ticket when all of them are done with it, so that nothing is in use any more on any
of them, and hears the same of each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from hybrid_plugin.tiers.failure import Failure, Reason

Reduce: TypeAlias = Callable[[list[int]], list[int]]
"""The greatest of all ranks, element by element; each gives a list of equal length, of
integers from 0 to 2**62."""

_REASONS = tuple(Reason)
_MOST = 1 << 40
"""More bundles than any command has."""


@dataclass(frozen=True, slots=True)
class Lost:
    """What of a command failed first."""

    bundle: int
    """Which of its bundles."""
    failure: Failure


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a `Write` or a `Fetch`."""

    ticket: int
    lost: Lost | None
    """None if all of it succeeded."""
    bytes: int
    """That were moved."""
    seconds: float
    """What that took."""

    @property
    def is_ok(self) -> bool:
        """Whether all of it succeeded."""
        return self.lost is None


def agree(own: Mapping[int, Outcome | None], all_reduce: Reduce) -> list[Outcome]:
    """The outcomes of the tickets that all ranks are done with, the same on each.

    A ticket failed if it failed on any rank; the reason is that of the bundle that
    comes first in the sequence.  Time and bytes are those of the rank with the most.

    Args:
        own: what each ticket that is out became on this rank, None while it has become
            nothing; in the same order on all ranks.
        all_reduce: of all ranks, which call this at once.
    """
    numbers = [n for outcome in own.values() for n in _as_numbers(outcome)]
    reduced = iter(all_reduce(numbers))
    fours = zip(own, zip(reduced, reduced, reduced, reduced, strict=True), strict=True)
    return [
        _from_numbers(ticket, lost, size, microseconds)
        for ticket, (pending, lost, size, microseconds) in fours
        if not pending
    ]


def _as_numbers(outcome: Outcome | None) -> tuple[int, int, int, int]:
    """Whether it is pending, the failure, bytes and microseconds.

    Of two failures, the one whose bundle comes first is greater.
    """
    if outcome is None:
        return 1, 0, 0, 0
    code = 0
    if outcome.lost is not None:
        reason = _REASONS.index(outcome.lost.failure.reason)
        code = (_MOST - outcome.lost.bundle) * len(_REASONS) + reason
    return 0, code, outcome.bytes, round(outcome.seconds * 1e6)


def _from_numbers(ticket: int, code: int, size: int, microseconds: int) -> Outcome:
    if not code:
        return Outcome(ticket, None, size, microseconds / 1e6)
    before, reason = divmod(code, len(_REASONS))
    return Outcome(
        ticket,
        Lost(_MOST - before, Failure(_REASONS[reason])),
        size,
        microseconds / 1e6,
    )
