# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from hybrid_plugin.core.policy.divergence import REMEMBERED, Divergences


def test_three_quarters_before_anything_was_seen() -> None:
    assert Divergences().best_position(1000) == 750


def test_where_prompts_part_most_often() -> None:
    seen = Divergences()
    for _ in range(10):
        seen.observe(100)
    assert seen.best_position(1000) == 900
    assert seen.best_position(5000) == 4900


def test_a_nearer_position_serves_those_that_part_later_too() -> None:
    seen = Divergences()
    for distance in [400] * 10 + [100] * 10:
        seen.observe(distance)
    assert seen.best_position(1000) == 600, "20 of them save 600, 10 would save 900"
    assert seen.best_position(600) == 500, "200 for all is less than 500 for half"


def test_what_is_long_ago_is_forgotten() -> None:
    seen = Divergences()
    for _ in range(REMEMBERED):
        seen.observe(400)
    for _ in range(REMEMBERED):
        seen.observe(100)
    assert seen.best_position(1000) == 900


def test_distances_longer_than_the_prompt_do_not_count() -> None:
    seen = Divergences()
    for _ in range(10):
        seen.observe(5000)
    assert seen.best_position(1000) == 750
