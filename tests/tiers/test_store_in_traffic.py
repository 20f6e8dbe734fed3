# SPDX-License-Identifier: Apache-2.0
"""The store's books under random traffic, and what other look-ups tell of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import pytest

from hybrid_plugin.core.tiers.host_plan import HostPlan
from hybrid_plugin.tiers.bundle import Layouts
from hybrid_plugin.tiers.store.directory import Found
from hybrid_plugin.tiers.store.tier import StoreTier
from tests.tiers.real_tier import EPISODES, KINDS, TierTraffic, missing
from tests.tiers.support import IDENTITY


class AsFiles(StoreTier):
    """By the name under which the fake ranks know what keeps bundles."""

    name = "disk"


def make_store(_: HostPlan, layouts: Mapping[str, Layouts], rate: float) -> StoreTier:
    """A store, which always has room."""
    return AsFiles(IDENTITY, layouts, rate)


def run(kind: str, seed: int, totals: Counter[str]) -> None:
    """Traffic of a seed; counts what it did."""
    traffic = TierTraffic(kind, seed, make_store)
    tier = traffic.tier
    for number in traffic.operate():
        if number % 20 == 0:  # another look-up says what is known
            usable = [one for one in tier._index.oldest() if one.is_usable]
            before = traffic.known()
            tier.learn(Found(tuple(usable), ()))
            assert sorted(before) == sorted(traffic.known())
        totals["listed"] += sum(is_there for _, is_there in tier.news)
        tier.news.clear()
    traffic.drain(totals)


@pytest.mark.parametrize("kind", KINDS)
def test_the_books_are_those_of_the_store(kind: str) -> None:
    totals: Counter[str] = Counter()
    for seed in range(EPISODES):
        run(kind, seed, totals)
    assert totals["listed"] > 0
    lacks = missing(totals, never=("stores_refused",))
    assert not lacks, f"the traffic exercises too little: {totals}"
