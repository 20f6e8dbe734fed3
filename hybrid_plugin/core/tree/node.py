# SPDX-License-Identifier: Apache-2.0
"""Nodes of the radix tree."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import cast

from hybrid_plugin.core.tree.evicted import Below, nothing
from hybrid_plugin.core.tree.snapshot import Snapshot
from hybrid_plugin.core.tree.tokens import Pages, Tokens

ADMISSION = 1 << 20
"""Clock ticks per admission; more than the uses within one admission."""


def admissions_between(then: int, now: int) -> int:
    """Number of admissions between two values of the tree's clock."""
    return now // ADMISSION - then // ADMISSION


_NONE = cast("dict[bytes, Node]", MappingProxyType({}))


def _none() -> dict[bytes, Node]:
    """One empty mapping that all leaves share, to save memory."""
    return _NONE


@dataclass(slots=True, eq=False)
class Node:
    """One edge of the tree together with the node at its end.

    A *segment* covers one or more whole pages of tokens and has an id for each.  A
    *tail* is a child of a segment or of the root, covers fewer tokens than a page, and
    exists only for its snapshot.  Only the first tokens of its page are valid.
    """

    parent: Node | None
    tokens: Tokens
    pages: Pages
    end: int
    """Number of tokens from the root to the end of this node."""
    is_tail: bool = False
    children: dict[bytes, Node] = field(default_factory=_none)
    """Child segments, by the bytes of the tokens of their first page."""
    tails: dict[bytes, Node] = field(default_factory=_none)
    """Child tails, by the bytes of all their tokens."""
    snapshot: Snapshot | None = None
    """None for a tombstone: its KV alone cannot be resumed from."""
    kv_lock: int = 0
    """Number of sequences whose shared prefix ends here.  This protects the path as
    well, because leaves are evicted before their parents."""
    state_lock: int = 0
    """Number of admissions in progress that read the snapshot."""
    used_at: int = 0
    """Clock value when a sequence last reached this node or ended here."""
    has_lost_state: bool = False
    """Whether there was a snapshot here that was evicted."""
    needed_by: int = 0
    """Number of wanted snapshots at this node or below, of those that lie one behind
    another the first alone: all that cannot be resumed from without this node's KV."""
    most_needed_by: int = 0
    """The most that `needed_by` was since the snapshots behind this node were ranked
    for its sake."""
    evicted: Below = field(default_factory=nothing)
    """What was evicted behind this node lately; not for roots."""

    @property
    def page_size(self) -> int:
        """Tokens in a page, as a segment's are full."""
        assert self.pages, "a segment has pages"
        return len(self.tokens) // len(self.pages)

    @property
    def is_leaf(self) -> bool:
        return not self.children and not self.tails

    def link(self, key: bytes, child: Node) -> None:
        """Add `child` below this node."""
        child.parent = self
        if child.is_tail:
            if self.tails is _NONE:
                self.tails = {}
            self.tails[key] = child
        else:
            if self.children is _NONE:
                self.children = {}
            self.children[key] = child

    def unlink(self, key: bytes, child: Node) -> None:
        """Remove `child` from this node."""
        child.parent = None
        if child.is_tail:
            del self.tails[key]
        else:
            del self.children[key]

    def resume_before(self) -> int:
        """Position of the nearest snapshot before this node on its path; 0 for none.

        Superseded ones count for a superseded one alone, because they are evicted
        before others.
        """
        counts_all = self.snapshot is not None and self.snapshot.is_superseded
        node = self.parent
        while node is not None:
            if node.is_wanted or (counts_all and node.snapshot is not None):
                return node.end
            node = node.parent
        return 0

    def longest_tail(self, tokens: Tokens) -> Node | None:
        """The longest tail of this node with which tokens begin.

        Takes time linear in the tails or in the tokens, whichever are fewer.
        """
        if len(self.tails) < len(tokens):
            fitting = [
                tail
                for tail in self.tails.values()
                if tokens[: len(tail.tokens)] == tail.tokens
            ]
            return max(fitting, key=lambda tail: len(tail.tokens), default=None)
        key, width = tokens.tobytes(), tokens.itemsize
        for length in range(len(tokens), 0, -1):
            tail = self.tails.get(key[: length * width])
            if tail is not None:
                return tail
        return None

    def last_pages(self, count: int) -> Pages:
        """The last `count` pages of the path to this node's end."""
        node, found = self, self.pages
        while len(found) < count:
            assert node.parent is not None, "the path has as many"
            node = node.parent
            found = node.pages + found
        return found[len(found) - count :]

    def share(self) -> float:
        """Tokens of KV that a snapshot at this node's end answers for.

        They begin behind the nearest wanted snapshot before it, or at the root.  Where
        several snapshots need them, each answers for an equal part: that none of them
        alone keeps the KV does not make it free.  Takes time linear in the nodes.
        """
        more = 0 if self.is_wanted else 1 - self.needed_by
        node, share = self, 0.0
        while node.parent is not None:
            share += len(node.tokens) / (node.needed_by + more)
            node = node.parent
            if node.is_wanted:
                break
        return share

    def needed_now(self) -> int:
        """What `needed_by` has to be, by those of the nodes below."""
        if self.is_wanted:
            return 1
        below = (*self.children.values(), *self.tails.values())
        return sum(child.needed_by for child in below)

    def resumed_before(self) -> Node | None:
        """The nearest node with a snapshot before this one that only leads here.

        None if other paths lead on from there, or if there is none.  Takes time linear
        in the nodes between.
        """
        node = self
        while (parent := node.parent) is not None:
            before = parent._tail_before(node)
            if before is not None:
                return None if parent._goes_on(before, node) else before
            if parent.parent is None or parent._branches(node):
                return None
            if parent.snapshot is not None:
                return parent
            node = parent
        return None

    def _branches(self, child: Node) -> bool:
        """Whether paths other than that to `child` begin here."""
        if len(self.children) > (not child.is_tail):
            return True
        return any(tail is not child and tail.is_wanted for tail in self.tails.values())

    def _tail_before(self, child: Node) -> Node | None:
        """The longest tail of this node that the path to `child` continues."""
        page = len(child.tokens) if child.is_tail else child.page_size
        return self.longest_tail(child.tokens[: page - 1])

    def _goes_on(self, tail: Node, child: Node) -> bool:
        """Whether a path other than that to `child` continues a tail of this node."""
        length = len(tail.tokens)
        return any(
            other is not child
            and other is not tail
            and other.tokens[:length] == tail.tokens
            for other in (*self.children.values(), *self.tails.values())
        )

    @property
    def is_wanted(self) -> bool:
        """Whether there is a snapshot that none took the place of."""
        return self.snapshot is not None and not self.snapshot.is_superseded
