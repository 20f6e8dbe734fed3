# SPDX-License-Identifier: Apache-2.0
"""What the cache knows of a sequence: before, at and after its admission."""

from __future__ import annotations

from array import array
from collections.abc import Hashable
from dataclasses import dataclass, field

from hybrid_plugin.core.memory.window_tables import WindowDemand, WindowTable
from hybrid_plugin.core.tree.node import Node, Snapshot
from hybrid_plugin.core.tree.radix import Match
from hybrid_plugin.core.tree.tokens import Pages, Tokens


@dataclass(frozen=True, slots=True)
class LookUp:
    """What a sequence that is not admitted yet can expect."""

    length: int
    """Tokens of the sequence."""
    namespace: Hashable
    match: Match
    snapshot_positions: tuple[int, ...]
    """Positions at which its prefill should pause for a snapshot."""
    version: int
    """Of the tree, when this was looked up."""
    tokens: Tokens

    @property
    def branch(self) -> int:
        """Tokens from its hit to where it parts from a sequence seen before.

        0 if no snapshot is planned there.
        """
        first = self.snapshot_positions[0] if self.snapshot_positions else 0
        parts = self.match.length < first <= self.match.kv_length
        return first - self.match.length if parts else 0


@dataclass(frozen=True, slots=True)
class Admission:
    """What a sequence got on admission."""

    pages: Pages
    slot: int
    hit: int


@dataclass(slots=True)
class LiveSequence:
    """A live sequence and what it owns."""

    namespace: Hashable
    pages: Pages
    slot: int
    hit: int
    snapshot_positions: tuple[int, ...]
    prompt_length: int
    locked: Node | None
    """The node that keeps its shared prefix in the tree."""
    cacheable: bool
    in_tree: int = 0
    """Tokens of it that were inserted into the tree so far."""
    origin: Node | None = None
    """The node it resumed from."""
    prompt: Tokens = field(default_factory=lambda: array("q"))
    """Its tokens, until all are computed."""
    computed: int = 0
    """Tokens of the prompt that are computed or on the way."""
    last_snapshot: int = 0
    """Tokens of it at the last position worth a snapshot."""
    reserved: int = 0
    """Pages in all that there had to be room for when it was admitted."""
    last_chunk_end: tuple[Node, Snapshot] | None = None
    """The last chunk end that it gave a snapshot, and that snapshot."""
    windows: tuple[WindowTable, ...] = ()
    """Its pages in each window group."""
    window_demand: WindowDemand | None = None
    """What is reserved for it in each window group, if anything."""

    @property
    def promised(self) -> int:
        """Pages that it will take for the rest of its prompt."""
        return max(self.reserved - len(self.pages), 0)

    @property
    def locked_tokens(self) -> int:
        """Tokens of its prefix that the tree surely has."""
        return 0 if self.locked is None else self.locked.end
