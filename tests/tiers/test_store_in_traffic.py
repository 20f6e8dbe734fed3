# SPDX-License-Identifier: Apache-2.0
"""The store's books under random traffic, with ranks that are late and fail.

The checks are those of `tests/core/test_outer_traffic.py`, the tier is the real one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from hybrid_plugin.core.cache import HybridCache
from hybrid_plugin.core.commands import Pool
from hybrid_plugin.core.tiers.outer_tier import OuterTier
from hybrid_plugin.tiers.bundle import Layouts
from hybrid_plugin.tiers.keys import BundleName
from hybrid_plugin.tiers.store.directory import Found
from hybrid_plugin.tiers.store.tier import StoreTier
from tests.core.profiles import SOAK_FACTOR
from tests.core.test_outer_traffic import EXERCISED, traffic_of
from tests.core.traffic import Traffic
from tests.tiers.support import IDENTITY, STATE, page_layout

EPISODES = 12 * SOAK_FACTOR
OPERATIONS = 400


class AsFiles(StoreTier):
    """By the name under which the fake ranks know what keeps bundles."""

    name = "disk"


class InStore(HybridCache):
    """A cache with the real tier in the place of the fake one."""

    def use_tiers(self, tiers: Sequence[OuterTier]) -> None:
        assert self.host is not None
        rates = [tier.read_bytes_per_second for tier in tiers]
        pages = [pool for pool in self.host.plan.row_bytes if pool != Pool.STATE]
        layouts = Layouts(
            {pool: page_layout(self.page_size) for pool in pages},
            STATE if self.slots.needed else None,
        )
        store = AsFiles(IDENTITY, {IDENTITY.rank_name: layouts}, rates[0])
        HybridCache.use_tiers(self, [store])


def file_of(key: str) -> str:
    return BundleName.from_text(key).key


def in_store(kind: str, seed: int, page_size: int) -> Traffic:
    """Traffic with a store, whose bundles are called as they are there."""
    traffic = traffic_of(kind, seed, page_size, InStore)
    assert traffic.engine.ranks is not None
    traffic.engine.ranks.file_of = file_of
    traffic.engine.check_files = lambda: check_files(traffic)  # type: ignore[method-assign]
    return traffic


def check_files(traffic: Traffic) -> None:
    """With nothing left to do, there are the bundles that the tier knows of."""
    (tier,), ranks = traffic.engine.cache.tiers, traffic.engine.ranks
    assert isinstance(tier, StoreTier) and ranks is not None
    assert not tier._pending and not ranks.reports
    known = {entry.name.key for entry in tier._index.oldest()}
    assert known == set(ranks.files), "bundles leak, or are missing"


def run(kind: str, seed: int, totals: Counter[str]) -> None:
    """Traffic of a seed; counts what it did."""
    traffic = in_store(kind, seed, (1, 4, 16)[seed % 3])
    (tier,) = traffic.engine.cache.tiers
    assert isinstance(tier, StoreTier)
    traffic.engine.watch_refusals = False
    for number in range(OPERATIONS):
        traffic.operate()
        if number % 20 == 0:  # another look-up says what is known
            usable = [one for one in tier._index.oldest() if one.is_usable]
            before = [one.name.key for one in tier._index.oldest()]
            tier.learn(Found(tuple(usable), ()))
            assert sorted(before) == sorted(e.name.key for e in tier._index.oldest())
        listed = [entry.name.key for entry, is_there in tier.news if is_there]
        totals["listed"] += len(listed)
        tier.news.clear()
    traffic.engine.check()
    traffic.drain()
    totals.update(tier.stats.as_dict("disk"))


@pytest.mark.parametrize("kind", ["fixed", "elastic windows"])
def test_the_books_are_those_of_the_store(kind: str) -> None:
    totals: Counter[str] = Counter()
    for seed in range(EPISODES):
        run(kind, seed, totals)
    assert totals["listed"] > 0
    wanted = {*EXERCISED} - {"stores_refused"}  # a store always has room
    missing = [name for name in wanted if not totals[f"disk_{name}"]]
    assert not missing, f"the traffic exercises too little: {totals}"
