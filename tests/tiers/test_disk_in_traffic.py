# SPDX-License-Identifier: Apache-2.0
"""The disk's books under random traffic, with ranks that are late and fail.

The checks are those of `tests/core/test_outer_traffic.py`, the tier is the real one.
"""

from __future__ import annotations

import random
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence

import pytest

from hybrid_plugin.core.cache import HybridCache
from hybrid_plugin.core.commands import Pool
from hybrid_plugin.core.tiers.outer_tier import OuterTier, StoredBundle
from hybrid_plugin.tiers.bundle import Layouts
from hybrid_plugin.tiers.disk import DiskTier
from hybrid_plugin.tiers.index import Entry
from hybrid_plugin.tiers.keys import BundleName
from tests.core.profiles import SOAK_FACTOR
from tests.core.support import Tokens
from tests.core.test_outer_traffic import EXERCISED, traffic_of
from tests.core.traffic import Traffic
from tests.tiers.support import IDENTITY, STATE, page_layout

EPISODES = 12 * SOAK_FACTOR
OPERATIONS = 400
FILE_BYTES = 4_500
"""A little more than those of the smallest file."""


class OnDisk(HybridCache):
    """A cache with the real tier in the place of the fake one."""

    def use_tiers(self, tiers: Sequence[OuterTier]) -> None:
        assert self.host is not None
        rates = [tier.read_bytes_per_second for tier in tiers]
        pages = [pool for pool in self.host.plan.row_bytes if pool != Pool.STATE]
        layouts = Layouts(
            {pool: page_layout(self.page_size) for pool in pages},
            STATE if self.slots.needed else None,
        )
        count = 2 + self.host.plan.blocks % 17
        rank = {IDENTITY.rank_name: layouts}
        disk = DiskTier([], count * FILE_BYTES, IDENTITY, rank, rates[0])
        HybridCache.use_tiers(self, [disk])


def file_of(key: str) -> str:
    return BundleName.from_text(key).key


def on_disk(kind: str, seed: int, page_size: int) -> Traffic:
    """Traffic with a disk, whose files are called as they are on disk."""
    traffic = traffic_of(kind, seed, page_size, OnDisk)
    assert traffic.engine.ranks is not None
    traffic.engine.ranks.file_of = file_of
    traffic.engine.check_files = lambda: check_files(traffic)  # type: ignore[method-assign]
    return traffic


def check_files(traffic: Traffic) -> None:
    """With nothing left to do, there are the files that the tier counts."""
    (tier,), ranks = traffic.engine.cache.tiers, traffic.engine.ranks
    assert isinstance(tier, DiskTier) and ranks is not None
    assert not tier._pending and not ranks.reports
    counted = {entry.name.key for entry in tier._index.oldest()}
    assert counted == set(ranks.files), "files leak, or are missing"


class Pins:
    """Pins paths at random, and sees that they stay."""

    def __init__(self, tier: DiskTier, seed: int) -> None:
        self.tier = tier
        self.rng = random.Random(seed)
        self.held: list[tuple[str, ...]] = []
        failed = tier.fetch_failed

        def fetch_failed(key: str, reason: str) -> Sequence[str]:
            gone = failed(key, reason)
            self.held = [
                keys for keys in self.held if not {*map(file_of, gone)} & {*keys}
            ]
            return gone

        tier.fetch_failed = fetch_failed  # type: ignore[method-assign]

    def operate(self, seen: Sequence[Tokens]) -> None:
        """Pin something, or let something go, now and then."""
        what = self.rng.random()
        if what < 0.05 and seen:
            path = _found(self.tier, self.rng.choice(seen))
            if path:
                self.held.append(tuple([file_of(one.key) for one in path]))
                self.tier.pin(self.held[-1])
        elif what < 0.08 and self.held:
            self.tier.unpin(self.held.pop(self.rng.randrange(len(self.held))))

    def check(self) -> None:
        """All that is pinned is there."""
        there = {entry.name.key for entry in self.tier._index.oldest()}
        assert all(key in there for keys in self.held for key in keys), "it was evicted"

    def let_go(self) -> None:
        self.tier._pins.clear()
        self.held.clear()


def _found(tier: DiskTier, tokens: Tokens) -> list[StoredBundle]:
    return list(tier.find(None, array("q", tokens), len(tokens)))


def run(kind: str, seed: int, totals: Counter[str]) -> None:
    """Traffic of a seed; counts what it did."""
    traffic = on_disk(kind, seed, (1, 4, 16)[seed % 3])
    (tier,) = traffic.engine.cache.tiers
    assert isinstance(tier, DiskTier)
    traffic.engine.watch_refusals = False
    pins = Pins(tier, seed)
    for _ in range(OPERATIONS):
        pins.operate(traffic.seen)
        version, seen = tier.version, list(traffic.seen)
        before = [_found(tier, tokens) for tokens in seen]
        traffic.operate()
        assert tier.used_bytes <= tier._budget, f"seed {seed}"
        pins.check()
        totals["pinned"] += bool(pins.held)
        same = before == [_found(tier, tokens) for tokens in seen]
        assert same or tier.version > version, "nobody hears of it"
    traffic.engine.check()
    pins.let_go()
    traffic.drain()
    totals.update(tier.stats.as_dict("disk"))


@pytest.mark.parametrize("kind", ["fixed", "elastic windows"])
def test_traffic(kind: str) -> None:
    totals: Counter[str] = Counter()
    for seed in range(EPISODES):
        run(kind, seed, totals)
    missing = [name for name in EXERCISED if not totals[f"disk_{name}"]]
    assert totals["pinned"] > EPISODES
    assert not missing, f"the traffic exercises too little: {totals}"


def test_a_tier_that_evicts_what_is_pinned_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = DiskTier._kept

    def broken(tier: DiskTier, before: Iterable[Entry]) -> list[Entry]:
        pins, tier._pins = tier._pins, Counter()
        try:
            return kept(tier, before)
        finally:
            tier._pins = pins

    monkeypatch.setattr(DiskTier, "_kept", broken)
    with pytest.raises(AssertionError, match="it was evicted"):
        for seed in range(EPISODES):
            run("fixed", seed, Counter())
