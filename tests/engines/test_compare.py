# SPDX-License-Identifier: Apache-2.0
"""The comparison that the equality tests rest on."""

from __future__ import annotations

from tests.engines.compare import compare
from tests.engines.messages import Answer

TOPS = ({1: -0.1, 2: -0.5}, {3: -0.2, 4: -3.0})
REFERENCE = Answer((1, 3), logprobs=TOPS)


def gap(*tokens: int) -> float:
    return compare([REFERENCE], [Answer(tokens)], bound=99.0).worst_gap


def test_equal_answers() -> None:
    assert compare([REFERENCE], [Answer((1, 3))], bound=0.0).wrong == ()
    assert gap(1, 3) == 0.0


def test_the_first_difference_counts() -> None:
    assert round(gap(2, 4), 6) == 0.4
    assert round(gap(1, 4), 6) == 2.8


def test_what_the_reference_did_not_think_of_is_no_near_tie() -> None:
    assert gap(9, 3) == float("inf")
    assert gap(1) == float("inf")
    assert gap(1, 3, 5) == float("inf")


def test_bound() -> None:
    assert compare([REFERENCE], [Answer((2, 3))], bound=0.5).wrong == ()
    assert len(compare([REFERENCE], [Answer((2, 3))], bound=0.3).wrong) == 1


def test_failures_are_wrong_and_aborts_are_left_out() -> None:
    failed = Answer((), error="500")
    aborted = Answer((1,), aborted=True)
    outcome = compare([REFERENCE, REFERENCE], [failed, aborted], bound=9.0)
    assert outcome.compared == 1
    assert outcome.wrong == ("request 0 failed: 500",)
