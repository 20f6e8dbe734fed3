# SPDX-License-Identifier: Apache-2.0
"""MambaRadixCache: a radix tree over tokens with KV pages and state snapshots.

The tree knows which prefix is where and how recently it was used.  It hands
out and takes back page and slot ids but owns no pool: `HybridCache` does the
reference counting, so every method here says which ids changed hands.

Two kinds of node:

* a *segment* covers one or more whole pages of tokens, has one page id per
  `page_size` tokens and may hold a snapshot taken after its last token;
* a *tail* covers fewer tokens than a page, hangs at the end of a segment (or
  of the root), holds one page of which only the first tokens count, and
  exists for its snapshot alone: without it, nothing could be resumed there.

A node without a snapshot keeps its KV (a tombstone): the state of a prefix
may be evicted long before its pages are.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

from hybrid_plugin.core.recency import RecencyList

Tokens = tuple[int, ...]


@dataclass(slots=True, eq=False)
class Node:
    """One edge of the tree together with the node at its end."""

    parent: Node | None
    tokens: Tokens
    pages: list[int]
    end: int
    """Tokens from the root to the end of this node."""
    is_tail: bool = False
    children: dict[Tokens, Node] = field(default_factory=dict)
    """Segments below, keyed by the tokens of their first page."""
    tails: dict[Tokens, Node] = field(default_factory=dict)
    """Tails below, keyed by all their tokens."""
    snapshot: int | None = None
    kv_lock: int = 0
    state_lock: int = 0
    hits: int = 0
    """Sequences that resumed from the snapshot."""
    is_turn_end: bool = False
    """Whether the snapshot was donated by a sequence that ended here."""

    @property
    def is_leaf(self) -> bool:
        return not self.children and not self.tails


@dataclass(frozen=True, slots=True)
class Match:
    """What the tree holds of a token sequence."""

    length: int
    """Tokens that can be restored: KV and a state are there for all of them."""
    node: Node | None
    """The node whose snapshot was taken after exactly `length` tokens."""
    pages: tuple[int, ...]
    """Pages of the whole pages below `length`, to be shared."""
    tail_page: int | None
    """The page with the rest of `length`, to be copied; None if there is none."""
    kv_length: int
    """Tokens of whole pages whose KV is in the tree, with or without a state.
    Where it exceeds `length`, this sequence and an earlier one part ways
    behind the last snapshot: a branch point."""


@dataclass(frozen=True, slots=True)
class Evicted:
    """Ids that left the tree."""

    pages: tuple[int, ...] = ()
    slot: int | None = None


class MambaRadixCache:
    """Match, insert, split and two recency orders; decides nothing about memory."""

    def __init__(self, page_size: int) -> None:
        """Create an empty tree over pages of `page_size` tokens."""
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1, got {page_size}")
        self.page_size = page_size
        self._roots: dict[Hashable, Node] = {}
        self._namespaces: dict[Node, Hashable] = {}
        self._kv_order: RecencyList[Node] = RecencyList()
        # Snapshots that nobody resumed from yet, and the others.
        self._unused: RecencyList[Node] = RecencyList()
        self._used: RecencyList[Node] = RecencyList()
        self.version = 0
        """Grows whenever a match could change."""

    # ------------------------------------------------------------------ lookup

    def match(self, namespace: Hashable, tokens: Tokens, limit: int) -> Match:
        """Find the deepest snapshot on the path of `tokens`.

        Args:
            namespace: what besides tokens must be equal (adapter, salt).
            tokens: the sequence.
            limit: restore at most this many tokens; an engine must compute at
                least one token to get logits.

        Touches nothing; call `touch` for a match that is used.
        """
        root = self._roots.get(namespace)
        if root is None:
            return Match(0, None, (), None, 0)
        best: Node | None = None
        node, path = root, []
        while True:
            if node.snapshot is not None and node.end <= limit:
                best = node
            best = self._longest_tail(node, tokens, limit) or best
            child = node.children.get(tokens[node.end : node.end + self.page_size])
            if child is None:
                kv_length = node.end
                break
            common = self._common_pages(child, tokens)
            path.append(child)
            if common < len(child.pages):
                kv_length = node.end + common * self.page_size
                break
            node = child
        return self._describe(best, path, kv_length)

    def _longest_tail(self, node: Node, tokens: Tokens, limit: int) -> Node | None:
        if not node.tails:
            return None
        longest = min(self.page_size - 1, limit - node.end)
        for length in range(longest, 0, -1):
            tail = node.tails.get(tokens[node.end : node.end + length])
            if tail is not None:
                return tail
        return None

    def _common_pages(self, child: Node, tokens: Tokens) -> int:
        """Whole pages at the start of `child` that `tokens` agrees with."""
        start = child.end - len(child.tokens)
        window = tokens[start : child.end]
        if window == child.tokens:
            return len(child.pages)
        size = self.page_size
        pages = 1  # the first one was the dictionary key
        while (
            window[pages * size : (pages + 1) * size]
            == child.tokens[pages * size : (pages + 1) * size]
        ):
            pages += 1
        return pages

    def _describe(self, best: Node | None, path: list[Node], kv_length: int) -> Match:
        if best is None:
            return Match(0, None, (), None, kv_length)
        whole = best.end // self.page_size * self.page_size
        pages = tuple(page for node in path if node.end <= whole for page in node.pages)
        tail_page = best.pages[0] if best.is_tail else None
        return Match(best.end, best, pages, tail_page, kv_length)

    # ------------------------------------------------------------------ change

    def insert(
        self, namespace: Hashable, tokens: Tokens, pages: list[int]
    ) -> tuple[Node, list[int]]:
        """Make the tree hold `tokens`, one id of `pages` for each page of them.

        Returns:
            The node that ends exactly after `tokens` (the root for none), and
            the ids the tree took: those of pages it did not have yet.

        Raises:
            ValueError: if `tokens` is not a whole number of pages.
        """
        if len(tokens) != len(pages) * self.page_size:
            raise ValueError(f"{len(tokens)} tokens do not fill {len(pages)} pages")
        node = self._roots.get(namespace)
        if node is None:
            node = self._roots[namespace] = Node(None, (), [], 0)
            self._namespaces[node] = namespace
        while node.end < len(tokens):
            child = node.children.get(tokens[node.end : node.end + self.page_size])
            if child is None:
                taken = pages[node.end // self.page_size :]
                leaf = Node(node, tokens[node.end :], list(taken), len(tokens))
                node.children[leaf.tokens[: self.page_size]] = leaf
                self._kv_order.append(leaf)
                self.version += 1
                self.touch(leaf)
                return leaf, taken
            common = self._common_pages(child, tokens)
            node = child if common == len(child.pages) else self._split(child, common)
        self.touch(node)
        return node, []

    def insert_tail(self, node: Node, tokens: Tokens, page: int) -> tuple[Node, bool]:
        """Hang `tokens`, fewer than a page, below `node`.

        Returns:
            The tail, and whether the tree took `page`; an equal tail that is
            there already keeps its own.  A new tail needs a snapshot at once.
        """
        if not 0 < len(tokens) < self.page_size:
            raise ValueError(f"a tail of {len(tokens)} tokens is no part of a page")
        tail = node.tails.get(tokens)
        if tail is not None:
            self.touch(tail)
            return tail, False
        tail = Node(node, tokens, [page], node.end + len(tokens), is_tail=True)
        node.tails[tokens] = tail
        self._kv_order.append(tail)
        self.version += 1
        self.touch(tail)
        return tail, True

    def attach_snapshot(
        self, node: Node, slot: int, *, is_turn_end: bool = False
    ) -> None:
        """Give `node`, which has none, the snapshot `slot`."""
        if node.snapshot is not None or node.parent is None:
            raise ValueError("a snapshot needs a node other than the root without one")
        node.snapshot = slot
        node.hits, node.is_turn_end = 0, is_turn_end
        if not node.state_lock:
            self._unused.append(node)
        self.version += 1

    def detach_snapshot(self, node: Node) -> Evicted:
        """Take the snapshot of `node` away; a tail goes with it."""
        if node.snapshot is None:
            raise ValueError("the node has no snapshot")
        slot, node.snapshot = node.snapshot, None
        self._forget_order(node)
        self.version += 1
        if node.is_tail:
            return Evicted(self._remove(node), slot)
        return Evicted((), slot)

    def touch(self, node: Node) -> None:
        """Mark the path to `node` as just used, `node` itself being the oldest.

        Parents stay more recent than their children, so the oldest unlocked
        node is always a leaf.
        """
        current: Node | None = node
        while current is not None and current.parent is not None:
            if not current.kv_lock:
                self._kv_order.touch(current)
            current = current.parent

    def touch_snapshot(self, node: Node) -> None:
        """Mark the snapshot of `node` as just taken again."""
        order = self._order_of(node)
        if node in order:
            order.touch(node)

    def use_snapshot(self, node: Node) -> None:
        """Note that a sequence resumed from the snapshot of `node`."""
        self._forget_order(node)
        node.hits += 1
        if not node.state_lock and node.snapshot is not None:
            self._used.append(node)

    def demote_snapshot(self, node: Node) -> None:
        """Make the snapshot of `node` the first to go: nobody will want it."""
        if node.snapshot is None or node.state_lock:
            return
        self._forget_order(node)
        node.hits = 0
        self._unused.prepend(node)

    # ------------------------------------------------------------------- locks

    def lock(self, node: Node) -> None:
        """Keep the KV of the whole path to `node` from being evicted."""
        current: Node | None = node
        while current is not None and current.parent is not None:
            current.kv_lock += 1
            self._kv_order.discard(current)
            current = current.parent

    def unlock(self, node: Node) -> None:
        """Undo one `lock`."""
        current: Node | None = node
        while current is not None and current.parent is not None:
            if current.kv_lock <= current.state_lock:
                raise ValueError("the state lock would outlive the KV lock")
            current.kv_lock -= 1
            if not current.kv_lock:
                self._kv_order.append(current)
            current = current.parent

    def lock_state(self, node: Node) -> None:
        """Keep the snapshot of `node`, whose KV is locked, from being evicted."""
        if node.state_lock >= node.kv_lock:
            raise ValueError("lock the KV of a node before its state")
        node.state_lock += 1
        self._forget_order(node)

    def unlock_state(self, node: Node) -> None:
        """Undo one `lock_state`."""
        if not node.state_lock:
            raise ValueError("the state is not locked")
        node.state_lock -= 1
        if not node.state_lock and node.snapshot is not None:
            self._order_of(node).append(node)

    # ---------------------------------------------------------------- eviction

    def evict_kv(self) -> Evicted | None:
        """Remove the least recently used unlocked leaf; None if there is none."""
        leaf = next(iter(self._kv_order), None)
        if leaf is None:
            return None
        slot, leaf.snapshot = leaf.snapshot, None
        self._forget_order(leaf)
        self.version += 1
        return Evicted(self._remove(leaf), slot)

    def oldest_snapshot(self, *, used: bool) -> Node | None:
        """The least recent unlocked snapshot of those used, or not used, so far.

        Where there is none of the kind asked for, it is one of the other.
        """
        first, second = (
            (self._used, self._unused) if used else (self._unused, self._used)
        )
        return next(iter(first), None) or next(iter(second), None)

    def snapshots(self) -> Iterator[Node]:
        """Nodes with an unlocked snapshot: unused, then used, least recent first."""
        yield from self._unused
        yield from self._used

    def snapshot_counts(self) -> tuple[int, int]:
        """How many unlocked snapshots are (unused, used)."""
        return len(self._unused), len(self._used)

    def clear(self) -> list[Evicted]:
        """Forget everything, locked or not; returns all ids the tree held."""
        evicted = [
            Evicted(tuple(node.pages), node.snapshot)
            for node in self.nodes()
            if node.parent is not None
        ]
        self._roots.clear()
        self._namespaces.clear()
        self._kv_order = RecencyList()
        self._unused = RecencyList()
        self._used = RecencyList()
        self.version += 1
        return evicted

    def nodes(self) -> Iterator[Node]:
        """Every node, roots included, parents before children."""
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())
            stack.extend(node.tails.values())

    # ---------------------------------------------------------------- internal

    def _order_of(self, node: Node) -> RecencyList[Node]:
        return self._used if node.hits else self._unused

    def _forget_order(self, node: Node) -> None:
        self._used.discard(node)
        self._unused.discard(node)

    def _split(self, lower: Node, pages: int) -> Node:
        """Cut `lower` after `pages` pages; returns the new upper node.

        `lower` stays the object that ends where it ended: locks and snapshots
        refer to ends.
        """
        parent = lower.parent
        assert parent is not None, "the root covers no tokens and is never split"
        cut = pages * self.page_size
        start = lower.end - len(lower.tokens)
        upper = Node(parent, lower.tokens[:cut], lower.pages[:pages], start + cut)
        upper.kv_lock = lower.kv_lock
        lower.tokens, lower.pages = lower.tokens[cut:], lower.pages[pages:]
        lower.parent = upper
        parent.children[upper.tokens[: self.page_size]] = upper
        upper.children[lower.tokens[: self.page_size]] = lower
        if not upper.kv_lock:
            self._kv_order.insert_after(upper, lower)
        return upper

    def _remove(self, node: Node) -> tuple[int, ...]:
        """Cut the leaf `node` off; returns its pages."""
        assert node.is_leaf, "KV is evicted from the leaves towards the root"
        parent = node.parent
        assert parent is not None, "the root is never removed"
        if node.is_tail:
            del parent.tails[node.tokens]
        else:
            del parent.children[node.tokens[: self.page_size]]
        self._kv_order.discard(node)
        node.parent = None
        self._drop_empty_root(parent)
        return tuple(node.pages)

    def _drop_empty_root(self, node: Node) -> None:
        """Forget a namespace that holds nothing: salts may be many."""
        if node.parent is None and node.is_leaf and node in self._namespaces:
            del self._roots[self._namespaces.pop(node)]
