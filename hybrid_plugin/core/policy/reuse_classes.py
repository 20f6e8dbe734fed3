# SPDX-License-Identifier: Apache-2.0
"""The classes of cached content whose reuse is learned, and what is assumed of them.

A snapshot's class is the kind of its position, and its history: whether a later one
superseded it, whether it was used, and, as long as it was not, what kind of snapshot
its own sequence had resumed from.  The end of a conversation's second turn is mostly
resumed, the end of an answer about a shared document hardly ever.  Snapshots whose use
an application promised are classes of their own (`PromisedClass`).
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from hybrid_plugin.core.tree.snapshot import Snapshot, SnapshotKind

KV_ALONE: Hashable = "KV alone"
"""KV without a snapshot behind it, which is worth nothing, whatever its rate of use."""


class PromisedClass(NamedTuple):
    """The class of snapshots that an application promised to use within a TTL."""

    kind: SnapshotKind
    """Of their position."""
    magnitude: int
    """Of the TTL: it is less than 2**`magnitude` seconds."""
    has_begun: bool
    """Whether the TTL has; it does when the request ends."""


def class_of(snapshot: Snapshot) -> Hashable:
    """The class of a snapshot."""
    if snapshot.is_superseded:
        return snapshot.kind, "superseded", None
    promise = snapshot.promise
    if promise is not None:
        begun = promise.until is not None
        return PromisedClass(snapshot.kind, promise.magnitude, begun)
    if snapshot.hits:
        return used_class(snapshot.kind)
    return unused_class(snapshot.kind, snapshot.origin)


def unused_class(kind: SnapshotKind, origin: SnapshotKind | None) -> Hashable:
    """The class of snapshots that were not used yet.

    Args:
        kind: of their position.
        origin: kind of the snapshot that their sequence resumed from; None for none.
    """
    return kind, "unused", origin


def used_class(kind: SnapshotKind) -> Hashable:
    """The class of snapshots that were used."""
    return kind, "used", None


def assumed_chance(kind: Hashable) -> float:
    """Chance that content of a class is used, before much of it was observed.

    Rounded from what was seen with unlimited memory in the workloads of
    `benchmarks/cache_curves.py`; a few observations outweigh it.
    """
    if not isinstance(kind, tuple):
        return 0.1
    if isinstance(kind, PromisedClass):
        return _PROMISED
    name, history, detail = kind
    if history == "superseded":
        return 0.03
    if history == "used":
        return _USED.get(name, 0.75)
    return _UNUSED.get((name, detail), _UNUSED_OF_ANY_ORIGIN.get(name, 0.75))


_PROMISED = 0.75
"""That of conversations.  A promised use is certain; this is when it is assumed."""
_USED = {SnapshotKind.TURN_END: 0.05, SnapshotKind.PROMPT_END: 0.2}
_UNUSED = {
    (SnapshotKind.TURN_END, SnapshotKind.TURN_END): 0.75,
    (SnapshotKind.TURN_END, SnapshotKind.PROMPT_END): 0.5,
    (SnapshotKind.TURN_END, SnapshotKind.REQUESTED): 0.4,
    (SnapshotKind.TURN_END, None): 0.25,
    (SnapshotKind.PROMPT_END, SnapshotKind.PROMPT_END): 0.75,
    (SnapshotKind.PROMPT_END, SnapshotKind.BRANCH): 0.4,
    (SnapshotKind.PROMPT_END, SnapshotKind.REQUESTED): 0.4,
}
"""By kind and origin."""
_UNUSED_OF_ANY_ORIGIN = {
    SnapshotKind.TURN_END: 0.05,
    SnapshotKind.PROMPT_END: 0.05,
    SnapshotKind.BODY: 0.5,
    SnapshotKind.CHUNK_END: 0.1,
}
