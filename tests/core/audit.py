# SPDX-License-Identifier: Apache-2.0
"""Recomputes from scratch what a cache counts as it goes, and compares."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hybrid_plugin.core.cache import HybridCache
from hybrid_plugin.core.radix import MambaRadixCache, Node
from hybrid_plugin.core.recency import RecencyList


def full_state(cache: HybridCache) -> dict[str, Any]:
    """Everything a call could have changed, but for the count of refusals."""
    tree = cache.tree
    totals = cache.stats.as_dict()
    del totals["refusals"]
    return {
        "free pages": cache.pages.free_ids(),
        "page references": [
            cache.pages.references(page) for page in range(cache.pages.capacity)
        ],
        "free slots": cache.slots.free_ids(),
        "running slots": sorted(cache.slots._running),
        "snapshot slots": sorted(cache.slots._snapshots),
        "nodes": {id(node): _node_state(node) for node in tree.nodes()},
        "roots": {name: id(root) for name, root in tree._roots.items()},
        "kv order": [id(node) for node in tree._kv_order],
        "state order": [id(node) for node in tree.snapshots()],
        "version": tree.version,
        "sequences": {
            name: (list(s.pages), s.slot, s.stops, s.in_tree, id(s.locked))
            for name, s in cache._sequences.items()
        },
        "commands": list(cache._commands),
        "totals": totals,
    }


def _node_state(node: Node) -> tuple[Any, ...]:
    return (
        id(node.parent),
        node.tokens,
        tuple(node.pages),
        node.end,
        node.is_tail,
        node.snapshot,
        node.kv_lock,
        node.state_lock,
        [id(child) for child in node.children.values()],
        [id(tail) for tail in node.tails.values()],
    )


def audit(cache: HybridCache) -> None:
    """Check every invariant that can be told between two calls."""
    audit_pages(cache)
    audit_slots(cache)
    audit_locks(cache)
    audit_orders(cache.tree)
    audit_structure(cache.tree)


def audit_pages(cache: HybridCache) -> None:
    """Every page is in one place, and all counters agree with the owners."""
    pool = cache.pages
    in_tree = Counter(page for node in cache.tree.nodes() for page in node.pages)
    in_sequences: Counter[int] = Counter()
    for sequence in cache._sequences.values():
        assert len(set(sequence.pages)) == len(sequence.pages)
        in_sequences.update(sequence.pages)
    for page in range(pool.capacity):
        assert pool.references(page) == (in_sequences[page], in_tree[page]), page
        assert in_tree[page] <= 1, f"page {page} is in two nodes"
        assert in_sequences[page] <= 1 or in_tree[page], f"page {page} is shared"
    owned = set(in_tree) | set(in_sequences)
    assert 0 not in owned, "page 0 is nobody's"
    assert pool.free_ids() == sorted(set(range(1, pool.capacity)) - owned)
    assert pool.in_use == len(in_sequences)
    assert pool.reclaimable == len(set(in_tree) - set(in_sequences))
    assert pool.free + pool.in_use + pool.reclaimable == pool.usable


def audit_slots(cache: HybridCache) -> None:
    """Every slot is in one place."""
    pool = cache.slots
    running = [sequence.slot for sequence in cache._sequences.values()]
    snapshots = [n.snapshot for n in cache.tree.nodes() if n.snapshot is not None]
    assert sorted(pool._running) == sorted(running)
    assert sorted(pool._snapshots) == sorted(snapshots)
    everything = sorted([*running, *snapshots, *pool.free_ids()])
    assert everything == list(range(1, pool.capacity))
    assert (pool.running, pool.snapshots) == (len(running), len(snapshots))


def audit_locks(cache: HybridCache) -> None:
    """Lock counts are those of the live sequences; locked pages are theirs."""
    expected: Counter[Node] = Counter()
    for sequence in cache._sequences.values():
        path = _path_to(sequence.locked)
        expected.update(path)
        pages = [page for node in path for page in node.pages]
        assert sequence.pages[: len(pages)] == pages
    for node in cache.tree.nodes():
        assert node.kv_lock == expected.pop(node, 0), node
        assert 0 == node.state_lock <= node.kv_lock, node
    assert not expected, "a locked node is not in the tree"


def _path_to(node: Node | None) -> list[Node]:
    path: list[Node] = []
    while node is not None and node.parent is not None:
        path.append(node)
        node = node.parent
    return path[::-1]


def audit_orders(tree: MambaRadixCache) -> None:
    """Both orders hold what may be evicted, and leaves go before parents."""
    kv, state = _members(tree._kv_order), list(tree.snapshots())
    nodes = [node for node in tree.nodes() if node.parent is not None]
    assert set(kv) == {node for node in nodes if not node.kv_lock}
    assert set(state) == {n for n in nodes if n.snapshot is not None}
    age = {node: rank for rank, node in enumerate(kv)}
    for node in kv:
        if node.parent in age:
            assert age[node.parent] > age[node], "a parent is older than its child"
    assert not kv or kv[0].is_leaf


def _members(order: RecencyList[Node]) -> list[Node]:
    forwards = list(order)
    backwards: list[Node] = []
    node = order._previous[None]
    while node is not None:
        backwards.append(node)
        node = order._previous[node]
    assert forwards == backwards[::-1]
    assert len(order) == len(forwards)
    return forwards


def audit_structure(tree: MambaRadixCache) -> None:
    """The shape of the tree is that of its description."""
    assert list(tree._roots.values()) == list(tree._namespaces)
    assert list(tree._roots) == list(tree._namespaces.values())
    for root in tree._roots.values():
        assert root.parent is None and root.end == 0 and root.snapshot is None
        assert not root.is_leaf, "an empty namespace stays"
    for node in tree.nodes():
        for key, child in node.children.items():
            assert not child.is_tail and key == child.tokens[: tree.page_size]
            assert len(child.tokens) == len(child.pages) * tree.page_size > 0
            _audit_link(node, child)
        for key, tail in node.tails.items():
            assert tail.is_tail and key == tail.tokens and tail.is_leaf
            assert 0 < len(tail.tokens) < tree.page_size and len(tail.pages) == 1
            assert tail.snapshot is not None, "a tail is there for its snapshot"
            _audit_link(node, tail)


def _audit_link(parent: Node, child: Node) -> None:
    assert child.parent is parent and not parent.is_tail
    assert child.end == parent.end + len(child.tokens)
    assert child.kv_lock <= parent.kv_lock or parent.parent is None
