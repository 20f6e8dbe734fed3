# SPDX-License-Identifier: Apache-2.0
"""The disk as a tier: what is there, what goes, and what a sequence finds.

It decides for all ranks and does no I/O: ranks write, read and remove files as they are
told to (`BundleShelf`).  Where each rank decides for itself, all decide alike.

Bundles can be pinned: they are never evicted, and nothing takes their place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Hashable, Iterable, Mapping, Sequence

from hybrid_plugin.core.tiers.outer_tier import Storing
from hybrid_plugin.core.tree.tokens import Tokens
from hybrid_plugin.tiers.bundle import Layouts
from hybrid_plugin.tiers.failure import Reason
from hybrid_plugin.tiers.identity import Identity
from hybrid_plugin.tiers.index import Entry
from hybrid_plugin.tiers.keys import BundleName, keys_at, name_of
from hybrid_plugin.tiers.known_bundles import SOUND, KnownBundles, key_of
from hybrid_plugin.tiers.pins import Pins


class DiskTier(KnownBundles):
    """What `OuterTier` asks for, of files in a folder.

    Of a bundle every rank has a file with its part.  The files of all ranks on this
    machine share one size, which they never exceed: those least recently used go first,
    and who uses a bundle uses those before it, so ends go before beginnings.  Files of
    other models count, and go like any others.
    """

    name = "disk"

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
        super().__init__(identity, layouts, read_bytes_per_second)
        self._budget = budget
        self._pins = Pins(self._index)
        self._flushed: set[str] = set()
        """Keys of pinned bundles that nobody finds since a flush."""
        self.reserved_bytes = 0
        """Bytes of what else lies in the folder and counts, which never goes."""
        self.sessions = 0
        """That are saved; `SessionBook` counts them."""
        entries = list(entries)
        for entry in entries:
            self._index.add(entry)
        for entry in entries:  # what comes before counts as used later
            self._use(entry.name.key)

    # ----------------------------------------------------------------- numbers

    @property
    def used_bytes(self) -> int:
        """Bytes of all files, those that are being written included."""
        return self._index.used_bytes + self.reserved_bytes

    @property
    def budget(self) -> int:
        """Bytes that all files may have together."""
        return self._budget

    @property
    def pinned_bytes(self) -> int:
        """Bytes of all that is pinned, and of what else never goes."""
        return self.reserved_bytes + self._pins.kept_bytes

    @property
    def count(self) -> int:
        """Bundles, those that cannot be read here included."""
        return len(self._index)

    # ----------------------------------------------------------------- finding

    def trim(self) -> Sequence[str]:
        """Keys to discard before anything is written: what is too much at the start."""
        return self._make_room(0, self._in_use(()))

    @property
    def is_renewed(self) -> bool:
        """Whether the weights are others than any that a restart has."""
        return bool(self._identity.update)

    def fetch_failed(self, key: str, reason: str) -> Sequence[str]:
        """See `OuterTier.fetch_failed`.

        What is not in order is removed, so that nobody waits for it again.  What is
        pinned and could not be read now may be read by the next server, and stays.
        """
        entry = self._index.get(key_of(key))
        if entry is None or not entry.is_usable:
            return ()  # evicted, or stored anew, since it was found
        self.version += 1
        stays = reason == Reason.IO and self._pins[entry.name.key]
        if reason in SOUND or stays:
            self._index.show(entry.name.key, is_usable=False)
            return ()
        self._index.remove(entry.name.key)
        return (key,)

    # ----------------------------------------------------------------- storing

    def begin_store(
        self, namespace: Hashable, tokens: Tokens, start: int, size: int
    ) -> Storing | None:
        """See `OuterTier.begin_store`.

        Refused is what is stored, what has no name on disk, what is behind a gap, what
        would take the place of something pinned that is in order and not found, and
        what is larger than the budget leaves.
        """
        try:
            name = name_of(self._fingerprint, namespace, tokens, start)
        except TypeError:
            return None
        return self._begin(name, start, len(tokens), size)

    def stored(self, key: str, seconds: float | None) -> None:
        """See `OuterTier.stored`."""
        own = key_of(key)
        self._pending.discard(own)
        self._index.show(own, is_usable=True)
        self._use(own)
        self.version += 1

    def clear(self) -> Sequence[str]:
        """See `OuterTier.clear`; the bundles of other models stay.

        What is pinned stays too, but nobody finds it before `reveal`.
        """
        self.version += 1
        own = [
            entry
            for entry in self._index.oldest()
            if entry.name.fingerprint == self._fingerprint
            and entry.name.key not in self._pending
        ]
        for entry in own:
            if self._pins[entry.name.key] and entry.is_usable:
                self._index.show(entry.name.key, is_usable=False)
                self._flushed.add(entry.name.key)
        return self._gone(one for one in own if not self._pins[one.name.key])

    # ----------------------------------------------------------------- pinning

    def path(self, namespace: Hashable, tokens: Tokens) -> tuple[Entry, ...]:
        """The bundles of a sequence, the last of which ends where it does; or none.

        Raises:
            TypeError: for a namespace that has no name on disk.
        """
        end = len(tokens)
        key = keys_at(self._fingerprint, namespace, tokens, {end})[end]
        return self._index.path_to(key) or ()

    def pin(self, keys: Iterable[str]) -> None:
        """Keep bundles as long as `unpin` is not called as often, if they are there.

        Args:
            keys: of their files.
        """
        self._pins.pin(keys)

    def unpin(self, keys: Iterable[str]) -> None:
        """Let bundles go again as any others."""
        self._pins.unpin(keys)
        self._flushed = {key for key in self._flushed if self._pins[key]}

    def reveal(self, keys: Iterable[str]) -> None:
        """Find pinned bundles again that a flush has hidden."""
        for key in self._flushed.intersection(keys):
            self._flushed.discard(key)
            if self._index.get(key) is not None:
                self._index.show(key, is_usable=True)
                self.version += 1

    def get(self, key: str) -> Entry | None:
        """The bundle of a file's key."""
        return self._index.get(key)

    def reserve(self, size: int) -> Sequence[str] | None:
        """Make room for what else lies in the folder.

        Args:
            size: bytes more; fewer where it is negative.

        Returns:
            Keys to discard; None if there is no such room, with nothing changed.
        """
        used = self._in_use(())
        if size > 0 and self._too_much(used, size):
            return None
        discard = self._make_room(max(size, 0), used)
        self.reserved_bytes += size
        return discard

    def drop(self, keys: Sequence[str]) -> Sequence[str]:
        """Remove the bundles of a path that nothing pinned, and nothing behind, needs.

        Args:
            keys: of their files, from the start of the sequence.

        Returns:
            Keys to discard.
        """
        followers = Counter(entry.name.parent for entry in self._index.oldest())
        gone: list[str] = []
        for key in reversed(keys):
            entry = self._index.get(key)
            if entry is None:
                continue
            if followers[key] or self._pins[key] or key in self._pending:
                break
            followers[entry.name.parent] -= 1
            gone += self._gone([entry])
        return gone

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
        if old is not None and not old.is_usable and self._pins[name.key]:
            return None
        entry = Entry(name, start, end, self._file_bytes(name, start, end, size), False)
        used = self._in_use(before)
        if self._too_much(used, entry.file_bytes):
            return None
        replaced = () if old is None else self._gone([old])
        discard = (*replaced, *self._make_room(entry.file_bytes, used))
        self._index.add(entry)
        self._pending.add(name.key)
        self._index.use(before)
        return Storing(name.text, discard)

    def _in_use(self, before: Iterable[Entry]) -> dict[str, Entry]:
        """What nothing makes room for beside what is pinned: what is being stored, and
        what comes before.

        Args:
            before: what the next one goes on from.
        """
        used = {entry.name.key: entry for entry in before}
        for key in self._pending:
            entry = self._index.get(key)
            while entry is not None and entry.name.key not in used:
                used[entry.name.key] = entry
                entry = self._index.get(entry.name.parent)
        return used

    def _too_much(self, used: Mapping[str, Entry], size: int) -> bool:
        """Whether bytes more do not fit beside what must stay."""
        kept = self._pins.kept
        more = sum(entry.file_bytes for key, entry in used.items() if key not in kept)
        return self.pinned_bytes + more + size > self._budget

    def _make_room(self, size: int, used: Container[str]) -> tuple[str, ...]:
        """Let go what was not used for the longest time.

        Args:
            size: bytes that are to be had.
            used: keys of what stays beside what is pinned.

        Returns:
            Keys to discard.
        """
        kept = self._pins.kept
        excess = self.used_bytes + size - self._budget
        victims = []
        for entry in self._index.oldest():
            if excess <= 0:
                break
            if entry.name.key not in used and entry.name.key not in kept:
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
