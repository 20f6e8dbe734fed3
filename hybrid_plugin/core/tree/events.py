# SPDX-License-Identifier: Apache-2.0
"""Events for cache-aware routers: which pages a request can be restored from.

A page of full-attention KV is announced while a request can resume at its end or behind
it.  KV without a state saves nothing, and a router that reads only these events would
count it as a hit.  The deepest announced page of a prompt is thus the deepest position
at which a prompt that goes on like one before it can resume.

Routers that know groups of layers get two more kinds of blocks.  The group of states
has one block for each position with a snapshot, named like the KV page that ends there.
A snapshot inside a page is announced at the end of the last whole page before it: a
request that goes on with the same tokens resumes up to a page further on.  A group with
windows has the blocks that must be there to resume at these positions.

Engines differ in how they name a page, so the adapter supplies its engine's hash
function and converts the records.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import groupby
from typing import TypeAlias

from hybrid_plugin.core.commands import Pool, PoolId
from hybrid_plugin.core.memory.attention_windows import AttentionWindow, live_pages
from hybrid_plugin.core.tree.node import Node
from hybrid_plugin.core.tree.tokens import Tokens

Key: TypeAlias = Hashable
"""Name of a page: says the namespace and all tokens up to its end."""

Hasher: TypeAlias = "Callable[[Key | None, Iterator[Tokens], Hashable], Iterable[Key]]"
"""Computes the keys of consecutive pages from the key before the first, the tokens of
each page and the namespace.

It may end at a page that the engine's events have no name for: that is not announced,
nor is what lies behind it.
"""


@dataclass(frozen=True, slots=True)
class PagesStored:
    """Consecutive pages of one pool were stored."""

    pool: PoolId
    namespace: Hashable
    parent: Key | None
    """Key of the page before the first; None at the start of a sequence."""
    keys: tuple[Key, ...]
    tokens: Tokens
    """Tokens of all pages, concatenated."""
    page_size: int


@dataclass(frozen=True, slots=True)
class PagesRemoved:
    """Pages of one pool were removed, or nothing resumes at or behind them any more."""

    pool: PoolId
    keys: tuple[Key, ...]
    """The deepest first."""


@dataclass(frozen=True, slots=True)
class Cleared:
    """The cache was cleared."""


Event = PagesStored | PagesRemoved | Cleared


def sha256_chain(
    parent: Key | None, pages: Iterable[Tokens], namespace: Hashable
) -> Iterator[Key]:
    """Keys of 64 bits that are equal in every process.

    Args:
        parent: a key made by this function; None before the first page.
        pages: tokens of each, as 64-bit integers of the machine's byte order.
        namespace: enters by its `repr`, for the first page only.
    """
    before = repr(namespace if parent is None else parent)
    for tokens in pages:
        digest = sha256(before.encode())
        digest.update(tokens.tobytes())
        key = int.from_bytes(digest.digest()[:8], "big")
        yield key
        before = repr(key)


@dataclass(slots=True)
class _Announced:
    """Why a segment is announced: it can be resumed at, or leads to one that can."""

    ends: int = 0
    """Snapshots at its end and in the tails behind it."""
    children: int = 0
    """Announced segments that follow it."""


@dataclass(slots=True)
class EventLog:
    """Collects events for the adapter.

    Args:
        page_size: tokens in a page of the tree that reports.
        windows: of the cache's window groups.
        hasher: of the engine.
    """

    page_size: int
    windows: tuple[AttentionWindow, ...] = ()
    hasher: Hasher = sha256_chain
    announced_pages: int = 0
    """Pages of full-attention KV that are announced now."""
    _keys: dict[Node, tuple[Key, ...]] = field(default_factory=dict)
    """Keys of the pages, up to the first without a name, of every segment in the tree
    that was announced once."""
    _announced: dict[Node, _Announced] = field(default_factory=dict)
    _in_windows: Counter[tuple[PoolId, Key]] = field(default_factory=Counter)
    """Positions announced for resuming that need a page of a window group."""
    _pending: list[Event] = field(default_factory=list)

    def take(self) -> list[Event]:
        """All events since the last call, in order."""
        pending, self._pending = self._pending, []
        return pending

    # ------------------------------------------------- what the tree reports

    def attached(self, node: Node, namespace: Hashable) -> None:
        """Record that `node` got a snapshot."""
        end = _last_segment(node)
        if end.parent is None:
            return
        self._announce(end, namespace)
        if self._announced[end].ends == 1 and self._is_named(end):
            self._store(Pool.STATE, namespace, end, 1)
            for pool, count in self._reach(end):
                self._store_window(pool, namespace, end, count)

    def detached(self, node: Node) -> None:
        """Record that `node`, still in the tree, loses its snapshot."""
        end = _last_segment(node)
        if end.parent is None:
            return
        announced = self._announced[end]
        announced.ends -= 1
        if not announced.ends and self._is_named(end):
            for pool, count in self._reach(end):
                self._remove_window(pool, end, count)
            self._remove(Pool.STATE, self._keys[end][-1:])
        self._retract(end)

    def repeat(self, node: Node, namespace: Hashable) -> None:
        """Record once more what a request needs that resumes at the snapshot of `node`.

        Not where a page on the path has no name.
        """
        end = _last_segment(node)
        if end.parent is None or not self._is_named(end):
            return
        self._store(Pool.KV, namespace, end, end.end // self.page_size)
        self._store(Pool.STATE, namespace, end, 1)
        for pool, count in self._reach(end):
            self._store(pool, namespace, end, count)

    def stored(self, leaf: Node, namespace: Hashable) -> None:
        """Record a new leaf of a tree that can be resumed at any page."""
        self._announce(leaf, namespace)

    def removed(self, leaf: Node, kept: int) -> None:
        """Record that a leaf, still in the tree, loses all but `kept` pages."""
        if leaf in self._announced:
            if kept:
                lost = self._keys[leaf][kept:]
                self.announced_pages -= len(lost)
                self._remove(Pool.KV, lost)
            else:
                self._announced[leaf].ends = 0
                self._retract(leaf)
        keys = self._keys.pop(leaf, ())
        if kept and keys:
            self._keys[leaf] = keys[:kept]

    def split(self, upper: Node, lower: Node, pages: int) -> None:
        """Move the first `pages` pages of `lower` to `upper`, before it."""
        keys = self._keys.get(lower)
        if keys is not None:
            self._keys[upper], self._keys[lower] = keys[:pages], keys[pages:]
        if lower in self._announced:
            self._announced[upper] = _Announced(children=1)

    def cleared(self) -> None:
        """Record that the tree was cleared."""
        self._keys.clear()
        self._announced.clear()
        self._in_windows.clear()
        self.announced_pages = 0
        self._pending.append(Cleared())

    # --------------------------------------------------- internal: announcing

    def _announce(self, end: Node, namespace: Hashable) -> None:
        """Announce the path to `end`, which can be resumed at once more."""
        fresh, node = [], end
        while node.parent is not None and node not in self._announced:
            fresh.append(node)
            node = node.parent
        if fresh and node.parent is not None:
            self._announced[node].children += 1
        for node in fresh:
            self._announced[node] = _Announced(children=node is not end)
        self._announced[end].ends += 1
        self._name(end, namespace)
        # What is behind a page without a name has none either.
        named = sum(len(self._keys[node]) for node in fresh)
        behind = sum(len(node.pages) for node in fresh) - named
        self.announced_pages += named
        if named:
            self._store(Pool.KV, namespace, end, named, behind)

    def _retract(self, node: Node) -> None:
        """Take back the announcement of `node` and of what leads only there, if any."""
        lost: list[Key] = []
        while node.parent is not None:
            announced = self._announced[node]
            if announced.ends or announced.children:
                break
            del self._announced[node]
            lost += reversed(self._keys[node])
            node = node.parent
            if node.parent is not None:
                self._announced[node].children -= 1
        self.announced_pages -= len(lost)
        self._remove(Pool.KV, lost[::-1])

    def _reach(self, end: Node) -> Iterator[tuple[PoolId, int]]:
        """Per window group, how many pages are needed to resume at the end of `end`."""
        for index, window in enumerate(self.windows):
            count = len(live_pages(window, end.end, self.page_size))
            if count:
                yield Pool.window(index), count

    def _store_window(
        self, pool: PoolId, namespace: Hashable, end: Node, count: int
    ) -> None:
        """Announce what is not announced yet of the last `count` pages."""
        keys = self._last_pages(end, count)[1]
        is_new = [not self._in_windows[pool, key] for key in keys]
        self._in_windows.update((pool, key) for key in keys)
        behind = count
        for new, run in groupby(is_new):
            length = len(list(run))
            behind -= length
            if new:
                self._store(pool, namespace, end, length, behind)

    def _remove_window(self, pool: PoolId, end: Node, count: int) -> None:
        held = [(pool, key) for key in self._last_pages(end, count)[1]]
        self._in_windows.subtract(held)
        lost = [one for one in held if not self._in_windows[one]]
        for one in lost:
            del self._in_windows[one]
        self._remove(pool, [key for _, key in lost])

    def _store(
        self,
        pool: PoolId,
        namespace: Hashable,
        end: Node,
        count: int,
        behind: int = 0,
    ) -> None:
        """Record `count` pages; `behind` more are between them and the end of `end`.

        All of them have names.
        """
        parent, keys, tokens = self._last_pages(end, count, behind)
        self._pending.append(
            PagesStored(pool, namespace, parent, keys, tokens, self.page_size)
        )

    def _remove(self, pool: PoolId, keys: Sequence[Key]) -> None:
        """Record the end of pages, in the order of their path."""
        if keys:
            self._pending.append(PagesRemoved(pool, tuple(reversed(keys))))

    # ------------------------------------------------------- internal: naming

    def _name(self, end: Node, namespace: Hashable) -> None:
        """Compute the keys of all pages up to `end` that have none."""
        unnamed, node = [], end
        while node.parent is not None and node not in self._keys:
            unnamed.append(node)
            node = node.parent
        for node in reversed(unnamed):
            self._keys[node] = tuple(self._names(node, namespace))

    def _names(self, node: Node, namespace: Hashable) -> Iterable[Key]:
        parent, key = node.parent, None
        assert parent is not None, "the root has no pages"
        if parent.parent is not None:
            if not self._is_named(parent):
                return ()
            key = self._keys[parent][-1]
        size = self.page_size
        starts = range(0, len(node.tokens), size)
        pages = (node.tokens[start : start + size] for start in starts)
        return self.hasher(key, pages, namespace)

    def _is_named(self, node: Node) -> bool:
        """Whether all pages up to the end of an announced segment have names."""
        return len(self._keys[node]) == len(node.pages)

    def _last_pages(
        self, end: Node, count: int, behind: int = 0
    ) -> tuple[Key | None, tuple[Key, ...], Tokens]:
        """Parent key, keys and tokens of `count` pages, with `behind` more up to `end`.

        All of them have names.
        """
        path, held = [end], len(end.pages)
        while held < count + behind + 1:
            parent = path[-1].parent
            assert parent is not None, "the root is not on the path"
            if parent.parent is None:
                break
            path.append(parent)
            held += len(parent.pages)
        keys = [key for node in reversed(path) for key in self._keys[node]]
        tokens = array("q")
        for node in reversed(path):
            tokens += node.tokens
        first, last = held - behind - count, held - behind
        span = tokens[first * self.page_size : last * self.page_size]
        return keys[first - 1] if first else None, tuple(keys[first:last]), span


def _last_segment(node: Node) -> Node:
    """The segment, or the root, that ends with the last whole page up to `node`."""
    if not node.is_tail:
        return node
    assert node.parent is not None, "a tail has a parent"
    return node.parent
