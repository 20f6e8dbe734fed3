# SPDX-License-Identifier: Apache-2.0
"""MambaRadixCache: a radix tree over tokens with KV pages and state snapshots.

The tree stores where each prefix is and how recently it was used.  It accepts and
returns page and slot ids but owns no pool.  `HybridCache` counts references, so every
method here returns the ids that were added or removed.

Matching and inserting take time linear in the tokens compared, independent of the size
of the tree.  Locking and touching take constant time.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field

from hybrid_plugin.core.policy.aged_order import AgedOrder
from hybrid_plugin.core.policy.eviction import LeastRecentlyUsed
from hybrid_plugin.core.tree.events import EventLog
from hybrid_plugin.core.tree.evicted import NOTHING, Below, RecentlyEvicted
from hybrid_plugin.core.tree.node import ADMISSION, Node
from hybrid_plugin.core.tree.snapshot import Snapshot, SnapshotKind
from hybrid_plugin.core.tree.tokens import Pages, Tokens, common_units

_NO_PAGES: Pages = array("i")
_MOST_RANKED_ANEW = 32
"""Nodes that are looked at to find the next snapshots, besides one for each: where
prompts part for the first time, there are few."""
_FEW = 8
"""Snapshots that share KV, of which one less changes the others' shares noticeably."""


@dataclass(frozen=True, slots=True)
class Match:
    """The cached part of a token sequence."""

    length: int
    """Tokens that can be restored: with KV for all of them and a state after them."""
    node: Node | None
    """The node whose snapshot was taken after exactly `length` tokens.  Without need
    for snapshots, the node that contains position `length`."""
    pages: Pages
    """Ids of the whole pages up to `length`, to be shared."""
    tail_page: int | None
    """Id of the page with the remaining tokens, to be copied; None if there is none."""
    kv_length: int
    """Tokens in whole pages whose KV is in the tree, with or without a state.  If it
    exceeds `length`, an earlier sequence diverged there, after the last snapshot: a
    branch point."""
    kv_node: Node | None = field(default=None, compare=False)
    """The node in which `kv_length` lies."""

    @property
    def origin(self) -> SnapshotKind | None:
        """Kind of the snapshot that a sequence would resume from."""
        node = self.node
        return None if node is None or node.snapshot is None else node.snapshot.kind


@dataclass(frozen=True, slots=True)
class Evicted:
    """Ids that were removed from the tree."""

    pages: Pages
    snapshot: Snapshot | None = None


class MambaRadixCache:
    """Matching, insertion, splits and eviction order; makes no decisions about
    memory."""

    def __init__(
        self,
        page_size: int,
        *,
        needs_snapshots: bool = True,
        eviction: LeastRecentlyUsed | None = None,
    ) -> None:
        """Create an empty tree.

        Args:
            page_size: tokens in a page.
            needs_snapshots: whether a prefix can be resumed only at a snapshot.  With
                full attention alone it can be resumed at any page end.
            eviction: the eviction policy; by default recency.
        """
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1, got {page_size}")
        self.page_size = page_size
        self.needs_snapshots = needs_snapshots
        self.eviction = eviction if eviction is not None else LeastRecentlyUsed()
        self.events: EventLog | None = None
        """Where to note what can be resumed; nowhere by default."""
        self.evicted: RecentlyEvicted | None = None
        """What was evicted lately, if anybody asks for it."""
        self._beginnings: Counter[bytes] = Counter()
        """Number of namespaces by the bytes of a first page that they have."""
        self._roots: dict[Hashable, Node] = {}
        self._namespaces: dict[Node, Hashable] = {}
        self._leaves: AgedOrder[Node] = AgedOrder(self.eviction.rates)
        self._snapshots: AgedOrder[Node] = AgedOrder(self.eviction.rates)
        self._unranked: dict[Node, None] = {}
        """Nodes that have to be ranked anew before anything is evicted, or grows older:
        most nodes that a sequence touches, it touches more than once."""
        self.clock = 0
        """Increases with every use of a node; the upper bits count admissions."""
        self.version = 0
        """Increases whenever the result of a match could change."""

    # ------------------------------------------------------------------ lookup

    def match(self, namespace: Hashable, tokens: Tokens, limit: int) -> Match:
        """Find the longest prefix of `tokens` that can be restored.

        Args:
            namespace: must be equal for a match, besides the tokens (adapter, salt).
            tokens: the sequence.
            limit: restore at most this many tokens; an engine must compute at
                least one token to get logits.

        Changes nothing; call `touch` for a match that is used.
        """
        root = self._roots.get(namespace)
        if root is None:
            return Match(0, None, _NO_PAGES, None, 0)
        best: Node | None = None
        node, size, path = root, self.page_size, []
        while True:
            end = node.end
            if node.snapshot is not None and end <= limit:
                best = node
            if node.tails:
                best = self._longest_tail(node, tokens, limit) or best
            child = node.children.get(tokens[end : end + size].tobytes())
            if child is None:
                break
            path.append(child)
            if tokens[end : child.end] != child.tokens:
                end += size * common_units(tokens[end : child.end], child.tokens, size)
                break
            node = child
        if self.needs_snapshots:
            return self._resume_at(best, path, kv_length=end)
        return self._resume_at_page(path, min(end, limit // size * size), end)

    def _longest_tail(self, node: Node, tokens: Tokens, limit: int) -> Node | None:
        rest = tokens[node.end : min(node.end + self.page_size - 1, limit)]
        return node.longest_tail(rest)

    def _resume_at(self, best: Node | None, path: list[Node], kv_length: int) -> Match:
        last = path[-1] if path else None
        if best is None:
            return Match(0, None, _NO_PAGES, None, kv_length, last)
        whole = best.end - len(best.tokens) if best.is_tail else best.end
        pages = array("i")
        for node in path:
            if node.end > whole:
                break
            pages += node.pages
        tail_page = best.pages[0] if best.is_tail else None
        return Match(best.end, best, pages, tail_page, kv_length, last)

    def _resume_at_page(self, path: list[Node], length: int, kv_length: int) -> Match:
        pages = array("i")
        last: Node | None = None
        for node in path:
            if node.end - len(node.tokens) >= length:
                break
            pages += node.pages
            last = node
        whole = pages[: length // self.page_size]
        kv_node = path[-1] if path else None
        return Match(length, last, whole, None, kv_length, kv_node)

    # ------------------------------------------------------------------ change

    def insert(
        self,
        namespace: Hashable,
        tokens: Tokens,
        pages: Pages,
        after: Node | None = None,
    ) -> tuple[Node, Pages]:
        """Insert `tokens`, with one id of `pages` for each page of them.

        Args:
            namespace: as in `match`.
            tokens: the tokens after the end of `after`.
            pages: of these tokens.
            after: a node in the tree; the root by default.

        Returns:
            The node that ends exactly after `tokens` (`after` if empty), and the ids
            that were added: those of pages that were not in the tree yet.

        Raises:
            ValueError: if `tokens` is not a whole number of pages.
        """
        size = self.page_size
        if len(tokens) != len(pages) * size:
            raise ValueError(f"{len(tokens)} tokens do not fill {len(pages)} pages")
        node = after if after is not None else self._root(namespace)
        done = 0
        while done < len(tokens):
            key = tokens[done : done + size].tobytes()
            child = node.children.get(key)
            if child is None:
                taken = pages[done // size :]
                return self._grow(node, key, tokens[done:], taken), taken
            length = len(child.tokens)
            part = tokens[done : done + length]
            if part == child.tokens:
                node = child
            else:
                common = common_units(part, child.tokens, size)
                node, length = self._split(child, common), common * size
            done += length
        self.touch(node)
        return node, _NO_PAGES

    def insert_tail(self, node: Node, tokens: Tokens, page: int) -> tuple[Node, bool]:
        """Insert `tokens`, fewer than a page, below `node`.

        Returns:
            The tail, and whether `page` was added; an existing equal tail keeps its own
            page.  The caller must attach a snapshot to a new tail.
        """
        if not 0 < len(tokens) < self.page_size:
            raise ValueError(f"a tail of {len(tokens)} tokens is no part of a page")
        key = tokens.tobytes()
        tail = node.tails.get(key)
        if tail is not None:
            self.touch(tail)
            return tail, False
        pages = array("i", (page,))
        tail = Node(node, tokens, pages, node.end + len(tokens), is_tail=True)
        self._link(node, key, tail)
        if self.evicted is not None:
            self.evicted.take(self.evicted_below(node), key)
        return tail, True

    def cut(self, node: Node, length: int) -> Node:
        """The node that ends at `length`: `node`, or its upper part after a split."""
        if node.end == length:
            return node
        start = node.end - len(node.tokens)
        self.version += 1  # a match names the node that contains its end
        return self._split(node, (length - start) // self.page_size)

    def attach_snapshot(self, node: Node, snapshot: Snapshot) -> None:
        """Attach a snapshot to `node`, which has none."""
        if node.snapshot is not None or node.parent is None:
            raise ValueError("a snapshot needs a node other than the root without one")
        node.snapshot = snapshot
        node.has_lost_state = False
        snapshot.used_at = self._tick()
        # First: the counts do not fall in between where it takes another's place.
        self._recount(node)
        before = node.resumed_before()
        old = None if before is None else before.snapshot
        if old is not None and old.is_superseded_by(snapshot):
            self._supersede(before)
        self.rank(node)
        self._rank_below(node)
        self.version += 1
        if self.events is not None:
            self.events.attached(node, self._namespace_of(node))

    def detach_snapshot(self, node: Node) -> Evicted:
        """Remove the snapshot of `node`; a tail is removed as well."""
        snapshot = node.snapshot
        if snapshot is None:
            raise ValueError("the node has no snapshot")
        self._drop_snapshot(node)
        self.version += 1
        if node.is_tail:
            return Evicted(self._remove(node), snapshot)
        self.rank(node)
        return Evicted(_NO_PAGES, snapshot)

    def remove(self, leaf: Node) -> Pages:
        """Remove an unlocked leaf without a snapshot; return its pages."""
        if leaf.kv_lock or leaf.snapshot is not None or leaf.parent is None:
            raise ValueError("it is locked, has a snapshot or is the root")
        self.version += 1
        return self._remove(leaf)

    def path_of(self, node: Node) -> tuple[Hashable, Tokens, Pages]:
        """Namespace, tokens and pages from the root to the end of `node`."""
        parts = []
        while node.parent is not None:
            parts.append(node)
            node = node.parent
        tokens, pages = array("q"), array("i")
        for part in reversed(parts):
            tokens += part.tokens
            pages += part.pages
        return self._namespaces[node], tokens, pages

    def remember_evicted(self, most_tokens: int) -> None:
        """Remember what is evicted from now on, to explain misses.

        Args:
            most_tokens: as many as are remembered, 8 bytes each.
        """
        self.evicted = RecentlyEvicted(self.page_size, most_tokens)

    def begins_elsewhere(self, page: Tokens) -> bool:
        """Whether any namespace has something that begins with a page's tokens."""
        return page.tobytes() in self._beginnings

    def touch(self, node: Node) -> None:
        """Mark the path to `node` as just used.

        Only `node` is updated.  A parent inherits the latest use below it when it
        becomes a leaf; before that it cannot be evicted.
        """
        if node.parent is not None:
            node.used_at = self._tick()
            if node.is_leaf:
                self.rank(node)

    def touch_snapshot(self, node: Node) -> None:
        """Mark the snapshot of `node` as just taken again."""
        if node.snapshot is not None:
            node.snapshot.used_at = self._tick()
            node.snapshot.is_superseded = False
            self._recount(node)
            self.rank(node)

    def use_snapshot(self, node: Node) -> None:
        """Record that a sequence resumed from the snapshot, or builds on it."""
        snapshot = node.snapshot
        if snapshot is None:
            raise ValueError("the node has no snapshot")
        self.eviction.used(node, self.clock)
        snapshot.hits += 1
        self.touch_snapshot(node)

    def rank(self, node: Node) -> None:
        """Have `node` ranked anew, by what is known of it when its rank is needed."""
        self._unranked[node] = None

    # ------------------------------------------------------------------- locks

    def lock(self, node: Node) -> None:
        """Protect the KV of the whole path to `node` from eviction."""
        node.kv_lock += 1
        self._unrank_leaf(node)

    def unlock(self, node: Node) -> None:
        """Undo one `lock`."""
        if node.kv_lock <= node.state_lock:
            raise ValueError("the state lock would outlive the KV lock")
        node.kv_lock -= 1
        if not node.kv_lock:
            self.touch(node)

    def lock_first(self, node: Node | None, length: int) -> Node | None:
        """Lock the KV of the first `length` tokens of the path to a node.

        Args:
            node: whose path has so many; None if `length` is 0.
            length: at a page's end.

        Returns:
            The node that ends there, to be unlocked; None if there is nothing to lock.
        """
        while node is not None and node.end - len(node.tokens) >= length:
            node = node.parent
        if node is None or not length:
            return None
        base = self.cut(node, length)
        self.lock(base)
        return base

    def lock_state(self, node: Node) -> None:
        """Protect the snapshot of `node`, whose KV is locked, from eviction."""
        if node.state_lock >= node.kv_lock:
            raise ValueError("lock the KV of a node before its state")
        node.state_lock += 1
        self._unrank_snapshot(node)

    def unlock_state(self, node: Node) -> None:
        """Undo one `lock_state`."""
        if not node.state_lock:
            raise ValueError("the state is not locked")
        node.state_lock -= 1
        self.rank(node)

    # ---------------------------------------------------------------- eviction

    def evict_kv(self, wanted: int = 1) -> Evicted | None:
        """Evict from the unlocked leaf that is worth least.

        Args:
            wanted: number of pages needed.  A leaf without a snapshot loses at most
                that many, from its end.  A leaf with a snapshot is removed as a whole,
                because the snapshot is useless without the last page.

        Returns:
            The removed ids; None if nothing can be evicted.
        """
        leaf = self.next_leaf()
        if leaf is None:
            return None
        self.version += 1
        snapshot = leaf.snapshot
        if snapshot is None and not leaf.is_tail and wanted < len(leaf.pages):
            return Evicted(self._trim(leaf, wanted))
        self.eviction.evicted(leaf, self.clock)
        if snapshot is not None:
            self._drop_snapshot(leaf)
        self._remember(leaf)
        return Evicted(self._remove(leaf), snapshot)

    def evict_snapshot(self) -> Evicted | None:
        """Evict the unlocked snapshot that is worth least; None if there is none."""
        node = self.next_snapshot()
        if node is None:
            return None
        self.eviction.evicted(node, self.clock)
        if node.is_tail:
            self._remember(node)
        else:
            node.has_lost_state = True
        return self.detach_snapshot(node)

    def next_snapshot(self) -> Node | None:
        """The node whose snapshot would be evicted next; None if there is none."""
        return self._least_snapshot()[0]

    def next_leaf(self) -> Node | None:
        """The leaf that would be evicted next; None if there is none."""
        return self._least_leaf()[0]

    def snapshot_worth(self) -> float | None:
        """Worth of the snapshot that would be evicted next; None if there is none."""
        return self._least_snapshot()[1]

    def kv_worth(self) -> float | None:
        """Worth of the leaf that would be evicted next; None if there is none."""
        return self._least_leaf()[1]

    def snapshots(self) -> Iterator[Node]:
        """Nodes with an unlocked snapshot, in eviction order."""
        self._rank_all()
        return self._snapshots.ranked(self.admissions)

    def clear(self) -> list[Evicted]:
        """Remove everything, locked or not; return all removed ids."""
        evicted = [
            Evicted(node.pages, node.snapshot)
            for node in self.nodes()
            if node.parent is not None
        ]
        self._roots.clear()
        self._namespaces.clear()
        self._beginnings.clear()
        if self.evicted is not None:
            self.evicted.clear()
        self._reset_orders()
        self.version += 1
        if self.events is not None:
            self.events.cleared()
        return evicted

    def renumber(
        self,
        *,
        pages: Mapping[int, int] | None = None,
        slots: Mapping[int, int] | None = None,
        windows: Mapping[int, Mapping[int, int]] | None = None,
    ) -> None:
        """Replace ids of pages and slots; takes time linear in the size of the tree.

        Args:
            pages: new id by old id.
            slots: new id by old id.
            windows: new id by old id, by index of the window group.
        """
        pages, slots, windows = pages or {}, slots or {}, windows or {}
        for node in self.nodes():
            if pages and not pages.keys().isdisjoint(node.pages):
                node.pages = array("i", [pages.get(page, page) for page in node.pages])
            if node.snapshot is None:
                continue
            if node.snapshot.slot in slots:
                node.snapshot.slot = slots[node.snapshot.slot]
            for index, moved in windows.items():
                _renumber_window(node.snapshot, index, moved)
        self.version += 1

    def nodes(self) -> Iterator[Node]:
        """Every node, roots included, parents before children."""
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())
            stack.extend(node.tails.values())

    def leaves(self) -> Iterator[Node]:
        """Leaves that may be evicted, in eviction order."""
        self._rank_all()
        return self._leaves.ranked(self.admissions)

    # -------------------------------------------------------------------- ages

    @property
    def admissions(self) -> int:
        """Number of admissions so far, the unit of ages."""
        return self.clock // ADMISSION

    def begin_admission(self) -> None:
        """Count one admission."""
        self._rank_all()
        self.clock = (self.clock // ADMISSION + 1) * ADMISSION

    # ---------------------------------------------------------------- internal

    def _reset_orders(self) -> None:
        self._unranked.clear()
        for order in (self._leaves, self._snapshots):
            for node in order.ranked(self.admissions):
                order.discard(node, self.admissions)

    def _tick(self) -> int:
        self.clock += 1
        return self.clock

    def _root(self, namespace: Hashable) -> Node:
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = Node(None, array("q"), _NO_PAGES, 0)
            self._namespaces[root] = namespace
        return root

    def _grow(self, node: Node, key: bytes, tokens: Tokens, pages: Pages) -> Node:
        leaf = Node(node, tokens, pages, node.end + len(tokens))
        self._link(node, key, leaf)
        if self.evicted is not None:
            self._recompute(self.evicted, self.evicted_below(node), leaf)
        if self.events is not None and not self.needs_snapshots:
            self.events.stored(leaf, self._namespace_of(leaf))
        return leaf

    def _link(self, node: Node, key: bytes, leaf: Node) -> None:
        node.link(key, leaf)
        if node.parent is None and not leaf.is_tail:
            self._beginnings[key] += 1
        self._unrank_leaf(node)
        self.version += 1
        self.touch(leaf)

    def _split(self, lower: Node, pages: int) -> Node:
        """Split `lower` after `pages` pages; return the new upper node.

        `lower` remains the object with the same end, because locks and snapshots belong
        to the end.
        """
        parent = lower.parent
        assert parent is not None, "the root covers no tokens and is never split"
        size, cut = self.page_size, pages * self.page_size
        start = lower.end - len(lower.tokens)
        upper = Node(parent, lower.tokens[:cut], lower.pages[:pages], start + cut)
        upper.used_at = lower.used_at
        upper.needed_by = lower.needed_by
        upper.most_needed_by = lower.most_needed_by
        lower.tokens, lower.pages = lower.tokens[cut:], lower.pages[pages:]
        parent.link(upper.tokens[:size].tobytes(), upper)
        upper.link(lower.tokens[:size].tobytes(), lower)
        if self.events is not None:
            self.events.split(upper, lower, pages)
        return upper

    def _rank_all(self) -> None:
        for node in self._unranked:
            self._rank_leaf(node)
            self._rank_snapshot(node)
        self._unranked.clear()

    def _rank_leaf(self, node: Node) -> None:
        if node.is_leaf and not node.kv_lock and node.parent is not None:
            rank = self.eviction.leaf(node)
            # A snapshot is observed in the other order, and KV alone is not.
            self._leaves.put(node, rank, self.admissions, observed=False)

    def _rank_snapshot(self, node: Node) -> None:
        if node.snapshot is not None and not node.state_lock:
            rank = self.eviction.snapshot(node, node.snapshot)
            self._snapshots.put(node, rank, self.admissions)

    def _unrank_leaf(self, node: Node) -> None:
        self._leaves.discard(node, self.admissions)

    def _unrank_snapshot(self, node: Node) -> None:
        self._snapshots.discard(node, self.admissions)

    def _rank_below(self, node: Node) -> None:
        """Rank the next snapshots behind `node`, whose worth may have fallen."""
        below = [node]
        for _ in range(_MOST_RANKED_ANEW + node.needed_by):
            if not below:
                return
            node = below.pop()
            for child in (*node.children.values(), *node.tails.values()):
                if child.snapshot is not None:
                    self.rank(child)
                if child.needed_by and not child.is_wanted:
                    below.append(child)

    def _least_leaf(self) -> tuple[Node, float] | tuple[None, None]:
        self._rank_all()
        while (least := self._leaves.first(self.admissions)) is not None:
            rank = self.eviction.leaf(least[0])
            if rank.value <= self._leaves.rank(least[0]).value:
                return least
            self._rank_leaf(least[0])
        return None, None

    def _least_snapshot(self) -> tuple[Node, float] | tuple[None, None]:
        self._rank_all()
        while (least := self._snapshots.first(self.admissions)) is not None:
            node = least[0]
            assert node.snapshot is not None, "ranked nodes have one"
            rank = self.eviction.snapshot(node, node.snapshot)
            if rank.value <= self._snapshots.rank(node).value:
                return least
            self._rank_snapshot(node)
        return None, None

    def _drop_snapshot(self, node: Node) -> None:
        snapshot = node.snapshot
        if snapshot is not None and not snapshot.is_superseded:
            self._take_place_again(node.resumed_before(), snapshot)
        if snapshot is not None and self.events is not None:
            self.events.detached(node)
        self._unrank_snapshot(node)
        node.snapshot = None
        self._recount(node)

    def _recount(self, node: Node) -> None:
        """Count who needs the KV up to `node`, whose snapshot came, left or changed.

        Those that answer for more of it than before are ranked anew.  (Those that
        answer for less are, before they are evicted.)  Where many share it, one less
        changes little: they are ranked anew when half of the most there were have left.
        """
        change = node.needed_now() - node.needed_by
        above: Node | None = node
        highest: Node | None = None
        while change and above is not None:
            above.needed_by += change
            count = above.needed_by
            above.most_needed_by = max(above.most_needed_by, count)
            if change < 0 and (count <= _FEW or 2 * count <= above.most_needed_by):
                above.most_needed_by = count
                highest = above
            parent = above.parent
            above = None if parent is None or parent.is_wanted else parent
        if highest is not None:
            self._rank_below(highest)

    def _supersede(self, node: Node | None) -> None:
        """Note that a later snapshot takes the place of that of `node`."""
        if node is not None and node.snapshot is not None:
            node.snapshot.is_superseded = True
            self._recount(node)
            self.rank(node)

    def _take_place_again(self, node: Node | None, later: Snapshot) -> None:
        """Have that of `node` wanted as much as `later` was, which took its place.

        Who would have resumed from the later one resumes from this one now.
        """
        if node is None or node.snapshot is None or not node.snapshot.is_superseded:
            return
        node.snapshot.take_place_of(later)
        self._recount(node)
        self.rank(node)

    def _trim(self, leaf: Node, count: int) -> Pages:
        """Remove the last `count` pages of a leaf with more pages."""
        kept = len(leaf.pages) - count
        if self.events is not None:
            self.events.removed(leaf, kept)
        trimmed, cut = leaf.pages[kept:], kept * self.page_size
        if self.evicted is not None:
            place: Below = {}
            self.evicted.add(place, leaf.tokens[cut:], leaf.evicted)
            leaf.evicted = place
        leaf.pages, leaf.tokens = leaf.pages[:kept], leaf.tokens[:cut]
        leaf.end -= count * self.page_size
        leaf.has_lost_state = False
        return trimmed

    def _remove(self, node: Node) -> Pages:
        """Remove the leaf `node`; return its pages."""
        assert node.is_leaf, "KV is evicted from the leaves towards the root"
        parent = node.parent
        assert parent is not None, "the root is never removed"
        if self.events is not None and not node.is_tail:
            self.events.removed(node, 0)
        span = node.tokens if node.is_tail else node.tokens[: self.page_size]
        key = span.tobytes()
        parent.unlink(key, node)
        self._unrank_leaf(node)
        if parent.parent is None:
            if not node.is_tail:
                self._end_beginning(key)
            self._drop_empty_root(parent)
        elif parent.is_leaf:
            parent.used_at = max(parent.used_at, node.used_at)
            self.rank(parent)
        return node.pages

    def _drop_empty_root(self, root: Node) -> None:
        """Remove an empty namespace, because there may be many salts."""
        if root.is_leaf and root in self._namespaces:
            del self._roots[self._namespaces.pop(root)]

    def _end_beginning(self, key: bytes) -> None:
        self._beginnings[key] -= 1
        if not self._beginnings[key]:
            del self._beginnings[key]

    # ------------------------------------------- internal: what was evicted lately

    def evicted_below(self, node: Node) -> Below:
        """What was evicted behind a node."""
        if self.evicted is None or node.parent is not None:
            return node.evicted
        return self.evicted.below_root(self._namespaces[node])

    def _remember(self, leaf: Node) -> None:
        """Note that a leaf is evicted, before it is removed."""
        parent, evicted = leaf.parent, self.evicted
        if evicted is None:
            return
        assert parent is not None, "the root is never removed"
        if parent.parent is None:
            place = evicted.make_root(self._namespaces[parent])
        else:
            if parent.evicted is NOTHING:
                parent.evicted = {}
            place = parent.evicted
        evicted.add(place, leaf.tokens, leaf.evicted)

    def _recompute(self, evicted: RecentlyEvicted, place: Below, leaf: Node) -> None:
        """Take what a new leaf has out of what was evicted.

        It is split where other evicted tokens part from it.
        """
        size = self.page_size
        while True:
            one = evicted.take(place, leaf.tokens[:size].tobytes())
            if one is None:
                return
            common = size * common_units(leaf.tokens, one.tokens, size)
            place = one.behind
            if common < len(one.tokens):
                place = {}
                evicted.add(place, one.tokens[common:], one.behind)
            if common == len(leaf.tokens):
                leaf.evicted = place
                return
            if not place:
                return
            self._split(leaf, common // size).evicted = place

    def _namespace_of(self, node: Node) -> Hashable:
        while node.parent is not None:
            node = node.parent
        return self._namespaces[node]


def _renumber_window(snapshot: Snapshot, index: int, moved: Mapping[int, int]) -> None:
    held = snapshot.windows[index]
    if not moved.keys().isdisjoint(held):
        renamed = array("i", [moved.get(page, page) for page in held])
        windows = list(snapshot.windows)
        windows[index] = renamed
        snapshot.windows = tuple(windows)
