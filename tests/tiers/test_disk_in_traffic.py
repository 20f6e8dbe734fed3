# SPDX-License-Identifier: Apache-2.0
"""The disk's books under random traffic, and what is pinned there."""

from __future__ import annotations

import random
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import pytest

from hybrid_plugin.core.tiers.host_plan import HostPlan
from hybrid_plugin.core.tiers.outer_tier import StoredBundle
from hybrid_plugin.tiers import pins
from hybrid_plugin.tiers.bundle import Layouts
from hybrid_plugin.tiers.disk import DiskTier
from tests.core.support import Tokens
from tests.tiers.real_tier import EPISODES, KINDS, TierTraffic, file_of, missing
from tests.tiers.support import IDENTITY

FILE_BYTES = 4_500
"""A little more than those of the smallest file."""


def make_disk(plan: HostPlan, layouts: Mapping[str, Layouts], rate: float) -> DiskTier:
    """A disk that is mostly short of room."""
    count = 2 + plan.blocks % 17
    return DiskTier([], count * FILE_BYTES, IDENTITY, layouts, rate)


class Holders:
    """Pins paths at random, and sees that they stay."""

    def __init__(self, traffic: TierTraffic[DiskTier], seed: int) -> None:
        self.traffic = traffic
        self.tier = traffic.tier
        self.rng = random.Random(seed)
        self.held: list[tuple[str, ...]] = []
        failed = self.tier.fetch_failed

        def fetch_failed(key: str, reason: str) -> Sequence[str]:
            gone = failed(key, reason)
            self.held = [
                keys for keys in self.held if not {*map(file_of, gone)} & {*keys}
            ]
            return gone

        self.tier.fetch_failed = fetch_failed  # type: ignore[method-assign]

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
        there = set(self.traffic.known())
        assert all(key in there for keys in self.held for key in keys), "it was evicted"

    def let_go(self) -> None:
        self.tier.unpin(list(self.tier._pins._counts.elements()))
        self.held.clear()


class Look:
    """What is found of sequences, and as of which version of the tier's books."""

    def __init__(self, tier: DiskTier, seen: Iterable[Tokens]) -> None:
        self.tier, self.seen = tier, list(seen)
        self.version = tier.version
        self.found = [_found(tier, tokens) for tokens in self.seen]

    def check(self) -> None:
        """The same is found still, or the version says that it is not."""
        same = self.found == [_found(self.tier, tokens) for tokens in self.seen]
        assert same or self.tier.version > self.version, "nobody hears of it"


def _found(tier: DiskTier, tokens: Tokens) -> list[StoredBundle]:
    return list(tier.find(None, array("q", tokens), len(tokens)))


def run(kind: str, seed: int, totals: Counter[str]) -> None:
    """Traffic of a seed; counts what it did."""
    traffic = TierTraffic(kind, seed, make_disk)
    tier, seen = traffic.tier, traffic.traffic.seen
    holders, before = Holders(traffic, seed), Look(tier, seen)
    for _ in traffic.operate():
        assert tier.used_bytes <= tier._budget, f"seed {seed}"
        holders.check()
        totals["pinned"] += bool(holders.held)
        before.check()
        seen = traffic.traffic.seen
        holders.operate(seen)
        before = Look(tier, seen)
    holders.let_go()
    traffic.drain(totals)


@pytest.mark.parametrize("kind", KINDS)
def test_traffic(kind: str) -> None:
    totals: Counter[str] = Counter()
    for seed in range(EPISODES):
        run(kind, seed, totals)
    assert totals["pinned"] > EPISODES
    assert not missing(totals), f"the traffic exercises too little: {totals}"


def test_a_tier_that_evicts_what_is_pinned_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pins.Pins, "kept", {})
    monkeypatch.setattr(pins.Pins, "kept_bytes", 0)
    with pytest.raises(AssertionError, match="it was evicted"):
        for seed in range(EPISODES):
            run("fixed", seed, Counter())
