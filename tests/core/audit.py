# SPDX-License-Identifier: Apache-2.0
"""Recomputes from scratch what a cache counts as it goes, and compares."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from hybrid_plugin.core.cache import HybridCache
from hybrid_plugin.core.memory.attention_windows import live_pages
from hybrid_plugin.core.memory.id_space import IdSpace
from hybrid_plugin.core.memory.pools import PagePool
from hybrid_plugin.core.memory.reference_counts import SEQUENCE, TREE
from hybrid_plugin.core.policy.aged_order import Rank
from hybrid_plugin.core.policy.eviction import ExpectedSaving
from hybrid_plugin.core.policy.reuse_classes import class_of
from hybrid_plugin.core.tiers.fetches import Fetching
from hybrid_plugin.core.tiers.host_tier import HostSource, HostTier
from hybrid_plugin.core.tiers.restores import Restore
from hybrid_plugin.core.tiers.writes import Writing
from hybrid_plugin.core.tree.node import Node
from hybrid_plugin.core.tree.promise import Promise
from hybrid_plugin.core.tree.radix import MambaRadixCache


def full_state(cache: HybridCache) -> dict[str, Any]:
    """Everything a call could have changed, but for the count of refusals."""
    tree = cache.tree
    tree.next_snapshot()  # renews the ranks that are out of date, as any call may
    totals = cache.stats.as_dict()
    del totals["refusals"], totals["drafts_refused"]
    return {
        "host": None if cache.host is None else host_state(cache, cache.host),
        "pages": [_pool_state(pool) for pool in _page_pools(cache)],
        "mapped slots": cache.slots.ids.mapped_granules(),
        "free slots": cache.slots.free_ids(),
        "running slots": sorted(cache.slots._running),
        "draft slots": cache.slots.draft_ids(),
        "snapshot slots": sorted(cache.slots._snapshots),
        "nodes": cached_content(cache),
        "promises": [
            (id(one), one.until, cache.promises.nodes_of(one))
            for one in cache.promises._ending.ranked(0)
        ],
        "roots": {name: id(root) for name, root in tree._roots.items()},
        "leaves": [id(node) for node in tree.leaves()],
        "snapshots": [id(node) for node in tree.snapshots()],
        "version": tree.version,
        "sequences": {
            name: (
                list(s.pages),
                s.slot,
                list(s.drafts),
                s.snapshot_positions,
                s.in_tree,
                s.promised,
                s.window_demand,
                id(s.locked),
                [(table.first, list(table.pages)) for table in s.windows],
            )
            for name, s in cache._sequences.items()
        },
        "commands": list(cache._commands),
        "totals": totals,
    }


def host_state(cache: HybridCache, host: HostTier) -> dict[str, Any]:
    """What is on the host, and on its way from there."""
    return {
        "pages": [_pool_state(pool) for pool in host.memory.page_pools.values()],
        "slots": (host.memory.slots.free_ids(), sorted(host.memory.slots._running)),
        "nodes": {id(node): _node_state(node) for node in host.tree.nodes()},
        "restores": [(one.ticket, one.is_over) for one in restores_of(cache)],
        "fetches": [one.ticket for one in fetches_of(cache)],
        "writes": [one.key for one in writes_of(cache)],
    }


def restores_of(cache: HybridCache) -> list[Restore]:
    """Restores whose loads are not awaited yet."""
    return (
        []
        if cache.lower_tiers._restores is None
        else list(cache.lower_tiers._restores.running)
    )


def state_but_ranks(cache: HybridCache) -> dict[str, Any]:
    """The same in no order of eviction: to look at what is worth least renews ranks."""
    state = full_state(cache)
    return state | {name: sorted(state[name]) for name in ("leaves", "snapshots")}


def cached_content(cache: HybridCache) -> dict[int, tuple[Any, ...]]:
    """What is in the tree; in which order it is evicted is left out."""
    return {id(node): _node_state(node) for node in cache.tree.nodes()}


def _page_pools(cache: HybridCache) -> list[PagePool]:
    return [cache.pages, *(group.pages for group in cache.windows)]


def _pool_state(pool: PagePool) -> tuple[Any, ...]:
    mapped = pool.ids.mapped_granules()
    return pool.free_ids(), counts_of(pool), pool.free, pool.reclaimable, mapped


def counts_of(pool: PagePool) -> list[int]:
    """References to each page: those of sequences times SEQUENCE, and the tree's."""
    return list(pool._references._counts)


def _node_state(node: Node) -> tuple[Any, ...]:
    snapshot = node.snapshot
    held = None
    if snapshot is not None:
        windows = [list(pages) for pages in snapshot.windows]
        held = (snapshot.slot, windows, snapshot.hits)
    return (
        id(node.parent),
        list(node.tokens),
        list(node.pages),
        node.end,
        node.is_tail,
        held,
        node.kv_lock,
        node.state_lock,
        [id(child) for child in node.children.values()],
        [id(tail) for tail in node.tails.values()],
    )


def audit(cache: HybridCache) -> None:
    """Check every invariant that can be told between two calls."""
    audit_pages(cache)
    audit_windows(cache)
    audit_pairs(cache)
    audit_slots(cache)
    audit_locks(cache)
    audit_orders(cache.tree)
    audit_promises(cache)
    audit_structure(cache.tree)
    if cache.host is not None:
        audit_host(cache, cache.host)


def fetches_of(cache: HybridCache) -> list[Fetching]:
    """Fetches whose outcome was not reported."""
    return (
        []
        if cache.lower_tiers._outer is None
        else list(cache.lower_tiers._outer._fetches.running.values())
    )


def kept_of(cache: HybridCache) -> list[HostSource]:
    """What fetches have brought for sequences that have yet to come."""
    outer = cache.lower_tiers._outer
    kept = [] if outer is None else [one.kept for one in outer._fetches._kept]
    assert None not in kept, "nothing is kept twice"
    return [source for source in kept if source is not None]


def writes_of(cache: HybridCache) -> list[Writing]:
    """Writes whose outcome was not reported."""
    outer = cache.lower_tiers._outer
    if outer is None or outer._writes is None:
        return []
    return list(outer._writes.running.values())


def saves_of(cache: HybridCache) -> list[HostSource]:
    """What saves hold on the host."""
    outer = cache.lower_tiers._outer
    if outer is None or outer._saves is None:
        return []
    held = [one._source for one in outer._saves.running]
    return [source for source in held if source is not None]


def offers_of(cache: HybridCache) -> list[HostSource]:
    """What is offered to other servers, and was not withdrawn."""
    outer = cache.lower_tiers._outer
    if outer is None or outer._offers is None:
        return []
    running = outer._offers.running.values()
    return [one.source for one in running if one.source is not None]


def audit_host(cache: HybridCache, host: HostTier) -> None:
    """The host's tree is one as the device's; what is loaded from it is in use."""
    memory, tree = host.memory, host.tree
    audit_orders(tree)
    audit_structure(tree)
    fetches, writes = fetches_of(cache), writes_of(cache)
    sources = [one.source for one in restores_of(cache)]
    sources += [one.source for one in writes if not one.is_flushed]
    sources += saves_of(cache)
    sources += offers_of(cache) + kept_of(cache)
    locks: Counter[Node] = Counter(source.node for source in sources)
    bases = Counter(one.base for one in fetches if one.base is not None)
    for node in tree.nodes():
        assert node.state_lock == locks.pop(node, 0), node
        assert node.kv_lock == node.state_lock + bases.pop(node, 0), node
    assert not bases, "what a fetch continues left the host"
    assert not locks, "a prefix left the host while it is loaded or written"
    flushed = [one.source for one in writes if one.is_flushed]
    owners = [*sources, *flushed, *(one.rows for one in fetches)]
    in_use = Counter(page for owner in owners for page in owner.pages)
    in_tree = Counter(page for node in tree.nodes() for page in node.pages)
    assert max(in_tree.values(), default=1) == 1, "a row is in two nodes"
    audit_pool(memory.pages, in_use, in_tree)
    snapshots = [node.snapshot for node in tree.nodes() if node.snapshot is not None]
    for index, group in enumerate(memory.windows):
        in_use = Counter(row for owner in owners for row in owner.windows[index])
        in_tree = Counter(row for one in snapshots for row in one.windows[index])
        audit_pool(group.pages, in_use, in_tree)
    if memory.slots.needed:
        slots = [snapshot.slot for snapshot in snapshots]
        slots += [one.slot for one in flushed] + [one.rows.slot for one in fetches]
        assert sorted([*memory.slots._running, *memory.slots._snapshots]) == sorted(
            slots
        )
        assert memory.slots._running == {owner.slot for owner in owners}
        everything = sorted([*slots, *memory.slots.free_ids()])
        assert everything == sorted(ids_with_memory(memory.slots.ids))
    blocks = sum(host._broker.mapped_bytes().values()) // host.plan.block_bytes
    assert 0 < blocks <= host.plan.blocks, "more is used than there is"


def audit_pages(cache: HybridCache) -> None:
    """Every page is in one place, and all counters agree with the owners."""
    in_tree = Counter(page for node in cache.tree.nodes() for page in node.pages)
    in_sequences: Counter[int] = Counter()
    for sequence in cache._sequences.values():
        assert len(set(sequence.pages)) == len(sequence.pages)
        in_sequences.update(sequence.pages)
    for restore in restores_of(cache):
        assert len(set(restore.pages)) == len(restore.pages)
        in_sequences.update(restore.pages)
    for page, count in in_tree.items():
        assert count <= 1, f"page {page} is in two nodes"
    for page, count in in_sequences.items():
        assert count <= 1 or in_tree[page], f"page {page} is shared"
    audit_pool(cache.pages, in_sequences, in_tree)


def audit_windows(cache: HybridCache) -> None:
    """The same for the pages of window groups, and each table's shape."""
    for index, group in enumerate(cache.windows):
        in_tree: Counter[int] = Counter()
        for node in cache.tree.nodes():
            if node.snapshot is not None:
                pages = node.snapshot.windows[index]
                assert len(pages) == len(
                    live_pages(group.window, node.end, cache.page_size)
                )
                in_tree.update(pages)
        in_sequences: Counter[int] = Counter()
        for sequence in cache._sequences.values():
            table = sequence.windows[index]
            assert len(table.pages) == len(sequence.pages)
            assert not any(table.pages[: table.first]), "a page outlived its window"
            assert len(set(table.held())) == len(table.held())
            in_sequences.update(table.held())
        for restore in restores_of(cache):
            live = live_pages(group.window, restore.length, cache.page_size)
            assert len(restore.windows[index]) == len(live)
            in_sequences.update(restore.windows[index])
        audit_pool(group.pages, in_sequences, in_tree)


def audit_pairs(cache: HybridCache) -> None:
    """Whoever holds a window page for a KV page holds the same one, in each group.

    Engines with one map from KV pages to window pages rely on it.
    """
    for index, group in enumerate(cache.windows):
        page_of: dict[int, int] = {}

        def see(kv: Sequence[int], window: Sequence[int], of: dict[int, int]) -> None:
            for page, other in zip(kv, window, strict=True):
                assert of.setdefault(page, other) == other, f"page {page} has two"

        for sequence in cache._sequences.values():
            table = sequence.windows[index]
            see(sequence.pages[table.first :], table.held(), page_of)
        for node in cache.tree.nodes():
            if node.snapshot is not None:
                live = live_pages(group.window, node.end, cache.page_size)
                path = [page for part in _path_to(node) for page in part.pages]
                kv = path[live.start : live.stop]
                see(kv, node.snapshot.windows[index], page_of)


def audit_pool(
    pool: PagePool, in_sequences: Counter[int], in_tree: Counter[int]
) -> None:
    """All counters of a pool agree with the owners of its pages."""
    counts = [0] * pool.capacity
    for owners, reference in ((in_sequences, SEQUENCE), (in_tree, TREE)):
        for page, count in owners.items():
            counts[page] += count * reference
    assert counts_of(pool) == counts
    owned = set(in_tree) | set(in_sequences)
    assert 0 not in owned, "page 0 is nobody's"
    usable, free = ids_with_memory(pool.ids), pool.free_ids()
    assert owned <= usable, "a page lies in a hole"
    assert free == sorted(usable - owned)
    assert pool.free == len(free)
    assert pool.in_use == len(in_sequences)
    assert pool.reclaimable == len(set(in_tree) - set(in_sequences))
    assert pool.free + pool.in_use + pool.reclaimable == pool.usable


def ids_with_memory(ids: IdSpace) -> set[int]:
    """All ids that could be somebody's."""
    per = ids.per_granule
    granules = ids.mapped_granules()
    return {i for g in granules for i in range(g * per, (g + 1) * per)} - {0}


def audit_slots(cache: HybridCache) -> None:
    """Every slot is in one place."""
    pool = cache.slots
    running = [sequence.slot for sequence in cache._sequences.values()]
    running += [restore.slot for restore in restores_of(cache)]
    snapshots = [n.snapshot.slot for n in cache.tree.nodes() if n.snapshot is not None]
    if not pool.needed:
        assert set(running) | set(snapshots) <= {0}
        return
    assert sorted(pool._running) == sorted(running)
    drafts = [slot for one in cache._sequences.values() for slot in one.drafts]
    assert sorted(pool._drafts) == sorted(drafts)
    assert sorted(pool._snapshots) == sorted(snapshots)
    everything = sorted([*running, *drafts, *snapshots, *pool.free_ids()])
    assert everything == sorted(ids_with_memory(pool.ids))
    counts = (pool.running, pool.drafts, pool.snapshots)
    assert counts == (len(running), len(drafts), len(snapshots))
    assert pool.ids.live == len(running) + len(drafts)


def audit_locks(cache: HybridCache) -> None:
    """Lock counts are those of the live sequences; locked pages are theirs."""
    expected = Counter(
        sequence.locked
        for sequence in cache._sequences.values()
        if sequence.locked is not None
    )
    for sequence in cache._sequences.values():
        pages = [page for node in _path_to(sequence.locked) for page in node.pages]
        assert list(sequence.pages[: len(pages)]) == pages
    for restore in restores_of(cache):
        pages = [page for node in _path_to(restore.base) for page in node.pages]
        assert list(restore.pages[: len(pages)]) == pages
        if restore.base is not None:
            expected[restore.base] += 1
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
    """Both orders hold what may be evicted, at priorities that are up to date."""
    nodes = [node for node in tree.nodes() if node.parent is not None]
    leaves, snapshots = list(tree.leaves()), list(tree.snapshots())
    assert set(leaves) == {n for n in nodes if n.is_leaf and not n.kv_lock}
    assert set(snapshots) == {n for n in nodes if n.snapshot and not n.state_lock}
    assert len(snapshots) == len(set(snapshots))
    for order, rank_of in (
        (tree._leaves, tree.eviction.leaf),
        (tree._snapshots, rank_of_snapshot(tree)),
    ):
        for node in order.ranked(tree.admissions):
            rank, current = order.rank(node), rank_of(node)
            assert (rank.kind, rank.since) == (current.kind, current.since)
            if not isinstance(tree.eviction, ExpectedSaving):
                assert rank == current
    if isinstance(tree.eviction, ExpectedSaving):
        audit_observed(tree, tree.eviction, [*snapshots, *leaves])


def rank_of_snapshot(tree: MambaRadixCache) -> Callable[[Node], Rank]:
    """Ranks a node by its snapshot."""

    def rank(node: Node) -> Rank:
        assert node.snapshot is not None
        return tree.eviction.snapshot(node, node.snapshot)

    return rank


def audit_observed(
    tree: MambaRadixCache, policy: ExpectedSaving, nodes: list[Node]
) -> None:
    """Every snapshot that may be evicted is observed, once, as what it is."""
    expected: Counter[Hashable] = Counter()
    for node in set(nodes):
        if node.snapshot is not None and not node.state_lock:
            expected[class_of(node.snapshot)] += 1
    observed = {
        kind: len(seen.exposure) for kind, seen in policy.reuse._classes.items()
    }
    assert {kind: count for kind, count in observed.items() if count} == expected


def audit_promises(cache: HybridCache) -> None:
    """A promise holds for cached snapshots, and ends with its TTL."""
    live = [s.promise for s in cache._sequences.values() if s.promise is not None]
    given: dict[Promise, list[Node]] = {}
    for node in cache.tree.nodes():
        if node.snapshot is not None and node.snapshot.promise is not None:
            given.setdefault(node.snapshot.promise, []).append(node)
    for promise, nodes in given.items():
        held = cache.promises.nodes_of(promise)
        assert Counter(held) == Counter(nodes), "it holds for what is gone"
        now = cache.promises.pace.now
        assert promise.ends(now) > now, "it outlives its TTL"
        assert (promise.until is None) == (promise in live)
        listed = promise in cache.promises._ending
        assert listed == (promise.until is not None), "its TTL never ends"
    for promise in (*cache.promises._ending.ranked(0), *cache.promises._nodes):
        assert promise in given, "it is remembered for nothing"


def audit_structure(tree: MambaRadixCache) -> None:
    """The shape of the tree is that of its description."""
    assert list(tree._roots.values()) == list(tree._namespaces)
    assert list(tree._roots) == list(tree._namespaces.values())
    for root in tree._roots.values():
        assert root.parent is None and root.end == 0 and root.snapshot is None
        assert not root.is_leaf, "an empty namespace stays"
    for node in tree.nodes():
        assert node.needed_by == node.needed_now()
        for key, child in node.children.items():
            assert not child.is_tail
            assert key == child.tokens[: tree.page_size].tobytes()
            assert len(child.tokens) == len(child.pages) * tree.page_size > 0
            _audit_link(node, child)
        for key, tail in node.tails.items():
            assert tail.is_tail and key == tail.tokens.tobytes() and tail.is_leaf
            assert 0 < len(tail.tokens) < tree.page_size and len(tail.pages) == 1
            assert tail.snapshot is not None, "a tail is there for its snapshot"
            _audit_link(node, tail)


def _audit_link(parent: Node, child: Node) -> None:
    assert child.parent is parent and not parent.is_tail
    assert child.end == parent.end + len(child.tokens)
