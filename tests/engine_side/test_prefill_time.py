# SPDX-License-Identifier: Apache-2.0
"""What forward passes say about the time of a token's prefill."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid_plugin.device import pass_timer
from hybrid_plugin.device.pass_timer import PassTimer
from hybrid_plugin.engine.prefill_time import REMEMBERED_PASSES, PrefillTime


@given(
    rate=st.floats(1e-7, 1e-2),
    passes=st.lists(st.integers(1, 1 << 20), min_size=1, max_size=80),
    slow=st.integers(0, REMEMBERED_PASSES // 2 - 1),
)
def test_passes_of_any_length_give_the_rate_and_some_slow_ones_change_nothing(
    rate: float, passes: list[int], slow: int
) -> None:
    measured = PrefillTime(pass_tokens=64)
    for tokens in [64] * REMEMBERED_PASSES + passes:
        measured.observe(tokens, rate * (tokens + 64))
    for number in range(slow):
        measured.observe((8, 100)[number % 2], 10.0)
    assert measured.token_seconds == pytest.approx(rate)


@given(
    rate=st.floats(1e-7, 1e-2),
    passes=st.lists(st.integers(1, 63), min_size=1, max_size=80),
    slow=st.integers(0, REMEMBERED_PASSES - 1),
)
def test_passes_of_few_tokens_say_what_a_token_takes_at_most(
    rate: float, passes: list[int], slow: int
) -> None:
    measured = PrefillTime(pass_tokens=64)
    for tokens in passes:
        measured.observe(tokens, rate * (tokens + 64))
    for _ in range(slow):
        measured.observe(1, 10.0)
    assert measured.token_seconds is not None
    assert measured.token_seconds >= rate * (1 + 64 / 63) * (1 - 1e-9)
    last = passes[-1]  # those before it may be forgotten
    assert measured.token_seconds <= rate * (last + 64) / last * (1 + 1e-9)
    measured.observe(64, rate * 128)
    assert measured.token_seconds == pytest.approx(rate)


def test_what_says_nothing_does_not_count() -> None:
    measured = PrefillTime(pass_tokens=64)
    assert measured.token_seconds is None
    measured.observe(0, 1.0)
    measured.observe(5, 0.0)
    assert measured.token_seconds is None


def test_a_timer_gives_each_pass_once_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = iter([1.0, 1.5, 2.0, 2.125])
    monkeypatch.setattr(pass_timer.time, "perf_counter", lambda: next(now))
    timer = PassTimer(torch.device("cpu"))
    with pytest.raises(RuntimeError, match="no pass was begun"):
        timer.end(1)
    for tokens in (7, 9):
        timer.begin()
        timer.end(tokens)
    assert list(timer.finished()) == [(7, 0.5), (9, 0.125)]
    assert list(timer.finished()) == []


def test_passes_that_still_run_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    over: set[int] = set()
    made: list[object] = []

    class Moment:
        def __init__(self) -> None:
            self.number = len(made)
            made.append(self)

        def query(self) -> bool:
            return self.number in over

        def elapsed_time(self, later: Moment) -> float:
            return 1000.0 * (later.number - self.number)

    monkeypatch.setattr(pass_timer, "_HostMoment", Moment)
    timer = PassTimer(torch.device("cpu"))
    for tokens in (7, 9):
        timer.begin()
        timer.end(tokens)
    assert list(timer.finished()) == []
    over.add(3)  # the second has not ended before the first
    assert list(timer.finished()) == []
    over.add(1)
    assert list(timer.finished()) == [(7, 1.0), (9, 1.0)]
