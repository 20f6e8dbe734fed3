# SPDX-License-Identifier: Apache-2.0
"""The replay of crowds without an engine serves all, and restores what is shared."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.crowded_cache import make_cache, replay, table


@pytest.mark.parametrize("elastic", [False, True], ids=["fixed", "elastic"])
def test_branches_are_restored(elastic: bool) -> None:
    cache = make_cache("nemotron-h-8b", 4 << 30, elastic=elastic, waits=True)
    found = asyncio.run(replay(cache, "branches", 1))
    assert 0.6 < found["restored"] < 0.8
    assert found["steps"] > 24 / 4 * 32
    assert cache.live == 0
    row = {"model": "m", "workload": "w", "pools": "p", "waiting": "yes"}
    row |= {"sharing": "yes"}
    assert f"| {found['restored']:.1%} | {found['steps']} |" in table([row | found])
