# SPDX-License-Identifier: Apache-2.0
"""The classes of cached content whose reuse is learned, and what is assumed of them.

A snapshot's class is the kind of its position, and its history: whether a later one
superseded it, whether it was used, and, as long as it was not, what kind of snapshot
its own sequence had resumed from.  The end of a conversation's second turn is mostly
resumed, the end of an answer about a shared document hardly ever.  Snapshots whose use
an application promised are classes of their own, by the magnitude of the TTL.
"""

from __future__ import annotations

from collections.abc import Hashable

from hybrid_plugin.core.tree.snapshot import Snapshot, SnapshotKind

KV_ALONE: Hashable = "KV alone"
"""KV without a snapshot behind it.  It is used when a sequence branches off there."""


def class_of(snapshot: Snapshot) -> Hashable:
    """The class of a snapshot."""
    if snapshot.promise is not None and snapshot.is_promised:
        return snapshot.kind, _PROMISED, snapshot.promise.magnitude
    if snapshot.is_superseded:
        return snapshot.kind, "superseded", None
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


def promised_magnitude(kind: Hashable) -> int | None:
    """Of the TTLs of a class, by powers of two of seconds; None without a promise."""
    if isinstance(kind, tuple) and kind[1] is _PROMISED:
        magnitude: int = kind[2]
        return magnitude
    return None


def assumed_chance(kind: Hashable) -> float:
    """Chance that content of a class is used, before much of it was observed.

    Rounded from what was seen with unlimited memory in the workloads of
    `benchmarks/cache_curves.py`; a few observations outweigh it.
    """
    if not isinstance(kind, tuple):
        return 0.1
    name, history, detail = kind
    if history == "superseded":
        return 0.03
    if history == _PROMISED:
        return _CHANCE_OF_PROMISED
    if history == "used":
        return _USED.get(name, 0.75)
    return _UNUSED.get((name, detail), _UNUSED_OF_ANY_ORIGIN.get(name, 0.75))


_PROMISED = "promised"
_CHANCE_OF_PROMISED = 0.75
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
