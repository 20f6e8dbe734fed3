# SPDX-License-Identifier: Apache-2.0
"""What the cache knows of a sequence: before, at and after its admission."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

from hybrid_plugin.core.memory.window_tables import WindowDemand, WindowTable
from hybrid_plugin.core.tree.node import Node
from hybrid_plugin.core.tree.promise import Promise
from hybrid_plugin.core.tree.radix import Match
from hybrid_plugin.core.tree.snapshot import SnapshotKind
from hybrid_plugin.core.tree.tokens import Pages, Tokens
from hybrid_plugin.core.verification import Verification


@dataclass(frozen=True, slots=True)
class LookUp:
    """What a sequence that is not admitted yet can expect."""

    length: int
    """Tokens of the sequence."""
    namespace: Hashable
    match: Match
    planned: Mapping[int, SnapshotKind]
    """Kinds of the snapshots that its prefill should pause for, by position."""
    version: int
    """Of the tree, when this was looked up."""
    tokens: Tokens
    ttl: float | None = None
    """Seconds after its end within which the application promises to continue it; 0 if
    nobody will."""
    named: tuple[int, ...] = ()
    """Where the snapshots may lie that the application asked for."""
    limit: int = 0
    """Tokens that may be restored, at most; 0 where nothing may."""
    may_hit: bool = True
    """Whether it was looked up at all."""

    @property
    def snapshot_positions(self) -> tuple[int, ...]:
        """Positions at which its prefill should pause for a snapshot, ascending."""
        return tuple(self.planned)

    @property
    def origin(self) -> SnapshotKind | None:
        """Kind of the snapshot that it would resume from."""
        return self.match.origin


@dataclass(frozen=True, slots=True)
class Admission:
    """What a sequence got on admission."""

    pages: Pages
    slot: int
    hit: int
    """Tokens that it resumes behind."""
    from_host: int = 0
    """Of those, tokens that host memory brought for it."""
    fetched: int = 0
    """Of those, tokens that a tier behind the host brought for it."""
    fetched_from: str = ""
    """Name of that tier."""


@dataclass(slots=True)
class LiveSequence:
    """A live sequence and what it owns."""

    namespace: Hashable
    pages: Pages
    slot: int
    hit: int
    planned: dict[int, SnapshotKind]
    """Kinds of the snapshots that its prefill pauses for, by position, ascending."""
    prompt_length: int
    locked: Node | None
    """The node that keeps its shared prefix in the tree."""
    cacheable: bool
    in_tree: int = 0
    """Tokens of it that were inserted into the tree so far."""
    origin: SnapshotKind | None = None
    """Kind of the snapshot it resumed from."""
    prompt: Tokens = field(default_factory=lambda: array("q"))
    """Its tokens, until all are computed."""
    computed: int = 0
    """Tokens of the prompt that are computed or on the way."""
    last_snapshot: int = 0
    """Tokens of it at the last position worth a snapshot."""
    reserved: int = 0
    """Pages in all that there had to be room for when it was admitted."""
    windows: tuple[WindowTable, ...] = ()
    """Its pages in each window group."""
    window_demand: WindowDemand | None = None
    """What is reserved for it in each window group, if anything."""
    is_last_turn: bool = False
    """Whether the application says that nobody will continue it."""
    promise: Promise | None = None
    """That it will be continued."""
    admitted_at: int = 0
    """Clock value of the tree."""
    drafts: list[int] = field(default_factory=list)
    """Slots lent for the states after its drafts: columns 1, 2, ..."""
    refused_pages: int = 0
    """Pages in all for which it found no room last, with nothing else live."""
    steps: Verification | None = None
    """Its steps, once the first was noted with `HybridCache.verify`."""

    @property
    def snapshot_positions(self) -> tuple[int, ...]:
        """Positions at which its prefill pauses for a snapshot, ascending."""
        return tuple(self.planned)

    @property
    def is_prefilling(self) -> bool:
        """Whether some of its prompt is neither computed nor on the way."""
        return self.in_tree < self.prompt_length

    @property
    def promised(self) -> int:
        """Pages that it will take for the rest of its prompt."""
        return max(self.reserved - len(self.pages), 0)

    @property
    def locked_tokens(self) -> int:
        """Tokens of its prefix that the tree surely has."""
        return 0 if self.locked is None else self.locked.end

    def forget_prompt(self) -> None:
        """Note that all of its prompt was computed, and what of it counts is cached."""
        self.in_tree = self.prompt_length
        self.planned = {}
        self.prompt = array("q")
