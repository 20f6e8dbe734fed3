# SPDX-License-Identifier: Apache-2.0
"""The hot snapshots are those that a search of all snapshots finds."""

from __future__ import annotations

from array import array

from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_plugin.core.tree.node import Node, Snapshot
from hybrid_plugin.core.tree.radix import MambaRadixCache
from tests.core.audit import audit_orders
from tests.core.profiles import machine_settings

NODES = 6
NAMES = (
    *("admit", "admit", "attach", "attach-turn-end", "use", "use", "use", "touch"),
    *("supersede", "detach", "evict", "lock", "unlock", "clear", "rank-again"),
)
CALLS = st.lists(
    st.tuples(
        st.sampled_from(NAMES),
        st.integers(0, NODES - 1),
    ),
    min_size=10,
    max_size=40,
)


def insert(tree: MambaRadixCache, which: int) -> Node:
    """Node `which` of the test, in the tree from now on if it was not."""
    return tree.insert(None, array("q", [which]), array("i", [which]))[0]


def call(tree: MambaRadixCache, name: str, which: int) -> None:
    """Do something to a node, if it makes sense."""
    if name == "admit":
        tree.begin_admission(which)
    elif name == "clear":
        tree.clear()
    elif name == "rank-again":
        tree.rank_again()
    elif name == "evict":
        _ = tree.evict_kv() if which % 2 else tree.evict_snapshot()
    else:
        change(tree, insert(tree, which), name)


def change(tree: MambaRadixCache, node: Node, name: str) -> None:
    if node.snapshot is None:
        if name.startswith("attach"):
            is_turn_end = name == "attach-turn-end"
            tree.attach_snapshot(node, Snapshot(1, is_turn_end=is_turn_end))
    elif name == "use":
        tree.use_snapshot(node)
    elif name == "touch":
        tree.touch_snapshot(node)
    elif name == "supersede":
        tree.supersede_snapshot(node)
    elif name == "lock":
        tree.lock(node)
        tree.lock_state(node)
    elif name == "unlock" and node.state_lock:
        tree.unlock_state(node)
        tree.unlock(node)
    elif name == "detach" and not node.state_lock:
        tree.detach_snapshot(node)


def crowd() -> MambaRadixCache:
    """All nodes with a hot snapshot."""
    tree = MambaRadixCache(1)
    tree.begin_admission(NODES)
    for which in range(NODES):
        tree.attach_snapshot(node := insert(tree, which), Snapshot(1))
        tree.use_snapshot(node)
    return tree


@given(CALLS)
@settings(machine_settings())
def test_as_a_search_of_all_snapshots(calls: list[tuple[str, int]]) -> None:
    tree = crowd()
    assert len(tree.hot_snapshots()) == NODES
    for name, which in calls:
        call(tree, name, which)
        audit_orders(tree)


class Counting(Snapshot):
    """Counts how often somebody asks when it was used."""

    __slots__ = ()
    looks = 0

    def __getattribute__(self, name: str) -> object:
        if name == "used_at":
            Counting.looks += 1
        return super().__getattribute__(name)


def test_the_cost_is_that_of_the_hot_ones() -> None:
    tree = MambaRadixCache(1)
    for which in range(1000):
        tree.attach_snapshot(node := insert(tree, which), Counting(1))
        tree.begin_admission(3)
        tree.use_snapshot(node)
    Counting.looks = 0
    assert [node.tokens[0] for node in tree.hot_snapshots()] == [999, 998, 997]
    assert Counting.looks <= 4
