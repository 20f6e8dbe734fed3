# SPDX-License-Identifier: Apache-2.0
"""Seeded traffic, without Hypothesis's overhead: 105,000 operations in CI.

The content of the memory is checked at every read, the bookkeeping every few
operations.  A failure names its seed; `Traffic.seeded` replays it.
"""

from __future__ import annotations

import pytest

from tests.core.profiles import SOAK_FACTOR
from tests.core.traffic import Traffic

EPISODES = 25 * SOAK_FACTOR
WINDOW_EPISODES = 10 * SOAK_FACTOR
OPERATIONS = 600


@pytest.mark.parametrize("page_size", [1, 2, 4, 16, 256])
def test_traffic(page_size: int) -> None:
    totals = run(page_size, EPISODES, windows=False)
    assert all(totals.values()), f"the traffic exercises too little: {totals}"


@pytest.mark.parametrize("page_size", [1, 2, 4, 16, 256])
def test_traffic_with_windows(page_size: int) -> None:
    totals = run(page_size, WINDOW_EPISODES, windows=True)
    assert all(totals.values()), f"the traffic exercises too little: {totals}"


def run(page_size: int, episodes: int, *, windows: bool) -> dict[str, int]:
    """Run episodes; returns what happened in all of them."""
    totals = dict.fromkeys(("hit_tokens", "resumed_hit_tokens", "refusals"), 0)
    for seed in range(episodes):
        traffic = Traffic.seeded(seed, page_size, windows=windows)
        try:
            traffic.run(OPERATIONS, check_every=10)
        except AssertionError as error:
            setup = traffic.engine.setup
            raise AssertionError(f"seed {seed}, {setup}: {error}") from error
        for name in totals:
            totals[name] += getattr(traffic.engine.cache.stats, name)
    return totals
