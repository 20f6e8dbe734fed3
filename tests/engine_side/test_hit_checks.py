# SPDX-License-Identifier: Apache-2.0
"""Which requests are checked, and what counts as a difference."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hybrid_plugin.core.stats import CacheStats
from hybrid_plugin.engine.hit_checks import (
    BOUND,
    MOST_WAITING,
    HitChecks,
    Run,
    apart,
    report,
)

SAME = {7: -0.1, 8: -2.5, 9: -4.0}
NEAR = {7: -0.3, 8: -2.0, 5: -4.0}
OTHER = {3: -0.1, 4: -2.6, 5: -4.1}


def checks(fraction: float = 1.0) -> HitChecks[str]:
    return HitChecks(fraction, CacheStats())


def counted(of: HitChecks[str]) -> tuple[int, int]:
    return of._stats.hit_checks, of._stats.hit_checks_failed


def test_only_hits_are_checked() -> None:
    of = checks()
    of.offer("cold", 0, 90)
    assert not of.is_waiting
    of.offer("warm", 64, 90)
    assert of.is_waiting
    check = of.begin()
    assert (check.request, check.hit, check.length) == ("warm", 64, 90)
    assert not of.is_waiting, "one at a time"


def test_the_share_of_requests_is_the_fraction() -> None:
    of, taken = checks(0.25), []
    for number in range(2_000):
        of.offer(f"{number}", 64, 90)
        if of.is_waiting:
            of.begin()
            of.drop()
            taken.append(number)
    assert 400 < len(taken) < 600
    every_fourth = [sum(n % 4 == i for n in taken) for i in range(4)]
    assert min(every_fourth) > 50, "of traffic that repeats itself, each is checked"
    assert counted(of) == (0, 0)


def test_ranks_choose_the_same() -> None:
    one, other = checks(0.5), checks(0.5)
    for number in range(50):
        one.offer(f"{number}", 64, 90)
        other.offer(f"{number}", 64, 90)
        assert one.is_waiting == other.is_waiting
        for of in (one, other):
            if of.is_waiting:
                of.begin()
                of.drop()


def test_few_wait() -> None:
    of = checks()
    for number in range(3 * MOST_WAITING):
        of.offer(f"{number}", 64, 90)
    begun = []
    while of.is_waiting:
        begun.append(of.begin().request)
        of.drop()
    assert begun == [f"{number}" for number in range(MOST_WAITING)]


def test_equal_runs_are_in_order() -> None:
    of = checks()
    of.offer("warm", 64, 90)
    of.begin()
    assert of.take(Run.COMPUTED, 0, SAME) is None
    verdict = of.take(Run.RESTORED, 64, NEAR)
    assert verdict is not None and verdict.is_ok and verdict.nats == pytest.approx(0.2)
    assert counted(of) == (1, 0)
    assert of.running is None


def test_another_token_is_a_difference() -> None:
    of = checks()
    of.offer("warm", 64, 90)
    check = of.begin()
    of.take(Run.RESTORED, 64, OTHER)
    verdict = of.take(Run.COMPUTED, 0, SAME)
    assert verdict is not None and not verdict.is_ok
    assert counted(of) == (1, 1)
    said = report(check, [1, 2, 3], verdict)
    assert "a hit of 64 of 90 tokens gave other log probabilities" in said
    path = Path(said.split()[-4])
    found = json.loads(path.read_text())
    assert path.stat().st_mode & 0o777 == 0o600
    path.unlink()
    assert found["tokens"] == [1, 2, 3] and found["hit"] == 64
    assert found["restored_logprobs"] == {"3": -0.1, "4": -2.6, "5": -4.1}


def test_a_hit_that_is_gone_says_nothing() -> None:
    of = checks()
    of.offer("warm", 64, 90)
    of.begin()
    assert of.take(Run.RESTORED, 32, OTHER) is None
    assert of.take(Run.COMPUTED, 0, SAME) is None
    assert counted(of) == (0, 0)


def test_what_is_forgotten_is_not_compared() -> None:
    """Between two runs of a check weights may be updated, and then all is flushed."""
    of = checks()
    for name in ("warm", "other"):
        of.offer(name, 64, 90)
    of.begin()
    assert of.take(Run.RESTORED, 64, OTHER) is None
    of.void()
    assert of.take(Run.COMPUTED, 0, SAME) is None
    assert counted(of) == (0, 0)
    assert not of.is_waiting and of.running is None


def test_what_was_not_begun_is_an_error() -> None:
    with pytest.raises(ValueError, match="no check runs"):
        checks().take(Run.RESTORED, 64, SAME)


@pytest.mark.parametrize(
    ("one", "other", "nats"),
    [
        (SAME, SAME, 0.0),
        (SAME, NEAR, 0.2),
        # 3 is listed by one of them, so it has at most -4.0 in the other.
        (SAME, OTHER, 4.0),
        ({1: -0.5}, {1: -0.5 - BOUND}, BOUND),
        # The other way round counts as well.
        ({1: -1.0, 2: -1.1}, {2: -0.2, 1: -1.6}, 0.9),
    ],
)
def test_how_far_two_runs_are_apart(
    one: dict[int, float], other: dict[int, float], nats: float
) -> None:
    assert apart(one, other) == pytest.approx(nats)
    assert apart(other, one) == pytest.approx(nats)
