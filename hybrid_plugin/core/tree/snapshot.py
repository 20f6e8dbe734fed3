# SPDX-License-Identifier: Apache-2.0
"""Snapshots: what is kept to resume at one position."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from hybrid_plugin.core.tree.promise import Promise
from hybrid_plugin.core.tree.tokens import Pages


class SnapshotKind(StrEnum):
    """What position a snapshot was taken at; see `policy.snapshot_positions`."""

    TURN_END = "turn end"
    PROMPT_END = "prompt end"
    BODY = "body"
    BRANCH = "branch"
    SYSTEM = "system"
    REQUESTED = "requested"
    CHUNK_END = "chunk end"

    # Kinds are looked up many times per request; that of Enum is no built-in function.
    __hash__ = str.__hash__


@dataclass(slots=True, eq=False)
class Snapshot:
    """Everything besides full-attention KV that is needed to resume at one position."""

    slot: int
    """Slot with the state; the reserved slot for a model without state layers."""
    windows: tuple[Pages, ...] = ()
    """Per window group, the pages that are needed to resume, in order."""
    kind: SnapshotKind = SnapshotKind.REQUESTED
    origin: SnapshotKind | None = None
    """Kind of the snapshot that its sequence had resumed from; None for none."""
    used_at: int = 0
    """Clock value when it was taken, taken again or resumed from."""
    hits: int = 0
    """Number of sequences that resumed from it."""
    restored: int = 0
    """Tokens for which the first sequence that resumes from it on the device is served
    by another tier.  0 on the host."""
    fetched: int = 0
    """Of those, tokens that a tier behind the host brought."""
    source: str = ""
    """Name of that tier."""
    is_superseded: bool = False
    """Whether a later snapshot took its place."""
    promise: Promise | None = None
    """That it will be used; None for none, or if it was used, or the TTL ended."""

    def is_superseded_by(self, later: Snapshot) -> bool:
        """Whether a later snapshot takes its place, if all known paths lead there.

        The next turn's end takes the place of one that it alone resumed from, the next
        chunk end that of one that nobody resumed from, and a branch point that was
        found that of a guess, such as a body.
        """
        if self.kind is later.kind is SnapshotKind.CHUNK_END:
            return not self.hits
        if self.kind is later.kind:
            return self.hits == 1 and self.kind in _FOLLOWED
        return self.hits > 0 and self.kind in _GUESSED and later.kind in _FOUND

    def take_place_of(self, later: Snapshot) -> None:
        """Serve those for whom `later` was, which superseded this one and left."""
        self.is_superseded = False
        self.hits, self.origin = later.hits, later.origin
        self.used_at = later.used_at


_FOLLOWED = (SnapshotKind.TURN_END, SnapshotKind.PROMPT_END)
_FOUND = (SnapshotKind.BRANCH, SnapshotKind.REQUESTED, SnapshotKind.SYSTEM)
_GUESSED = (SnapshotKind.BODY, SnapshotKind.CHUNK_END, SnapshotKind.PROMPT_END)
