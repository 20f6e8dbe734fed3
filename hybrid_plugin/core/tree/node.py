# SPDX-License-Identifier: Apache-2.0
"""What the radix tree is made of."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import cast

from hybrid_plugin.core.tree.tokens import Pages, Tokens

ADMISSION = 1 << 20
"""What one admission adds to a tree's clock: more than it can have uses."""


@dataclass(slots=True, eq=False)
class Snapshot:
    """What the tree holds besides KV of all tokens, to resume at one position."""

    slot: int
    """The state; the reserved slot for a model without state layers."""
    windows: tuple[Pages, ...] = ()
    """Per window group, the pages that it needs to go on, in order."""
    used_at: int = 0
    """The tree's clock when it was taken, taken again or resumed from."""
    hits: int = 0
    """Sequences that resumed from it."""
    is_turn_end: bool = False
    """Whether a sequence that ended here donated it."""
    is_superseded: bool = False
    """Whether nobody is expected to want it any more."""

    @property
    def is_shared(self) -> bool:
        """Whether others than the next turn of one chat resumed from it."""
        return self.hits > self.is_turn_end


_NONE = cast("dict[bytes, Node]", MappingProxyType({}))


def _none() -> dict[bytes, Node]:
    """Most nodes are leaves: they share one empty mapping."""
    return _NONE


@dataclass(slots=True, eq=False)
class Node:
    """One edge of the tree together with the node at its end.

    A *segment* covers one or more whole pages of tokens and has a page for
    each.  A *tail* covers fewer tokens than a page, hangs at the end of a
    segment (or of the root), holds one page of which only the first tokens
    count, and exists for its snapshot alone.
    """

    parent: Node | None
    tokens: Tokens
    pages: Pages
    end: int
    """Tokens from the root to the end of this node."""
    is_tail: bool = False
    children: dict[bytes, Node] = field(default_factory=_none)
    """Segments below, by the bytes of the tokens of their first page."""
    tails: dict[bytes, Node] = field(default_factory=_none)
    """Tails below, by the bytes of all their tokens."""
    snapshot: Snapshot | None = None
    """Without one, the node is a tombstone: its KV alone resumes nothing."""
    kv_lock: int = 0
    """Sequences whose shared prefix ends here.  What lies before is safe too:
    leaves are evicted before their parents."""
    state_lock: int = 0
    """Admissions in progress that read the snapshot."""
    used_at: int = 0
    """The tree's clock when a sequence last came or ended here."""

    @property
    def is_leaf(self) -> bool:
        return not self.children and not self.tails

    def link(self, key: bytes, child: Node) -> None:
        """Put `child` below this node."""
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
        """Take `child` out from below this node."""
        child.parent = None
        if child.is_tail:
            del self.tails[key]
        else:
            del self.children[key]

    def resume_before(self) -> int:
        """Tokens at the nearest snapshot on the path before this node; 0 for none.

        Superseded ones do not count: they are the first to go.
        """
        node = self.parent
        while node is not None:
            if node._is_wanted():
                return node.end
            node = node.parent
        return 0

    def alone(self) -> int:
        """Tokens up to this node's end that nothing else needs.

        They begin where another path branches off, or at the nearest snapshot.
        """
        node = self
        while (parent := node.parent) is not None:
            if len(parent.children) + len(parent.tails) > 1 or parent._is_wanted():
                return self.end - parent.end
            node = parent
        return self.end

    def _is_wanted(self) -> bool:
        return self.snapshot is not None and not self.snapshot.is_superseded
