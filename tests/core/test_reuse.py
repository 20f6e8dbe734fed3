# SPDX-License-Identifier: Apache-2.0
"""What is learned of reuse from uses and evictions."""

from __future__ import annotations

import pytest

from hybrid_plugin.core.policy.reuse import REMEMBERED, ReuseModel


def model(assumed: float = 0.5) -> ReuseModel:
    return ReuseModel(lambda kind: assumed)


def see(reuse: ReuseModel, kind: str, age: int, now: int, *, used: bool) -> None:
    """Content of a class that is used, or evicted, at an age."""
    group = reuse.enter(kind, now, now)
    reuse.leave(kind, group, now + age)
    reuse.observe(kind, age, now + age, used=used)


def test_before_anything_was_seen() -> None:
    reuse = model(0.5)
    assert reuse.chance("a") == pytest.approx(0.5, abs=0.05)
    rates = [reuse.rate("a", age) for age in (2, 4, 8, 16, 32)]
    assert rates == sorted(rates, reverse=True), "the longer unused, the less likely"
    at_once = reuse.rate("a", 0)
    assert 0.9 * rates[0] < at_once < rates[0], "it may take a while to be used"


def test_what_is_never_used_is_worth_less_each_time() -> None:
    reuse = model()
    rates, chances = [], []
    for now in range(0, 200, 20):
        rates.append(reuse.rate("turn", 0))
        chances.append(reuse.chance("turn"))
        for _ in range(8):
            see(reuse, "turn", 20, now, used=False)
    assert rates == sorted(rates, reverse=True)
    assert chances == sorted(chances, reverse=True)
    assert rates[-1] < rates[0] / 20
    assert chances[-1] < 0.1


def test_the_rate_of_what_is_used_at_a_constant_rate() -> None:
    """Used after 10 admissions on average, whatever its age."""
    reuse = model()
    ages = [3, 5, 8, 10, 14, 20]
    for now in range(200):
        see(reuse, "doc", ages[now % 6], now, used=True)
    for age in (0, 1, 4):
        assert reuse.rate("doc", age) == pytest.approx(0.1, rel=0.4)
    assert reuse.chance("doc") > 0.95


def test_it_looks_ahead() -> None:
    """Nothing is used within 8 admissions, nearly all within 16."""
    reuse = model()
    for now in range(200):
        see(reuse, "tool call", 12, now, used=True)
    assert reuse.rate("tool call", 0) > 0.05
    assert reuse.rate("tool call", 8) > reuse.rate("tool call", 0)
    assert reuse.rate("tool call", 64) < reuse.rate("tool call", 0)


def test_within_an_interval_the_older_is_worth_less() -> None:
    """As many uses come in each interval, and most content is never used."""
    reuse = model()
    for now in range(2000):
        see(reuse, "chat", 1 << now % 7, now, used=True)
        for _ in range(3):
            see(reuse, "chat", 128, now, used=False)
    rates = [reuse.rate("chat", age) for age in range(4, 25)]
    assert rates == sorted(rates, reverse=True)
    assert len(set(rates)) == len(rates)
    assert reuse.rate("chat", 8) == pytest.approx(2 * reuse.rate("chat", 16), rel=0.2)


def test_what_was_evicted_early_does_not_count_as_useless() -> None:
    """Half is evicted at age 4, and of the rest all is used at age 9."""
    reuse = model()
    for now in range(200):
        see(reuse, "a", 9, now, used=True)
        see(reuse, "a", 4, now, used=False)
    assert reuse.chance("a") > 0.9


def test_young_content_that_goes_unused_says_little_about_later_ages() -> None:
    """Where many requests run at once, no conversation goes on within a few of them."""
    reuse = model()
    fresh = reuse.rate("fresh", 16)
    for now in range(80):
        see(reuse, "a", 6, now, used=False)
    assert reuse.rate("a", 16) > fresh / 5


def test_a_class_of_which_nothing_comes_or_goes_is_seen_unused() -> None:
    reuse = model()
    for _ in range(4):
        reuse.enter("a", 0, 0)
    fresh = reuse.rate("a", 128)
    for now in range(130):
        see(reuse, "other", 1, now, used=True)
    assert reuse.rate("a", 128) < fresh / 4


def test_classes_are_apart() -> None:
    reuse = model()
    for now in range(100):
        see(reuse, "a", 3, now, used=True)
        see(reuse, "b", 3, now, used=False)
    assert reuse.rate("a", 0) > 20 * reuse.rate("b", 0)


def test_it_forgets() -> None:
    """What is no longer seen goes back to what was assumed: so it is tried again."""
    reuse = model(0.5)
    for now in range(100):
        see(reuse, "a", 16, now, used=False)
    low = reuse.chance("a")
    see(reuse, "a", 0, 100 + 8 * REMEMBERED, used=False)
    for _ in range(8):
        see(reuse, "a", 0, 100 + 8 * REMEMBERED, used=False)
    assert low < 0.1 < 0.3 < reuse.chance("a")


def test_every_rate_is_finite_and_positive() -> None:
    reuse = model(0.01)
    for now in range(300):
        see(reuse, "a", (1 << (now % 40)) - 1, now * 1000, used=now % 3 == 0)
        for age in (0, 1, 5, 1 << 30):
            assert 0 < reuse.rate("a", age) < 10
        assert 0 < reuse.chance("a") <= 1


def test_what_stays_unused_is_seen_before_it_leaves() -> None:
    reuse = model()
    before = reuse.rate("a", 0)
    for now in range(200):
        reuse.enter("a", now, now)
    assert reuse.rate("a", 0) < before / 10


def test_rates_do_not_change_while_hardly_anything_is_seen() -> None:
    """Computing them takes long, and an eighth more evidence says nothing new."""
    reuse = model()
    for now in range(2000):
        see(reuse, "a", 3, now, used=True)
    chances = set()
    for now in range(2000, 4000):
        see(reuse, "a", 3, now, used=now % 2 == 0)
        chances.add(reuse.chance("a"))
    assert 4 < len(chances) < 40
