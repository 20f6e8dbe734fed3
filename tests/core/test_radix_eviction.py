# SPDX-License-Identifier: Apache-2.0
"""Recency, locks, eviction and versions of the radix tree."""

from __future__ import annotations

from array import array

import pytest

from hybrid_plugin.core.policy.reuse_classes import class_of
from hybrid_plugin.core.tree.node import Node
from hybrid_plugin.core.tree.radix import Evicted, MambaRadixCache
from hybrid_plugin.core.tree.snapshot import Snapshot, SnapshotKind
from tests.core.audit import audit_orders, audit_structure
from tests.core.test_radix import match, put, snap, t, tree_with


def node_of(tree: MambaRadixCache, last: str, end: int) -> Node:
    """The node whose tokens end with `last`, at `end`."""
    return next(
        n
        for n in tree.nodes()
        if n.tokens[-len(last) :] == t(last) and n.end == end and n.parent
    )


def ids(evicted: Evicted | None) -> tuple[list[int], int | None]:
    """(pages, slot) that left the tree."""
    assert evicted is not None
    snapshot = evicted.snapshot
    return list(evicted.pages), None if snapshot is None else snapshot.slot


def evict_all(tree: MambaRadixCache, wanted: int = 99) -> list[tuple[int, ...]]:
    """Pages in the order in which nodes are evicted."""
    order = []
    while (evicted := tree.evict_kv(wanted)) is not None:
        audit_orders(tree)
        audit_structure(tree)
        order.append(tuple(evicted.pages))
    return order


class TestKv:
    def test_least_recently_used_leaf_first(self) -> None:
        tree = tree_with("ab", "cd", "ef")
        tree.touch(node_of(tree, "ab", 2))
        assert evict_all(tree) == [(20,), (30,), (10,)]

    def test_leaves_before_parents(self) -> None:
        tree = tree_with("abcd", "abxy", "uv")
        assert evict_all(tree) == [(11,), (21,), (10,), (30,)]

    def test_touching_a_leaf_saves_its_path(self) -> None:
        tree = tree_with("abcd", "abxy", "uv")
        tree.touch(node_of(tree, "cd", 4))
        assert evict_all(tree) == [(21,), (30,), (11,), (10,)]

    def test_a_matched_inner_node_does_not_save_its_leaves(self) -> None:
        tree = tree_with("ab", "abcd", "uv")
        tree.touch(node_of(tree, "ab", 2))
        assert evict_all(tree) == [(21,), (30,), (10,)]

    def test_a_leaf_takes_its_snapshot_along(self) -> None:
        tree = tree_with("abcd")
        snap(tree, node_of(tree, "cd", 4), 7)
        assert ids(tree.evict_kv()) == ([10, 11], 7)
        assert tree.next_snapshot() is None

    def test_a_tail_is_a_leaf(self) -> None:
        tree = tree_with("abcd", page_size=4)
        tail, _ = tree.insert_tail(node_of(tree, "d", 4), t("e"), 20)
        snap(tree, tail, 1)
        assert ids(tree.evict_kv()) == ([20], 1)
        assert ids(tree.evict_kv()) == ([10], None)

    def test_nothing_to_evict(self) -> None:
        assert MambaRadixCache(2).evict_kv() is None


class TestLocks:
    def test_a_locked_path_stays(self) -> None:
        tree = tree_with("abcd", "abxy")
        locked = node_of(tree, "cd", 4)
        tree.lock(locked)
        assert evict_all(tree) == [(21,)]
        tree.unlock(locked)
        assert evict_all(tree) == [(11,), (10,)]

    def test_locks_count(self) -> None:
        tree = tree_with("ab", "abcd")
        upper, lower = node_of(tree, "ab", 2), node_of(tree, "cd", 4)
        tree.lock(lower)
        tree.lock(upper)
        assert (upper.kv_lock, lower.kv_lock) == (1, 1)
        tree.unlock(lower)
        assert evict_all(tree) == [(21,)]
        tree.unlock(upper)
        assert evict_all(tree) == [(10,)]

    def test_unlocking_makes_most_recent(self) -> None:
        tree = tree_with("ab", "cd")
        node = node_of(tree, "ab", 2)
        tree.lock(node)
        tree.unlock(node)
        assert evict_all(tree) == [(20,), (10,)]

    def test_touching_a_locked_node_keeps_it_out_of_the_order(self) -> None:
        tree = tree_with("ab")
        node = node_of(tree, "ab", 2)
        tree.lock(node)
        tree.touch(node)
        assert list(tree.leaves()) == []

    def test_a_locked_snapshot_is_no_candidate(self) -> None:
        tree = tree_with("ab", "cd")
        first, second = node_of(tree, "ab", 2), node_of(tree, "cd", 2)
        snap(tree, first, 1)
        snap(tree, second, 2)
        tree.lock(first)
        tree.lock_state(first)
        assert tree.next_snapshot() is second
        tree.unlock_state(first)
        assert list(tree.snapshots()) == [first, second]
        tree.touch_snapshot(first)
        assert list(tree.snapshots()) == [second, first]

    def test_the_state_lock_needs_a_kv_lock(self) -> None:
        tree = tree_with("ab")
        node = node_of(tree, "ab", 2)
        with pytest.raises(ValueError, match="lock the KV of a node before"):
            tree.lock_state(node)
        tree.lock(node)
        tree.lock_state(node)
        with pytest.raises(ValueError, match="would outlive the KV lock"):
            tree.unlock(node)

    def test_unlocking_what_is_not_locked(self) -> None:
        node = node_of(tree := tree_with("ab"), "ab", 2)
        with pytest.raises(ValueError, match="would outlive"):
            tree.unlock(node)
        with pytest.raises(ValueError, match="the state is not locked"):
            tree.unlock_state(node)


class TestSnapshots:
    def test_least_recently_used_first(self) -> None:
        tree = tree_with("ab", "cd", "ef")
        nodes = [node_of(tree, last, 2) for last in ("ab", "cd", "ef")]
        for slot, node in enumerate(nodes, start=1):
            snap(tree, node, slot)
        tree.touch_snapshot(nodes[0])
        assert list(tree.snapshots()) == [nodes[1], nodes[2], nodes[0]]

    def test_any_node_may_lose_its_state_and_get_another(self) -> None:
        tree = tree_with("ab", "abcd")
        inner = node_of(tree, "ab", 2)
        snap(tree, inner, 1)
        assert ids(tree.detach_snapshot(inner)) == ([], 1)
        found = match(tree, "abcd")
        assert (found.length, found.kv_length) == (0, 4)
        snap(tree, inner, 2)
        assert match(tree, "abcd").length == 2

    def test_a_tail_goes_with_its_state(self) -> None:
        tree = tree_with("abcd", page_size=4)
        node = node_of(tree, "d", 4)
        tail, _ = tree.insert_tail(node, t("e"), 20)
        snap(tree, tail, 1)
        assert ids(tree.detach_snapshot(tail)) == ([20], 1)
        assert node.is_leaf

    def test_misuse(self) -> None:
        tree = tree_with("ab")
        node = node_of(tree, "ab", 2)
        with pytest.raises(ValueError, match="the node has no snapshot"):
            tree.detach_snapshot(node)
        snap(tree, node, 1)
        for refused in (node, node.parent):
            assert refused is not None
            with pytest.raises(ValueError, match="a snapshot needs a node"):
                snap(tree, refused, 2)


class TestVersion:
    def test_grows_when_a_match_could_change(self) -> None:
        tree = MambaRadixCache(4)
        seen = [tree.version]

        def changed() -> bool:
            seen.append(tree.version)
            return seen[-1] > seen[-2]

        node, _ = put(tree, "abcd", 10)
        assert changed()
        tail, _ = tree.insert_tail(node, t("e"), 20)
        assert changed()
        snap(tree, tail, 1)
        assert changed()
        tree.detach_snapshot(tail)
        assert changed()
        tree.evict_kv()
        assert changed()
        tree.clear()
        assert changed()

    def test_stands_still_otherwise(self) -> None:
        tree = tree_with("abcd")
        before = tree.version
        node, _ = put(tree, "abcd", 20)
        put(tree, "ab", 30)
        tree.touch(node)
        tree.lock(node)
        tree.unlock(node)
        match(tree, "abcd")
        assert tree.version == before


def test_clear_returns_everything_and_forgets_it() -> None:
    tree = tree_with("abcd", "abxy")
    tree.insert("other", t("qr"), array("i", [40]))
    snap(tree, node_of(tree, "cd", 4), 5)
    tree.lock(node_of(tree, "xy", 4))
    evicted = tree.clear()
    assert sorted(page for e in evicted for page in e.pages) == [10, 11, 21, 40]
    assert [e.snapshot.slot for e in evicted if e.snapshot] == [5]
    assert list(tree.nodes()) == []
    assert match(tree, "abcd").kv_length == 0
    assert evict_all(tree) == []
    assert tree.next_snapshot() is None


class TestSuperseding:
    """A snapshot whose place a later one on the same path takes goes first."""

    def chain(self, *ends: int) -> tuple[MambaRadixCache, list[Node]]:
        """One path with nodes that end there."""
        tree = MambaRadixCache(1)
        nodes = []
        for end in ends:
            tokens, pages = array("q", range(end)), array("i", range(1, end + 1))
            nodes.append(tree.insert(None, tokens, pages)[0])
        return tree, nodes

    def turn(self, tree: MambaRadixCache, node: Node, slot: int) -> None:
        tree.attach_snapshot(node, Snapshot(slot, kind=SnapshotKind.TURN_END))

    def superseded(self, *nodes: Node) -> list[bool]:
        return [n.snapshot is not None and n.snapshot.is_superseded for n in nodes]

    def test_the_next_turn_takes_the_place_of_the_last(self) -> None:
        tree, (first, second) = self.chain(2, 4)
        self.turn(tree, first, 1)
        tree.use_snapshot(first)
        self.turn(tree, second, 2)
        assert self.superseded(first, second) == [True, False]
        assert tree.next_snapshot() is first
        assert second.resume_before() == 0 and second.share() == 4

    def test_not_before_it_was_used(self) -> None:
        tree, (first, second) = self.chain(2, 4)
        self.turn(tree, first, 1)
        self.turn(tree, second, 2)
        assert self.superseded(first) == [False]

    def test_not_where_another_path_leads_on(self) -> None:
        tree, (first, second) = self.chain(2, 4)
        self.turn(tree, first, 1)
        tree.use_snapshot(first)
        tree.insert(None, array("q", [0, 1, 7]), array("i", [1, 2, 9]))
        self.turn(tree, second, 2)
        assert self.superseded(first) == [False]

    def test_it_is_wanted_again_when_the_later_one_leaves(self) -> None:
        tree, (first, second) = self.chain(2, 4)
        self.turn(tree, first, 1)
        tree.use_snapshot(first)
        self.turn(tree, second, 2)
        tree.detach_snapshot(second)
        assert self.superseded(first) == [False]

    def test_then_the_next_turn_is_expected_there(self) -> None:
        """Not another reader of a turn that went on already."""
        tree, (first, second, third) = self.chain(2, 4, 6)
        self.turn(tree, first, 1)
        tree.use_snapshot(first)
        later = Snapshot(2, kind=SnapshotKind.TURN_END, origin=SnapshotKind.TURN_END)
        tree.attach_snapshot(second, later)
        tree.detach_snapshot(second)
        assert first.snapshot is not None
        assert class_of(first.snapshot) == class_of(later)
        assert first.snapshot.used_at == later.used_at
        tree.use_snapshot(first)
        self.turn(tree, third, 3)
        assert self.superseded(first) == [True], "it went on from there once more"

    def test_and_when_somebody_resumes_there(self) -> None:
        tree, (first, second) = self.chain(2, 4)
        self.turn(tree, first, 1)
        tree.use_snapshot(first)
        self.turn(tree, second, 2)
        tree.use_snapshot(first)
        assert self.superseded(first) == [False]

    def test_a_branch_point_takes_the_place_of_a_guess(self) -> None:
        tree, (body, branch, end) = self.chain(2, 3, 5)
        tree.attach_snapshot(body, Snapshot(1, kind=SnapshotKind.BODY))
        self.turn(tree, end, 2)
        assert self.superseded(body) == [False], "a turn's end tells nothing of it"
        tree.use_snapshot(body)
        tree.attach_snapshot(branch, Snapshot(3, kind=SnapshotKind.BRANCH))
        assert self.superseded(body, branch, end) == [True, False, False]

    def test_chunk_ends_of_a_prompt_follow_each_other(self) -> None:
        tree, (first, second) = self.chain(2, 4)
        for slot, node in enumerate((first, second), start=1):
            tree.attach_snapshot(node, Snapshot(slot, kind=SnapshotKind.CHUNK_END))
        assert self.superseded(first, second) == [True, False]

    def test_turns_that_end_inside_a_page(self) -> None:
        tree = MambaRadixCache(4)
        node, _ = tree.insert(None, t("abcd"), array("i", [1]))
        first, _ = tree.insert_tail(node, t("ef"), 2)
        self.turn(tree, first, 1)
        tree.use_snapshot(first)
        longer, _ = tree.insert(None, t("abcdefgh"), array("i", [1, 3]))
        second, _ = tree.insert_tail(longer, t("i"), 4)
        self.turn(tree, second, 2)
        assert self.superseded(first, second) == [True, False]
        assert second.share() == 9, "nothing but the superseded tail branches off"
        third, _ = tree.insert_tail(node, t("efx"), 5)
        tree.use_snapshot(first)
        self.turn(tree, third, 3)
        assert self.superseded(first) == [False], "two paths continue it now"
        audit_structure(tree)
        audit_orders(tree)


class TestTrim:
    """A leaf without a snapshot loses no more pages than are needed."""

    def test_from_its_end(self) -> None:
        tree = tree_with("abcdefgh")
        leaf = next(tree.leaves())
        assert ids(tree.evict_kv(1)) == ([13], None)
        assert ids(tree.evict_kv(2)) == ([11, 12], None)
        assert (leaf.tokens, leaf.end, list(leaf.pages)) == (t("ab"), 2, [10])
        audit_structure(tree)
        audit_orders(tree)
        assert match(tree, "abcd").kv_length == 2
        assert ids(tree.evict_kv(1)) == ([10], None)
        assert list(tree.nodes()) == []

    def test_not_with_a_snapshot(self) -> None:
        tree = tree_with("abcd")
        snap(tree, next(tree.leaves()), 1)
        assert ids(tree.evict_kv(1)) == ([10, 11], 1)

    def test_changes_what_can_be_matched(self) -> None:
        tree = tree_with("abcd")
        before = tree.version
        tree.evict_kv(1)
        assert tree.version > before
