# SPDX-License-Identifier: Apache-2.0
"""What cached content is worth, and what goes first by it."""

from __future__ import annotations

from array import array

import pytest

from hybrid_plugin.core.policy.costs import PASS_TOKENS
from hybrid_plugin.core.policy.eviction import ExpectedSaving
from hybrid_plugin.core.policy.reuse_classes import (
    KV_ALONE,
    assumed_chance,
    class_of,
    unused_class,
    used_class,
)
from hybrid_plugin.core.tree.node import Node
from hybrid_plugin.core.tree.radix import MambaRadixCache
from hybrid_plugin.core.tree.snapshot import Snapshot, SnapshotKind
from tests.core.audit import audit_orders
from tests.core.support import Economical, make_cache, serve, span

TURN, BODY, BRANCH = SnapshotKind.TURN_END, SnapshotKind.BODY, SnapshotKind.BRANCH


def tree_and_policy(token_bytes: float = 1) -> tuple[MambaRadixCache, ExpectedSaving]:
    policy = ExpectedSaving(token_bytes=token_bytes, slot_bytes=100)
    return MambaRadixCache(1, eviction=policy), policy


def path(tree: MambaRadixCache, first: int, length: int) -> Node:
    """A path of its own, which begins like no other."""
    tokens = array("q", range(first, first + length))
    node, _ = tree.insert(None, tokens, array("i", range(first, first + length)))
    return node


def keep(tree: MambaRadixCache, node: Node, kind: SnapshotKind) -> Node:
    tree.attach_snapshot(node, Snapshot(1, kind=kind))
    return node


def worth(tree: MambaRadixCache, policy: ExpectedSaving, node: Node) -> float:
    assert node.snapshot is not None
    return policy.worth(policy.snapshot(node, node.snapshot), tree.clock)


def test_the_saving_by_the_bytes_it_holds() -> None:
    tree, policy = tree_and_policy()
    long, short = path(tree, 1000, 300), path(tree, 5000, 50)
    for node in (long, short):
        keep(tree, node, BODY)
    rate = policy.reuse.rate(unused_class(BODY, None), 0)
    assert worth(tree, policy, long) == pytest.approx(rate * 300 / (100 + 300))
    assert worth(tree, policy, short) == pytest.approx(rate * 50 / (100 + 50))
    assert tree.next_snapshot() is short


def test_a_snapshot_saves_what_the_one_before_it_does_not() -> None:
    tree, policy = tree_and_policy()
    first, second = path(tree, 1000, 200), path(tree, 1000, 300)
    keep(tree, first, BODY)
    keep(tree, second, TURN)
    rate = policy.reuse.rate(unused_class(TURN, None), 0)
    assert worth(tree, policy, second) == rate * 100 / (100 + 100)


def test_what_several_need_is_shared_among_them() -> None:
    """That none of them keeps it alone does not make it free."""
    tree, policy = tree_and_policy()
    stem = path(tree, 1000, 300)
    ends = []
    for first in (5000, 6000, 7000):
        tokens = array("q", [*range(1000, 1300), *range(first, first + 20)])
        end, _ = tree.insert(None, tokens, array("i", range(1, 321)))
        ends.append(keep(tree, end, TURN))
    one = path(tree, 9000, 320)
    keep(tree, one, TURN)
    rate = policy.reuse.rate(unused_class(TURN, None), 0)
    assert stem.needed_by == 3
    shared = rate * 320 / (100 + 20 + 300 / 3)
    assert worth(tree, policy, ends[0]) == pytest.approx(shared)
    assert worth(tree, policy, one) == pytest.approx(rate * 320 / (100 + 320))
    tree.detach_snapshot(ends[0])
    shared = rate * 320 / (100 + 20 + 300 / 2)
    assert worth(tree, policy, ends[1]) == pytest.approx(shared)
    tree.detach_snapshot(ends[1])
    assert worth(tree, policy, ends[2]) == worth(tree, policy, one)


def test_who_is_left_with_what_others_shared_is_ranked_anew() -> None:
    tree, _ = tree_and_policy()
    tokens, ends = array("q", range(1000, 1300)), []
    for last in range(40):
        end, _ = tree.insert(None, tokens + array("q", [last]), array("i", range(301)))
        ends.append(keep(tree, end, TURN))
    assert tree.next_snapshot() is not None, "all are ranked"
    for end in ends[1:]:
        tree.detach_snapshot(end)
        assert tree.next_snapshot() is not None
        shared = 300 / end.parent.needed_by if end.parent else 0
        ranked = tree._snapshots.rank(ends[0]).value
        # The share that its rank tells of is half of what it is now, at least.
        assert 301 / (100 + 1 + shared) <= ranked <= 301 / (100 + 1 + shared / 2)
    assert tree._snapshots.rank(ends[0]).value == 301 / (100 + 301)


@pytest.mark.parametrize("count", [64, 65, 100])
def test_who_comes_and_goes_has_few_others_ranked_anew(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many share KV, a power of two among them or not."""
    tree, _ = tree_and_policy()
    tokens = array("q", range(1000, 1300))

    def add(last: int) -> Node:
        end, _ = tree.insert(None, tokens + array("q", [last]), array("i", range(301)))
        return keep(tree, end, TURN)

    ends = [add(last) for last in range(count)]
    assert tree.next_snapshot() is not None, "all are ranked"
    ranked: list[Node] = []
    rank = tree.rank
    monkeypatch.setattr(tree, "rank", lambda node: (ranked.append(node), rank(node)))
    for turn in range(50):
        tree.detach_snapshot(ends.pop(0))
        ends.append(add(count + turn))
        assert tree.next_snapshot() is not None
    assert len(ranked) < 50 * 5


def test_the_kv_before_a_snapshot_is_its_own_affair() -> None:
    """Those behind it start there, and answer for what follows alone."""
    tree, _ = tree_and_policy()
    stem = keep(tree, path(tree, 1000, 300), BRANCH)
    tokens = array("q", [*range(1000, 1300), *range(5000, 5020)])
    end, _ = tree.insert(None, tokens, array("i", range(1, 321)))
    keep(tree, end, TURN)
    assert (stem.share(), end.share(), stem.needed_by) == (300, 20, 1)
    tree.detach_snapshot(stem)
    assert (end.share(), stem.needed_by) == (320, 1)


def test_a_superseded_one_holds_only_its_slot_and_is_hardly_used() -> None:
    tree, policy = tree_and_policy()
    first, second = path(tree, 1000, 200), path(tree, 1000, 300)
    keep(tree, first, TURN)
    tree.use_snapshot(first)
    keep(tree, second, TURN)
    rate = policy.reuse.rate((TURN, "superseded", None), 0)
    assert worth(tree, policy, first) == rate * 200 / 100
    assert worth(tree, policy, first) < worth(tree, policy, second)


def test_ends_that_nobody_resumes_go_before_a_shared_prompt() -> None:
    """Whatever their ages; and it takes a few of them to find out."""
    cache = make_cache(pages=400, slots=8, policy=Economical())
    shared = span(0, 40)
    for n in range(40):
        serve(cache, f"question {n}", shared + span(1000 + 20 * n, 1010 + 20 * n))
    hits = [
        serve(cache, f"more {n}", shared + span(5000 + 20 * n, 5010 + 20 * n)).hit
        for n in range(10)
    ]
    assert hits == [40] * 10
    kinds = [n.snapshot.kind for n in cache.tree.snapshots() if n.snapshot]
    assert BRANCH in kinds


@pytest.mark.parametrize("token_bytes", [0, 1])
def test_kv_without_a_snapshot_goes_before_what_saves_something(
    token_bytes: float,
) -> None:
    """However little that is, and the oldest first."""
    tree, policy = tree_and_policy(token_bytes)
    bare = [path(tree, first, 300) for first in (1000, 2000, 3000)]
    kept = keep(tree, path(tree, 5000, 2), TURN)
    for _ in range(50):
        tree.begin_admission()
        policy.reuse.observe(class_of(kept.snapshot), 1, tree.clock >> 20, used=False)
    tree.touch(bare[0])
    for expected in (bare[1], bare[2], bare[0], kept):
        assert tree.next_leaf() is expected
        assert tree.evict_kv(300) is not None


def test_kv_without_a_snapshot_takes_nothing_from_snapshots() -> None:
    tree, _ = tree_and_policy()
    keep(tree, path(tree, 5000, 2), TURN)
    path(tree, 1000, 300)
    assert tree.kv_worth() == 0 < (tree.snapshot_worth() or 0)


def test_uses_and_evictions_are_learned_from() -> None:
    tree, policy = tree_and_policy()
    before = policy.reuse.chance(unused_class(TURN, None))
    for number in range(20):
        tree.begin_admission()
        keep(tree, path(tree, 1000 * number, 10), TURN)
        for _ in range(4):
            tree.begin_admission()
        assert tree.evict_snapshot() is not None
    assert policy.reuse.chance(unused_class(TURN, None)) < before / 2
    for number in range(100, 120):
        tree.begin_admission()
        node = keep(tree, path(tree, 1000 * number, 10), BODY)
        tree.begin_admission()
        tree.use_snapshot(node)
    assert policy.reuse.chance(unused_class(BODY, None)) > 0.8


def test_content_is_ranked_again_as_it_grows_older() -> None:
    """A used body's worth falls with its age, and another's with a lower start does
    not: the order turns without anybody touching them."""
    tree, _ = tree_and_policy()
    old = keep(tree, path(tree, 1000, 300), BODY)
    for _ in range(8):
        tree.begin_admission()
    young = keep(tree, path(tree, 5000, 200), BODY)
    assert tree.next_snapshot() is old
    for _ in range(200):
        tree.begin_admission()
        audit_orders(tree)
    assert tree.next_snapshot() is young, "of about equal age the smaller saving goes"


@pytest.mark.parametrize("origin", [None, TURN, BODY])
def test_a_pass_is_repaid_by_all_uses_together(origin: SnapshotKind | None) -> None:
    _, policy = tree_and_policy()
    first = policy.reuse.chance(unused_class(BRANCH, origin))
    again = policy.reuse.chance(used_class(BRANCH))
    least = PASS_TOKENS * (1 - again) / first
    assert policy.repays_pass(BRANCH, int(least) + 1, origin=origin, running=0)
    assert not policy.repays_pass(BRANCH, int(least) - 1, origin=origin, running=0)
    assert policy.repays_pass(BRANCH, int(least / 4) + 1, origin=origin, running=3)


def test_a_pass_that_others_wait_for_is_not_divided_among_them() -> None:
    policy = ExpectedSaving(token_bytes=1, slot_bytes=4, passes_are_shared=False)
    first = policy.reuse.chance(unused_class(BRANCH, None))
    again = policy.reuse.chance(used_class(BRANCH))
    least = PASS_TOKENS * (1 - again) / first
    assert policy.repays_pass(BRANCH, int(least) + 1, origin=None, running=7)
    assert not policy.repays_pass(BRANCH, int(least) - 1, origin=None, running=7)


def test_a_kind_that_is_never_used_is_not_paused_for() -> None:
    _, policy = tree_and_policy()
    assert policy.repays_pass(BODY, 10_000, origin=None, running=0)
    for now in range(1000):
        policy.reuse.enter(unused_class(BODY, None), now, now)
    assert not policy.repays_pass(BODY, 10_000, origin=None, running=0)


def test_every_class_has_an_assumed_chance() -> None:
    kinds = list(SnapshotKind)
    classes = [KV_ALONE]
    for kind in kinds:
        for origin in (None, *kinds):
            classes.append(class_of(Snapshot(1, kind=kind, origin=origin)))
        classes.append(class_of(Snapshot(1, kind=kind, hits=2)))
        classes.append(class_of(Snapshot(1, kind=kind, is_superseded=True)))
    assert all(0 < assumed_chance(one) < 1 for one in classes)
