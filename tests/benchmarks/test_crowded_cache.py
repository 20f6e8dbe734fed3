# SPDX-License-Identifier: Apache-2.0
"""The replay of crowds without an engine serves all, and restores what is shared."""

from __future__ import annotations

import pytest

from benchmarks.crowded_cache import make_cache, replay, table


@pytest.mark.parametrize("elastic", [False, True], ids=["fixed", "elastic"])
def test_branches_are_restored(elastic: bool) -> None:
    cache = make_cache("nemotron-h-8b", 4 << 30, elastic=elastic, waits=True)
    found = replay(cache, "branches", 1)
    assert 0.6 < found["restored"] < 0.8
    assert found["steps"] > 24 / 4 * 32
    assert cache.live == 0
    assert found["cost"] > found["steps"] * 0.512
    row = {"model": "m", "GiB": 4, "workload": "w", "pools": "p", "waiting": "yes"}
    row |= {"sharing": "yes"}
    assert f"| {found['restored']:.1%} | {found['steps']} |" in table([row | found])


@pytest.mark.parametrize("elastic", [False, True], ids=["fixed", "elastic"])
def test_waiting_for_memory_can_be_switched_off(elastic: bool) -> None:
    """It once could not, and the rows without it were those with it."""
    found = [
        replay(
            make_cache("nemotron-h-8b", 5 << 30, elastic=elastic, waits=waits),
            "shuffled groups",
            1,
        )
        for waits in (True, False)
    ]
    assert found[0]["restored"] > found[1]["restored"]
    assert found[0]["cost"] < found[1]["cost"]
