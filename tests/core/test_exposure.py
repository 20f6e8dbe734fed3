# SPDX-License-Identifier: Apache-2.0
"""How long content was there, counted in groups, against counting each piece."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_plugin.core.policy.exposure import (
    INTERVALS,
    Exposure,
    interval_of,
    interval_start,
    next_step,
)


def test_intervals_double() -> None:
    assert [interval_of(age) for age in (0, 1, 2, 3, 4, 7, 8)] == [0, 1, 2, 2, 3, 3, 4]
    assert interval_of(1 << 60) == INTERVALS - 1
    for index in range(INTERVALS):
        assert interval_of(interval_start(index)) == index


def test_steps_are_an_eighth_at_most() -> None:
    steps = [0]
    while steps[-1] < 40:
        steps.append(next_step(steps[-1]))
    assert steps == [*range(16), *range(16, 32, 2), *range(32, 41, 4)]
    assert next_step(17) == 18
    for age in (100, 1000, 123456):
        assert age < next_step(age) <= age * 9 / 8


def test_one_piece() -> None:
    exposure = Exposure()
    group = exposure.enter(10, 10)
    exposure.collect(13)
    assert exposure.held[:4] == [1, 1, 0, 0], "age 2 belongs to an interval not over"
    exposure.collect(14)
    assert exposure.held[:4] == [1, 1, 2, 0]
    exposure.leave(group, 20)
    assert exposure.held[:6] == [1, 1, 2, 4, 2, 0]
    exposure.collect(1000)
    assert sum(exposure.held) == 10
    assert len(exposure) == 0


def test_what_was_there_before_it_is_observed_is_not_counted() -> None:
    exposure = Exposure()
    group = exposure.enter(0, 8)
    exposure.leave(group, 12)
    assert exposure.held[interval_of(8)] == sum(exposure.held) == 4


def test_groups_stay_few() -> None:
    exposure = Exposure()
    for now in range(20_000):
        exposure.enter(now, now)
    assert len(exposure) == 20_000
    assert len(exposure._groups) < 200
    for group in list(exposure._groups):
        for _ in range(group.count):
            exposure.leave(group.start, 20_000)
    assert sum(exposure.held) == 20_000 * 20_001 / 2


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["enter", "enter old", "leave", "wait"]),
            st.integers(0, 60),
        ),
        max_size=150,
    )
)
def test_the_sum_is_exact_and_ages_are_about_right(
    steps: list[tuple[str, int]],
) -> None:
    exposure, now = Exposure(), 0
    there: list[tuple[int, int]] = []
    expected = 0.0
    ages = weighted = 0.0
    for action, number in steps:
        passed = number if action == "wait" else number % 3
        for _ in range(passed):
            expected += len(there)
            for since, _ in there:
                weighted += now - since + 1
            now += 1
        if action == "leave" and there:
            _, group = there.pop(number % len(there))
            exposure.leave(group, now)
        elif action.startswith("enter"):
            since = now if action == "enter" else now * (number % 5) // 5
            there.append((since, exposure.enter(since, now)))
        assert len(exposure) == len(there)
        starts = [group.start for group in exposure._groups]
        assert starts == sorted(set(starts))
        assert all(group.count >= 0 for group in exposure._groups)
        if number % 7 == 0:
            exposure.collect(now)
    for _, group in there:
        exposure.leave(group, now)
    assert sum(exposure.held) == expected
    for index, held in enumerate(exposure.held):
        ages += held * (interval_start(index) + 1)
    # An interval's start is half an age at least, and ages in a group differ little.
    assert weighted / 2.3 <= ages <= 1.2 * weighted
