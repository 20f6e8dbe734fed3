# SPDX-License-Identifier: Apache-2.0
"""Recency weighed with what a snapshot saves: exact orders."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from hybrid_plugin.core.policy.eviction import FlopAware, LeastRecentlyUsed
from hybrid_plugin.core.tree.node import ADMISSION, Node
from hybrid_plugin.core.tree.radix import MambaRadixCache
from tests.core.audit import audit_orders
from tests.core.test_radix import put, snap, t
from tests.core.test_radix_eviction import evict_all, ids

LIFETIME = 50
"""Admissions that a snapshot is taken to last before any was evicted."""


def by_saving(alpha: float, cost: Callable[[float], float] = float) -> FlopAware:
    """KV costs no bytes, so that only the saving counts."""
    return FlopAware(cost, token_bytes=0, slot_bytes=1, alpha=alpha)


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


def worth(policy: FlopAware, node: Node) -> float:
    """What the saving moves a snapshot by, in admissions; 0 for 4096 tokens."""
    assert node.snapshot is not None
    moved = policy.snapshot(node, node.snapshot) - node.snapshot.used_at
    return moved / ADMISSION


def slots(tree: MambaRadixCache) -> list[int]:
    """Slots in the order in which snapshots are evicted."""
    audit_orders(tree)
    order = []
    while tree.next_snapshot() is not None:
        slot = ids(tree.evict_snapshot())[1]
        assert slot is not None
        order.append(slot)
    return order


class TestSnapshots:
    def test_what_saves_more_stays_longer(self) -> None:
        tree = tree_of(by_saving(1.0))
        keep(tree, "abcdefgh", 10, slot=1)  # saves 8
        keep(tree, "xy", 20, slot=2)  # saves 2: 50 x log 4 = 69 admissions less
        idle(tree, 30)
        keep(tree, "z", 30, slot=3)  # saves 1: 35 less still
        assert slots(tree) == [3, 2, 1]

    def test_recency_counts_too(self) -> None:
        """Between slots 1 and 2 lie 50 x (log 8 - log 2) = 69.3 admissions."""
        for later, order in ((69, [2, 1]), (71, [1, 2])):
            tree = tree_of(by_saving(1.0))
            keep(tree, "abcdefgh", 10, slot=1)
            idle(tree, later - 1)
            keep(tree, "xy", 20, slot=2)
            assert slots(tree) == order

    def test_a_snapshot_saves_only_from_the_one_before_it(self) -> None:
        tree = tree_of(by_saving(1.0))
        keep(tree, "abcdefg", 10, slot=1)
        keep(tree, "abcdefgh", 20, slot=2)  # saves one token more
        keep(tree, "xyz", 30, slot=3)
        assert slots(tree) == [2, 3, 1]

    def test_its_worth_grows_when_the_one_before_it_goes(self) -> None:
        tree = tree_of(by_saving(1.0))
        first = keep(tree, "abcdefg", 10, slot=1)
        keep(tree, "abcdefgh", 20, slot=2)
        keep(tree, "xyz", 30, slot=3)
        tree.detach_snapshot(first)
        assert slots(tree) == [3, 2]

    def test_the_cost_may_be_any_growing_function(self) -> None:
        def dear_start(tokens: float) -> float:
            return min(tokens, 2.0) + 0.001 * tokens

        tree = tree_of(by_saving(1.0, dear_start))
        keep(tree, "xy", 20, slot=1)
        keep(tree, "abcdefgh", 10, slot=2)
        assert slots(tree) == [1, 2]

    def test_no_weight_is_plain_recency(self) -> None:
        plain, flop = tree_of(LeastRecentlyUsed()), tree_of(by_saving(0))
        for tree in (plain, flop):
            keep(tree, "abcdefgh", 10, slot=1)
            keep(tree, "xy", 20, slot=2)
            used = keep(tree, "z", 30, slot=3)
            keep(tree, "uvw", 40, slot=4)
            tree.use_snapshot(used)
        assert slots(plain) == slots(flop) == [1, 2, 4, 3]

    def test_a_superseded_one_goes_first(self) -> None:
        tree = tree_of(by_saving(1.0))
        keep(tree, "xy", 20, slot=1)
        long = keep(tree, "abcdefgh", 10, slot=2)
        tree.supersede_snapshot(long)
        assert slots(tree) == [2, 1]


class TestBytes:
    """What a snapshot costs: its slot, and the KV that it alone keeps."""

    def policy(self) -> FlopAware:
        return FlopAware(float, token_bytes=1, slot_bytes=3, alpha=1.0)

    def worth_of(self, saving: int, size: int) -> float:
        return LIFETIME * (math.log(saving / size) - math.log(4096 / 4099))

    def test_a_path_of_its_own(self) -> None:
        policy = self.policy()
        node = keep(tree_of(policy), "abcd", 10, slot=1)
        assert worth(policy, node) == pytest.approx(self.worth_of(4, 4 + 3))

    def test_kv_of_an_earlier_snapshot_is_not_counted(self) -> None:
        policy = self.policy()
        tree = tree_of(policy)
        keep(tree, "ab", 10, slot=1)
        node = keep(tree, "abcdef", 20, slot=2)
        assert worth(policy, node) == pytest.approx(self.worth_of(4, 4 + 3))

    def test_kv_that_others_share_is_saved_but_costs_nothing(self) -> None:
        policy = self.policy()
        tree = tree_of(policy)
        keep(tree, "abxy", 10, slot=1)
        node = keep(tree, "abcdef", 20, slot=2)
        assert worth(policy, node) == pytest.approx(self.worth_of(6, 4 + 3))

    def test_segments_without_a_snapshot_count(self) -> None:
        """Not the short last segment alone, though it alone is a leaf."""
        policy = self.policy()
        tree = tree_of(policy)
        put(tree, "abcd", 10)
        node = keep(tree, "abcdef", 20, slot=2)
        assert node.tokens == t("ef")
        assert worth(policy, node) == pytest.approx(self.worth_of(6, 6 + 3))

    def test_a_superseded_snapshot_before_does_not_count(self) -> None:
        policy = self.policy()
        tree = tree_of(policy)
        before = keep(tree, "abcd", 10, slot=1)
        node = keep(tree, "abcdef", 20, slot=2)
        tree.supersede_snapshot(before)
        assert worth(policy, node) == pytest.approx(self.worth_of(6, 6 + 3))

    def test_leaves_and_snapshots_are_weighed_alike(self) -> None:
        policy = self.policy()
        node = keep(tree_of(policy), "abcd", 10, slot=1)
        moved = policy.leaf(node) - node.used_at
        assert moved / ADMISSION == pytest.approx(worth(policy, node))


class TestLeaves:
    def test_kv_without_a_snapshot_goes_first(self) -> None:
        tree = tree_of(by_saving(0.5))
        keep(tree, "ab", 10, slot=1)
        idle(tree, 1000)
        put(tree, "cd", 20)
        assert evict_all(tree) == [(20, 21), (10, 11)]

    def test_of_equal_ones_the_least_recently_used(self) -> None:
        tree = tree_of(by_saving(0.5))
        put(tree, "ab", 10)
        put(tree, "cd", 20)
        keep(tree, "ef", 30, slot=1)
        keep(tree, "gh", 40, slot=2)
        assert evict_all(tree) == [(10, 11), (20, 21), (30, 31), (40, 41)]


class TestLifetime:
    def test_follows_the_ages_of_what_is_evicted(self) -> None:
        """With lifetimes of a few admissions the same saving is worth less."""
        policy = by_saving(1.0)
        tree = tree_of(policy)
        for page in range(400):
            keep(tree, "q", page, slot=1)
            idle(tree, 2)
            tree.evict_snapshot()
        node = keep(tree, "ab", 900, slot=2)
        assert worth(policy, node) == pytest.approx(2 * math.log(2 / 4096), rel=0.01)

    def test_before_any_was_evicted(self) -> None:
        policy = by_saving(0.5)
        node = keep(tree_of(policy), "ab", 10, slot=1)
        assert worth(policy, node) == pytest.approx(LIFETIME / 2 * math.log(2 / 4096))


def test_ranking_again_applies_another_weight() -> None:
    policy = by_saving(0.0)
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
