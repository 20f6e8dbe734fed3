# SPDX-License-Identifier: Apache-2.0
"""The disk as a tier: what is there, what goes, and what a sequence finds.

It decides for all ranks and does no I/O: ranks write, read and remove files as they are
told to (`BundleShelf`).  Where each rank decides for itself, all decide alike.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace

from hybrid_plugin.core.stats import OuterStats
from hybrid_plugin.core.tiers.outer_tier import StoredBundle, Storing
from hybrid_plugin.core.tree.tokens import Tokens
from hybrid_plugin.tiers.bundle import Layouts
from hybrid_plugin.tiers.describe import frame_bytes
from hybrid_plugin.tiers.failure import Reason
from hybrid_plugin.tiers.identity import Identity
from hybrid_plugin.tiers.index import BundleIndex, Entry
from hybrid_plugin.tiers.keys import BundleName, name_of

_SOUND: tuple[str, ...] = (Reason.OTHER_TOKENS, Reason.LAYOUT)
"""A bundle that could not be read for these is in order; any other is removed, so that
nobody waits for it again."""
_TRANSFERS = 16
"""Of which the rate is taken: the last ones."""


class DiskTier:
    """What `OuterTier` asks for, of files in a folder.

    Of a bundle every rank has a file with its part.  The files of all ranks on this
    machine share one size, which they never exceed: those least recently used go first,
    and who uses a bundle uses those before it, so ends go before beginnings.  Files of
    other models count, and go like any others.
    """

    name = "disk"
    keeps_bundles = True
    offers_bundles = False
    is_divisible = False

    def __init__(
        self,
        entries: Iterable[Entry],
        budget: int,
        identity: Identity,
        layouts: Mapping[str, Layouts],
        read_bytes_per_second: float,
    ) -> None:
        """Begin with what is there; `trim` says what of it must go.

        Args:
            entries: of `TierFolder`, the least recently used first.
            budget: bytes that all files may have together.
            identity: whose bundles are found and stored, of any of its ranks.
            layouts: of all ranks whose files share the budget, by their names.
            read_bytes_per_second: that a rank reads while the others do, as measured.
        """
        self.stats = OuterStats()
        self.version = 0
        self._budget = budget
        self._identity = identity
        self._fingerprint = identity.fingerprint()
        self._layouts = dict(layouts)
        self._index = BundleIndex()
        self._pending: set[str] = set()
        """Keys of what is being stored."""
        # A second of reading, as much as the first fetches are worth.
        self._reads = deque([(read_bytes_per_second, 1.0)], maxlen=_TRANSFERS)
        entries = list(entries)
        for entry in entries:
            self._index.add(entry)
        for entry in entries:  # what comes before counts as used later
            self._use(entry.name.key)

    # ----------------------------------------------------------------- numbers

    @property
    def used_bytes(self) -> int:
        """Bytes of all files, those that are being written included."""
        return self._index.used_bytes

    @property
    def count(self) -> int:
        """Bundles, those that cannot be read here included."""
        return len(self._index)

    @property
    def read_bytes_per_second(self) -> float:
        """That a rank reads while the others do: of the last transfers together."""
        size, seconds = map(sum, zip(*self._reads, strict=True))
        return size / seconds

    # ----------------------------------------------------------------- finding

    def trim(self) -> Sequence[str]:
        """Keys to discard before anything is written: what is too much at the start."""
        return self._make_room(0, ())

    def renew(self, update: str) -> None:
        """Find and store for other weights from now on.

        Args:
            update: `Identity.update`.
        """
        self._identity = replace(self._identity, update=update)
        self._fingerprint = self._identity.fingerprint()
        self.version += 1

    def find(
        self, namespace: Hashable, tokens: Tokens, limit: int
    ) -> Sequence[StoredBundle]:
        """See `OuterTier.find`; what has no name on disk has no bundles there."""
        try:
            path = self._index.longest(self._fingerprint, namespace, tokens, limit)
        except TypeError:  # no such name
            return ()
        return [
            StoredBundle(entry.name.text, entry.start, entry.end)
            for entry in path or ()
        ]

    def patience(self, computing: float) -> float:
        """As long as computing takes: nobody is served later than twice the time."""
        return computing

    def fetched(self, keys: Sequence[str], size: int, seconds: float | None) -> None:
        """See `OuterTier.fetched`."""
        for key in keys:
            self._use(_file_key(key))
        if seconds:
            self._reads.append((size, seconds))

    def fetch_failed(self, key: str, reason: str) -> Sequence[str]:
        """See `OuterTier.fetch_failed`."""
        entry = self._index.get(_file_key(key))
        if entry is None or not entry.is_usable:
            return ()  # evicted, or stored anew, since it was found
        self.version += 1
        if reason in _SOUND:
            self._index.show(entry.name.key, is_usable=False)
            return ()
        self._index.remove(entry.name.key)
        return (key,)

    # ----------------------------------------------------------------- storing

    def begin_store(
        self, namespace: Hashable, tokens: Tokens, start: int, size: int
    ) -> Storing | None:
        """See `OuterTier.begin_store`.

        Refused is what is stored, what has no name on disk, what is behind a gap, and
        what is larger than the budget leaves.
        """
        try:
            name = name_of(self._fingerprint, namespace, tokens, start)
        except TypeError:
            return None
        return self._begin(name, start, len(tokens), size)

    def stored(self, key: str, seconds: float | None) -> None:
        """See `OuterTier.stored`."""
        own = _file_key(key)
        self._pending.discard(own)
        self._index.show(own, is_usable=True)
        self._use(own)
        self.version += 1

    def store_failed(self, key: str, reason: str) -> Sequence[str]:
        """See `OuterTier.store_failed`."""
        own = _file_key(key)
        self._pending.discard(own)
        self._index.remove(own)
        return (key,)

    def clear(self) -> Sequence[str]:
        """See `OuterTier.clear`; the bundles of other models stay."""
        self.version += 1
        own = [
            entry
            for entry in self._index.oldest()
            if entry.name.fingerprint == self._fingerprint
            and entry.name.key not in self._pending
        ]
        return self._gone(own)

    # ---------------------------------------------------------------- internal

    def _begin(
        self, name: BundleName, start: int, end: int, size: int
    ) -> Storing | None:
        old = self._index.get(name.key)
        before = self._index.path_to(name.parent) if name.parent else ()
        if before is None or name.key in self._pending:
            return None
        if self._index.path_to(name.key) is not None:
            return None
        entry = Entry(name, start, end, self._file_bytes(name, start, end, size), False)
        kept = self._kept(before)
        if entry.file_bytes > self._budget - sum(each.file_bytes for each in kept):
            return None
        replaced = () if old is None else self._gone([old])
        discard = (*replaced, *self._make_room(entry.file_bytes, kept))
        self._index.add(entry)
        self._pending.add(name.key)
        self._index.use(before)
        return Storing(name.text, discard)

    def _file_bytes(self, name: BundleName, start: int, end: int, size: int) -> int:
        """Bytes of all ranks' files, or a little more."""
        return sum(
            size + frame_bytes(name, start, end, rank, own)
            for rank, own in self._layouts.items()
        )

    def _kept(self, before: Iterable[Entry]) -> list[Entry]:
        """What nothing makes room for: what is being stored, and what comes before."""
        kept = {entry.name.key: entry for entry in before}
        for key in self._pending:
            entry = self._index.get(key)
            while entry is not None and entry.name.key not in kept:
                kept[entry.name.key] = entry
                entry = self._index.get(entry.name.parent)
        return list(kept.values())

    def _make_room(self, size: int, kept: Iterable[Entry]) -> tuple[str, ...]:
        """Let go what was not used for the longest time.

        Args:
            size: bytes that are to be had.
            kept: what stays.

        Returns:
            Keys to discard.
        """
        spared = {entry.name.key for entry in kept}
        excess = self._index.used_bytes + size - self._budget
        victims = []
        for entry in self._index.oldest():
            if excess <= 0:
                break
            if entry.name.key not in spared:
                victims.append(entry)
                excess -= entry.file_bytes
        return self._gone(victims)

    def _gone(self, entries: Iterable[Entry]) -> tuple[str, ...]:
        """Forget bundles; returns keys to discard."""
        keys = []
        for entry in entries:
            self._index.remove(entry.name.key)
            keys.append(entry.name.text)
        self.version += bool(keys)
        return tuple(keys)

    def _use(self, key: str) -> None:
        """Note that somebody uses a bundle, and those before it."""
        self._index.use(self._index.path_to(key) or ())


def _file_key(key: str) -> str:
    """What a file is called, by the name that commands carry."""
    return BundleName.from_text(key).key
