# SPDX-License-Identifier: Apache-2.0
"""Whether two runs gave the same greedy answers.

With kernels in 16 bits, a sum taken in another order (another batch, a state
restored instead of computed in the same chunk) moves a logit by rounding.  So
an answer may leave the reference, but only where the reference itself was
undecided: the first token that differs must have been as likely, but for a
small bound, as the one the reference chose.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

NEAR_TIE = 0.75
"""Nats; `tests/engines/control.py` prints how far a stock engine is from itself."""


class Generated(Protocol):
    """The part of an answer that is compared; tokens are ids or names."""

    @property
    def tokens(self) -> Sequence[Any]: ...

    @property
    def logprobs(self) -> Sequence[Mapping[Any, float]]: ...

    @property
    def error(self) -> str | None: ...


@dataclass(frozen=True)
class Difference:
    """Where two answers part."""

    position: int
    gap: float
    """How much less likely, to the reference, was the other token; in nats."""


@dataclass(frozen=True)
class Tally:
    """The outcome over many conversations."""

    equal: int = 0
    near_ties: int = 0
    """Answers that differ first where the reference was undecided."""
    wrong: int = 0
    """Answers that differ otherwise, or failed."""
    not_compared: int = 0
    """Later turns of a chat whose turn before was a near tie: other questions."""
    worst_gap: float = 0.0

    @property
    def compared(self) -> int:
        """Answers to equal questions."""
        return self.equal + self.near_ties + self.wrong

    @property
    def acceptable(self) -> bool:
        """Whether rounding explains every difference."""
        return self.wrong == 0

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            self.equal + other.equal,
            self.near_ties + other.near_ties,
            self.wrong + other.wrong,
            self.not_compared + other.not_compared,
            max(self.worst_gap, other.worst_gap),
        )


def first_difference(reference: Generated, other: Generated) -> Difference | None:
    """Where an answer leaves the reference, or None if it never does."""
    expected, got = reference.tokens, other.tokens
    for position in range(max(len(expected), len(got))):
        if expected[position : position + 1] != got[position : position + 1]:
            return Difference(position, _gap(reference, other, position))
    return None


def compare_conversation(
    reference: Sequence[Generated], other: Sequence[Generated], bound: float = NEAR_TIE
) -> Tally:
    """Compare the answers of one conversation, turn by turn.

    Args:
        reference: answers with logprobs.
        other: to the same questions.
        bound: in nats, how undecided the reference must be at a difference;
            0 asks for equality.
    """
    for turn, (expected, got) in enumerate(zip(reference, other, strict=True)):
        rest = len(reference) - turn - 1
        if expected.error is not None or got.error is not None:
            return Tally(equal=turn, wrong=1, not_compared=rest)
        found = first_difference(expected, got)
        if found is not None:
            near = found.gap <= bound
            return Tally(turn, int(near), int(not near), rest, found.gap)
    return Tally(equal=len(reference))


def _gap(reference: Generated, other: Generated, position: int) -> float:
    if position >= min(len(reference.tokens), len(other.tokens)):
        return float("inf")
    top = reference.logprobs[position]
    less_likely = top.get(other.tokens[position])
    if less_likely is None:
        return float("inf")
    return top[reference.tokens[position]] - less_likely
