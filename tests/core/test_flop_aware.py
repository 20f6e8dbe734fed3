# SPDX-License-Identifier: Apache-2.0
"""Recency weighed with what a snapshot saves: exact orders."""

from __future__ import annotations

import math

import pytest

from hybrid_plugin.core.eviction import FlopAware, LeastRecentlyUsed
from hybrid_plugin.core.node import ADMISSION, Node
from hybrid_plugin.core.radix import MambaRadixCache
from tests.core.audit import audit_orders
from tests.core.test_radix import put, snap
from tests.core.test_radix_eviction import evict_all, ids

LIFETIME = 50
"""Admissions that a snapshot is taken to last before any was evicted."""


def tree_of(policy: LeastRecentlyUsed) -> MambaRadixCache:
    return MambaRadixCache(1, eviction=policy)


def keep(tree: MambaRadixCache, text: str, page: int, slot: int) -> Node:
    """One admission later, a path with a snapshot at its end."""
    tree.begin_admission()
    node, _ = put(tree, text, page)
    snap(tree, node, slot)
    return node


def idle(tree: MambaRadixCache, admissions: int) -> None:
    for _ in range(admissions):
        tree.begin_admission()


def slots(tree: MambaRadixCache) -> list[int]:
    """Slots in the order in which snapshots are evicted."""
    order = []
    while tree.next_snapshot() is not None:
        audit_orders(tree)
        slot = ids(tree.evict_snapshot())[1]
        assert slot is not None
        order.append(slot)
    return order


class TestSnapshots:
    def test_what_saves_more_stays_longer(self) -> None:
        tree = tree_of(FlopAware(float, alpha=1.0))
        keep(tree, "abcdefgh", 10, slot=1)  # saves 8, worth 50 x log 8 = 104
        keep(tree, "xy", 20, slot=2)  # saves 2, worth 50 x log 2 = 35
        idle(tree, 30)
        keep(tree, "z", 30, slot=3)  # saves 1, worth 0
        assert slots(tree) == [3, 2, 1]

    def test_recency_counts_too(self) -> None:
        """Between slots 1 and 2 lie 50 x (log 8 - log 2) = 69.3 admissions."""
        for later, order in ((69, [2, 1]), (71, [1, 2])):
            tree = tree_of(FlopAware(float, alpha=1.0))
            keep(tree, "abcdefgh", 10, slot=1)
            idle(tree, later - 1)
            keep(tree, "xy", 20, slot=2)
            assert slots(tree) == order

    def test_a_snapshot_saves_only_from_the_one_before_it(self) -> None:
        tree = tree_of(FlopAware(float, alpha=1.0))
        keep(tree, "abcdefg", 10, slot=1)
        keep(tree, "abcdefgh", 20, slot=2)  # saves one token more
        keep(tree, "xyz", 30, slot=3)
        assert slots(tree) == [2, 3, 1]

    def test_its_worth_grows_when_the_one_before_it_goes(self) -> None:
        tree = tree_of(FlopAware(float, alpha=1.0))
        first = keep(tree, "abcdefg", 10, slot=1)
        keep(tree, "abcdefgh", 20, slot=2)
        keep(tree, "xyz", 30, slot=3)
        tree.detach_snapshot(first)
        assert slots(tree) == [3, 2]

    def test_the_cost_may_be_any_growing_function(self) -> None:
        def dear_start(tokens: float) -> float:
            return min(tokens, 2.0) + 0.001 * tokens

        tree = tree_of(FlopAware(dear_start, alpha=1.0))
        keep(tree, "xy", 20, slot=1)
        keep(tree, "abcdefgh", 10, slot=2)
        assert slots(tree) == [1, 2]

    def test_no_weight_is_plain_recency(self) -> None:
        plain, flop = tree_of(LeastRecentlyUsed()), tree_of(FlopAware(float, alpha=0))
        for tree in (plain, flop):
            keep(tree, "abcdefgh", 10, slot=1)
            keep(tree, "xy", 20, slot=2)
            used = keep(tree, "z", 30, slot=3)
            keep(tree, "uvw", 40, slot=4)
            tree.use_snapshot(used)
        assert slots(plain) == slots(flop) == [1, 2, 4, 3]

    def test_a_superseded_one_goes_first(self) -> None:
        tree = tree_of(FlopAware(float, alpha=1.0))
        keep(tree, "xy", 20, slot=1)
        long = keep(tree, "abcdefgh", 10, slot=2)
        tree.supersede_snapshot(long)
        assert slots(tree) == [2, 1]


class TestLeaves:
    def test_kv_without_a_snapshot_goes_first(self) -> None:
        tree = tree_of(FlopAware(float))
        keep(tree, "ab", 10, slot=1)
        idle(tree, 1000)
        put(tree, "cd", 20)
        assert evict_all(tree) == [(20, 21), (10, 11)]

    def test_of_equal_ones_the_least_recently_used(self) -> None:
        tree = tree_of(FlopAware(float))
        put(tree, "ab", 10)
        put(tree, "cd", 20)
        keep(tree, "ef", 30, slot=1)
        keep(tree, "gh", 40, slot=2)
        assert evict_all(tree) == [(10, 11), (20, 21), (30, 31), (40, 41)]


class TestLifetime:
    def test_follows_the_ages_of_what_is_evicted(self) -> None:
        """With lifetimes of a few admissions the same saving is worth less."""
        policy = FlopAware(float, alpha=1.0)
        tree = tree_of(policy)
        for page in range(400):
            keep(tree, "q", page, slot=1)
            idle(tree, 2)
            tree.evict_snapshot()
        node = keep(tree, "ab", 900, slot=2)
        assert node.snapshot is not None
        worth = policy.snapshot(node, node.snapshot) - node.snapshot.used_at
        assert worth / ADMISSION == pytest.approx(2 * math.log(2), rel=0.01)

    def test_before_any_was_evicted(self) -> None:
        policy = FlopAware(float, alpha=0.5)
        node = keep(tree_of(policy), "ab", 10, slot=1)
        assert node.snapshot is not None
        worth = policy.snapshot(node, node.snapshot) - node.snapshot.used_at
        assert worth / ADMISSION == pytest.approx(LIFETIME / 2 * math.log(2))


def test_ranking_again_applies_another_weight() -> None:
    policy = FlopAware(float, alpha=0.0)
    tree = tree_of(policy)
    long = keep(tree, "abcdefgh", 10, slot=1)
    short = keep(tree, "xy", 20, slot=2)
    assert list(tree.snapshots()) == [long, short]
    policy.alpha = 1.0
    tree.rank_again()
    audit_orders(tree)
    assert list(tree.snapshots()) == [short, long]
    policy.alpha = 0.0
    tree.rank_again()
    assert list(tree.snapshots()) == [long, short]
