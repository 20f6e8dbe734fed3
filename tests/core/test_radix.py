# SPDX-License-Identifier: Apache-2.0
"""Match, insert, split and namespaces of the radix tree."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_plugin.core.tree.node import Node, Snapshot
from hybrid_plugin.core.tree.radix import MambaRadixCache, Match
from hybrid_plugin.core.tree.tokens import Tokens
from tests.core.audit import audit_orders, audit_structure


def t(text: str) -> Tokens:
    """Tokens from letters, to make sequences easy to read."""
    return array("q", map(ord, text))


def found(
    length: int,
    node: Node | None,
    pages: Sequence[int],
    tail_page: int | None,
    kv_length: int,
) -> Match:
    return Match(length, node, array("i", pages), tail_page, kv_length)


NO_HIT = found(0, None, (), None, 0)


def snap(tree: MambaRadixCache, node: Node, slot: int) -> None:
    tree.attach_snapshot(node, Snapshot(slot))


def tree_with(*texts: str, page_size: int = 2) -> MambaRadixCache:
    """A tree of whole-page sequences; pages are numbered 10, 11, ... 20, 21, ..."""
    tree = MambaRadixCache(page_size)
    for row, text in enumerate(texts, start=1):
        put(tree, text, 10 * row)
    return tree


def put(tree: MambaRadixCache, text: str, first_page: int) -> tuple[Node, list[int]]:
    count = len(text) // tree.page_size
    pages = array("i", range(first_page, first_page + count))
    node, taken = tree.insert(None, t(text), pages)
    return node, list(taken)


def match(tree: MambaRadixCache, text: str, limit: int = 99) -> Match:
    return tree.match(None, t(text), limit)


def shape(tree: MambaRadixCache) -> set[tuple[str, tuple[int, ...], int]]:
    """(tokens, pages, end) of every node but the roots."""
    audit_structure(tree)
    audit_orders(tree)
    return {
        ("".join(map(chr, n.tokens)), tuple(n.pages), n.end)
        for n in tree.nodes()
        if n.parent is not None
    }


class TestInsert:
    def test_new_tokens_are_one_node(self) -> None:
        tree = MambaRadixCache(2)
        node, taken = put(tree, "abcd", 10)
        assert taken == [10, 11]
        assert node.end == 4
        assert shape(tree) == {("abcd", (10, 11), 4)}

    def test_what_is_there_keeps_its_pages(self) -> None:
        tree = tree_with("abcd")
        node, taken = put(tree, "abcdefgh", 20)
        assert taken == [22, 23]
        assert node.end == 8
        assert shape(tree) == {("abcd", (10, 11), 4), ("efgh", (22, 23), 8)}
        assert put(tree, "abcd", 30) == (node.parent, [])

    def test_mid_edge_divergence_splits_at_a_page(self) -> None:
        tree = tree_with("abcdef", "abcdxy")
        assert shape(tree) == {
            ("abcd", (10, 11), 4),
            ("ef", (12,), 6),
            ("xy", (22,), 6),
        }

    def test_divergence_inside_a_page_splits_before_it(self) -> None:
        tree = tree_with("abcd", "abcx")
        assert shape(tree) == {("ab", (10,), 2), ("cd", (11,), 4), ("cx", (21,), 4)}

    def test_divergence_inside_the_first_page_shares_nothing(self) -> None:
        tree = tree_with("abcd", "axcd")
        assert shape(tree) == {("abcd", (10, 11), 4), ("axcd", (20, 21), 4)}

    def test_a_prefix_splits_too(self) -> None:
        tree = tree_with("abcdef")
        node, taken = put(tree, "abcd", 20)
        assert (node.end, list(node.pages), taken) == (4, [10, 11], [])

    def test_page_size_one(self) -> None:
        tree = tree_with("abc", "abx", page_size=1)
        assert shape(tree) == {
            ("ab", (10, 11), 2),
            ("c", (12,), 3),
            ("x", (22,), 3),
        }

    def test_tokens_must_fill_the_pages(self) -> None:
        with pytest.raises(ValueError, match="3 tokens do not fill 2 pages"):
            MambaRadixCache(2).insert(None, t("abc"), array("i", [1, 2]))

    def test_page_size_must_be_positive(self) -> None:
        with pytest.raises(ValueError, match="at least 1, got 0"):
            MambaRadixCache(0)


class TestMatch:
    def test_nothing_cached(self) -> None:
        assert match(MambaRadixCache(2), "abc") == NO_HIT

    def test_kv_without_a_state_is_no_hit(self) -> None:
        result = match(tree_with("abcdef"), "abcdef")
        assert result == found(0, None, (), None, kv_length=6)

    def test_deepest_snapshot_wins(self) -> None:
        tree = tree_with("ab", "abcd", "abcdef")
        nodes = {n.end: n for n in tree.nodes()}
        snap(tree, nodes[2], 1)
        snap(tree, nodes[4], 2)
        result = match(tree, "abcdefgh")
        assert result == found(4, nodes[4], (10, 21), None, kv_length=6)

    @pytest.mark.parametrize(("limit", "length"), [(1, 0), (2, 2), (3, 2), (4, 4)])
    def test_limit(self, limit: int, length: int) -> None:
        tree = tree_with("ab", "abcd")
        for slot, node in enumerate(list(tree.nodes())[1:], start=1):
            snap(tree, node, slot)
        result = match(tree, "abcd", limit)
        assert (result.length, result.kv_length) == (length, 4)

    def test_a_snapshot_behind_the_divergence_is_out_of_reach(self) -> None:
        tree = tree_with("abcdef")
        snap(tree, list(tree.nodes())[1], 1)
        assert match(tree, "abcdxx") == found(0, None, (), None, kv_length=4)
        assert match(tree, "abcde") == found(0, None, (), None, kv_length=4)

    def test_changes_nothing(self) -> None:
        tree = tree_with("ab", "cd")
        before = (list(tree.leaves()), tree.clock, tree.version)
        match(tree, "abx")
        match(tree, "cdx")
        assert (list(tree.leaves()), tree.clock, tree.version) == before


class TestTails:
    def tails(self) -> tuple[MambaRadixCache, Node, Node, Node]:
        """Page size 4: "abcd" with the tails "e" and "ef" below."""
        tree = MambaRadixCache(4)
        node, _ = put(tree, "abcd", 10)
        short, took_short = tree.insert_tail(node, t("e"), 20)
        snap(tree, short, 1)
        long, took_long = tree.insert_tail(node, t("ef"), 30)
        snap(tree, long, 2)
        assert took_short and took_long
        return tree, node, short, long

    def test_longest_tail_wins(self) -> None:
        tree, _, short, long = self.tails()
        assert match(tree, "abcdefg") == found(6, long, (10,), 30, kv_length=4)
        assert match(tree, "abcdex") == found(5, short, (10,), 20, kv_length=4)

    def test_limit_chooses_the_shorter_tail(self) -> None:
        tree, _, short, _ = self.tails()
        assert match(tree, "abcdefg", limit=5).node is short
        assert match(tree, "abcdefg", limit=4).node is None

    def test_a_tail_beats_the_snapshot_before_it(self) -> None:
        tree, node, _, long = self.tails()
        snap(tree, node, 3)
        assert match(tree, "abcdef").node is long
        assert match(tree, "abcdx").node is node

    def test_a_segment_below_beats_a_tail(self) -> None:
        tree, _, _, _ = self.tails()
        below, _ = put(tree, "abcdefgh", 40)
        snap(tree, below, 3)
        assert match(tree, "abcdefghi") == found(8, below, (10, 41), None, 8)

    def test_a_tail_below_the_root(self) -> None:
        tree = MambaRadixCache(4)
        root, _ = tree.insert(None, t(""), array("i"))
        tail, _ = tree.insert_tail(root, t("ab"), 7)
        snap(tree, tail, 1)
        assert match(tree, "abc") == found(2, tail, (), 7, kv_length=0)

    def test_an_equal_tail_keeps_its_page(self) -> None:
        tree, node, _, long = self.tails()
        assert tree.insert_tail(node, t("ef"), 99) == (long, False)
        assert list(long.pages) == [30]

    @pytest.mark.parametrize("text", ["", "efgh"], ids=["none", "a whole page"])
    def test_a_tail_is_shorter_than_a_page(self, text: str) -> None:
        tree, node, _, _ = self.tails()
        with pytest.raises(ValueError, match="is no part of a page"):
            tree.insert_tail(node, t(text), 50)


class TestSplit:
    def test_lower_node_keeps_snapshot_and_locks(self) -> None:
        tree = MambaRadixCache(2)
        lower, _ = put(tree, "abcdef", 10)
        snap(tree, lower, 5)
        tree.lock(lower)
        tree.lock_state(lower)
        upper, _ = put(tree, "abcd", 20)
        assert lower.parent is upper
        assert (upper.snapshot, upper.kv_lock, upper.state_lock) == (None, 0, 0)
        assert lower.snapshot is not None and lower.snapshot.slot == 5
        assert (lower.kv_lock, lower.state_lock) == (1, 1)
        assert (lower.tokens, list(lower.pages), lower.end) == (t("ef"), [12], 6)
        assert tree.evict_kv() is None
        tree.unlock_state(lower)
        tree.unlock(lower)
        assert (upper.kv_lock, lower.kv_lock) == (0, 0)

    def test_upper_node_is_as_recent_as_lower(self) -> None:
        tree = tree_with("abcdef", "uv", "xy")
        first = next(tree.leaves())
        upper = tree.cut(first, 2)
        evicted = [tree.evict_kv(9) for _ in range(3)]
        assert [list(e.pages) for e in evicted if e] == [[11, 12], [10], [20]]
        assert (upper.end, first.parent) == (2, None)

    def test_a_cut_at_the_end_is_none(self) -> None:
        tree = tree_with("abcd")
        leaf = next(tree.leaves())
        assert tree.cut(leaf, 4) is leaf

    def test_keeps_what_hangs_below(self) -> None:
        tree = tree_with("abcd", "abcdef")
        lower = next(n for n in tree.nodes() if n.end == 4)
        below = next(n for n in tree.nodes() if n.end == 6)
        put(tree, "abxx", 30)
        assert below.parent is lower
        assert shape(tree) == {
            ("ab", (10,), 2),
            ("cd", (11,), 4),
            ("ef", (22,), 6),
            ("xx", (31,), 4),
        }


class TestNamespaces:
    def test_isolated(self) -> None:
        tree = MambaRadixCache(2)
        a, _ = tree.insert("a", t("xy"), array("i", [1]))
        snap(tree, a, 1)
        assert tree.match("a", t("xyz"), 99).node is a
        assert tree.match(None, t("xyz"), 99) == NO_HIT
        assert tree.match("b", t("xyz"), 99) == NO_HIT
        _, taken = tree.insert("b", t("xy"), array("i", [2]))
        assert list(taken) == [2]

    def test_an_empty_namespace_vanishes(self) -> None:
        tree = MambaRadixCache(2)
        tree.insert("a", t("xy"), array("i", [1]))
        tree.insert("b", t("xy"), array("i", [2]))
        tree.evict_kv()
        assert list(tree._roots) == ["b"]
        assert len(tree._namespaces) == 1
        tree.evict_kv()
        assert list(tree.nodes()) == []
        assert not tree._namespaces

    def test_so_does_one_whose_last_tail_loses_its_state(self) -> None:
        tree = MambaRadixCache(4)
        root, _ = tree.insert("a", t(""), array("i"))
        tail, _ = tree.insert_tail(root, t("x"), 1)
        snap(tree, tail, 1)
        tree.detach_snapshot(tail)
        assert list(tree.nodes()) == []


class TestWithoutSnapshots:
    """Full attention alone: a prefix can be resumed at any page end."""

    @pytest.mark.parametrize(
        ("text", "limit", "length", "pages"),
        [
            ("abcdef", 99, 6, [10, 11, 12]),
            ("abcdef", 5, 4, [10, 11]),
            ("abcdxx", 99, 4, [10, 11]),
            ("abxx", 99, 2, [10]),
            ("xx", 99, 0, []),
        ],
    )
    def test_hits_the_last_whole_page(
        self, text: str, limit: int, length: int, pages: list[int]
    ) -> None:
        tree = MambaRadixCache(2, needs_snapshots=False)
        put(tree, "abcdef", 10)
        result = match(tree, text, limit)
        assert (result.length, list(result.pages)) == (length, pages)
        assert result.node is (next(tree.leaves()) if length else None)

    def test_across_nodes(self) -> None:
        tree = MambaRadixCache(2, needs_snapshots=False)
        put(tree, "abcd", 10)
        put(tree, "abcdefgh", 20)
        result = match(tree, "abcdefxx")
        assert (result.length, list(result.pages)) == (6, [10, 11, 22])
        assert result.node is not None and result.node.end == 8
        assert match(tree, "abcdefgh", limit=4).node is result.node.parent


def test_renumbering_replaces_ids_and_nothing_else() -> None:
    tree = tree_with("abcd", "abcdefgh")
    snap(tree, next(tree.leaves()), 5)
    before = tree.version
    tree.renumber(pages={11: 30, 23: 31}, slots={5: 6})
    assert shape(tree) == {("abcd", (10, 30), 4), ("efgh", (22, 31), 8)}
    assert match(tree, "abcdefghi").length == 8
    assert [n.snapshot.slot for n in tree.snapshots() if n.snapshot] == [6]
    assert tree.version > before


@given(
    tails=st.sets(st.text("ab", min_size=1, max_size=7), max_size=40),
    asked=st.text("ab", max_size=9),
    limit=st.integers(0, 12),
)
def test_the_longest_tail_is_found_among_few_and_many(
    tails: set[str], asked: str, limit: int
) -> None:
    tree = tree_with("x" * 8, page_size=8)
    whole, _ = put(tree, "x" * 8, 10)
    for number, tail in enumerate(sorted(tails)):
        node, _ = tree.insert_tail(whole, t(tail), 100 + number)
        snap(tree, node, number)
    fitting = [len(tail) for tail in tails if asked.startswith(tail)]
    longest = max((one for one in fitting if one <= limit), default=0)
    got = match(tree, "x" * 8 + asked, 8 + limit)
    assert got.length == (8 + longest if longest else 0)


@given(st.sets(st.text("ab", min_size=1, max_size=7), min_size=1, max_size=40))
def test_a_tail_goes_on_from_the_longest_before_it(tails: set[str]) -> None:
    tree = tree_with("x" * 8, page_size=8)
    whole, _ = put(tree, "x" * 8, 10)
    nodes = {}
    for number, tail in enumerate(sorted(tails)):
        nodes[tail], _ = tree.insert_tail(whole, t(tail), 100 + number)
        snap(tree, nodes[tail], number)
    for tail, node in nodes.items():
        before = [o for o in tails if o != tail and tail.startswith(o)]
        found = whole._tail_before(node)
        assert found is (nodes[max(before, key=len)] if before else None)
