# SPDX-License-Identifier: Apache-2.0
"""Ranks hear the same of a ticket, and only when all of them are done with it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_plugin.tiers.agreement import Lost, Outcome, agree
from hybrid_plugin.tiers.failure import Failure, Reason
from tests.core.profiles import machine_settings


def outcomes(ticket: int) -> st.SearchStrategy[Outcome | None]:
    failure = st.builds(Failure, st.sampled_from(Reason), st.text(max_size=3))
    lost = st.none() | st.builds(Lost, st.integers(0, 50), failure)
    return st.none() | st.builds(
        Outcome,
        st.just(ticket),
        lost,
        st.integers(0, 1 << 45),
        st.floats(0, 1e5, allow_nan=False),
    )


RANKS = st.integers(0, 5).flatmap(
    lambda tickets: st.lists(
        st.tuples(*[outcomes(ticket) for ticket in range(7, 7 + tickets)]),
        min_size=1,
        max_size=4,
    )
)


def all_agree(
    ranks: Sequence[dict[int, Outcome | None]],
) -> tuple[list[list[Outcome]], list[list[int]]]:
    """What each rank hears, and what each gave."""
    given: list[list[int]] = []

    def collect(values: list[int]) -> list[int]:
        given.append(values)
        return [1, 0, 0, 0] * (len(values) // 4)

    for own in ranks:
        agree(own, collect)
    greatest = [max(values) for values in zip(*given, strict=True)]
    return [agree(own, lambda _: greatest) for own in ranks], given


@machine_settings(200)
@given(RANKS)
def test_all_ranks_hear_the_same(ranks: list[tuple[Outcome | None, ...]]) -> None:
    tickets = range(7, 7 + len(ranks[0]))
    owns = [dict(zip(tickets, rank, strict=True)) for rank in ranks]
    heard, numbers = all_agree(owns)
    assert all(0 <= value < 1 << 62 for values in numbers for value in values)
    assert all(each == heard[0] for each in heard)
    found = {outcome.ticket: outcome for outcome in heard[0]}
    assert list(found) == sorted(found)
    for ticket in tickets:
        own = [rank[ticket] for rank in owns]
        done = [outcome for outcome in own if outcome is not None]
        if len(done) < len(own):
            assert ticket not in found
            continue
        agreed = found[ticket]
        lost = [outcome.lost for outcome in done if outcome.lost is not None]
        assert agreed.is_ok == (not lost)
        assert agreed.bytes == max(outcome.bytes for outcome in done)
        slowest = max(outcome.seconds for outcome in done)
        assert agreed.seconds == pytest.approx(slowest, abs=1e-6)
        if agreed.lost is not None:
            first = min(each.bundle for each in lost)
            assert agreed.lost.bundle == first
            at_first = [each for each in lost if each.bundle == first]
            reasons = {each.failure.reason for each in at_first}
            assert agreed.lost.failure.reason in reasons


def test_one_rank_agrees_with_itself() -> None:
    lost = Lost(2, Failure(Reason.TORN))
    own = {1: None, 2: Outcome(2, None, 5, 0.25), 3: Outcome(3, lost, 0, 0.5)}
    assert agree(own, lambda values: values) == [own[2], own[3]]
