# SPDX-License-Identifier: Apache-2.0
"""A store that many servers share, as a tier: what this server knows to be there.

It does no I/O.  What is there is looked up elsewhere when a request comes, and learned
(`learn`); what this server writes it knows anyway.  The store lets objects go when it
likes, so what is known may be gone: then a fetch fails, and the request computes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import islice
from typing import Final

from hybrid_plugin.core.tiers.outer_tier import Storing
from hybrid_plugin.core.tree.tokens import Tokens
from hybrid_plugin.tiers.bundle import Layouts
from hybrid_plugin.tiers.failure import Reason
from hybrid_plugin.tiers.identity import Identity
from hybrid_plugin.tiers.index import Entry
from hybrid_plugin.tiers.keys import name_of
from hybrid_plugin.tiers.known_bundles import SOUND, KnownBundles, key_of
from hybrid_plugin.tiers.store.directory import Found

MOST_KNOWN: Final = 100_000
"""Bundles that a server remembers; each takes half a kilobyte."""
_ELSEWHERE: tuple[str, ...] = (Reason.IO, Reason.INTERNAL)
"""What the store, not the bundle, is to blame for: it stays, too."""


def _anything(tokens: Tokens) -> bool:
    """The default of `takes`."""
    return True


class StoreTier(KnownBundles):
    """What `OuterTier` asks for, of objects in a store."""

    name = "store"

    def __init__(
        self,
        identity: Identity,
        layouts: Mapping[str, Layouts],
        read_bytes_per_second: float,
        *,
        takes: Callable[[Tokens], bool] = _anything,
        most: int = MOST_KNOWN,
    ) -> None:
        """Know of nothing.

        Args:
            identity: whose bundles are found and stored, of any of its ranks.
            layouts: of all ranks, by their names.
            read_bytes_per_second: that a rank reads while the others do, as measured.
            takes: whether a sequence means the same to other servers.
            most: bundles that are remembered.
        """
        super().__init__(identity, layouts, read_bytes_per_second)
        self._takes = takes
        self._most = most
        self.news: list[tuple[Entry, bool]] = []
        """Bundles that directories are to list from now on, or no more."""

    @property
    def used_bytes(self) -> int:
        """Bytes of what this server knows to be in the store, on all ranks."""
        return self._index.used_bytes

    # ----------------------------------------------------------------- finding

    def learn(self, found: Found) -> None:
        """Note what a look-up has found."""
        for key in found.gone:
            if key not in self._pending and self._index.remove(key) is not None:
                self.version += 1
        for entry in found.there:
            key = entry.name.key
            if key not in self._pending and self._index.get(key) is None:
                self._index.add(entry)
                self.version += 1
        for entry in found.there:  # what comes before counts as used later
            self._use(entry.name.key)
        self._forget_oldest()

    def fetch_failed(self, key: str, reason: str) -> Sequence[str]:
        """See `OuterTier.fetch_failed`."""
        entry = self._index.get(key_of(key))
        if entry is None or not entry.is_usable:
            return ()
        self.version += 1
        if reason in SOUND:
            self._index.show(entry.name.key, is_usable=False)
            return ()
        self._index.remove(entry.name.key)
        if reason in _ELSEWHERE:
            return ()
        self.news.append((entry, False))
        return (key,)

    # ----------------------------------------------------------------- storing

    def begin_store(
        self, namespace: Hashable, tokens: Tokens, start: int, size: int
    ) -> Storing | None:
        """See `OuterTier.begin_store`.

        Refused is what is there, what has no name outside this process, and what is
        behind a gap.
        """
        if not self._takes(tokens):
            return None
        try:
            name = name_of(self._fingerprint, namespace, tokens, start)
        except TypeError:
            return None
        old = self._index.get(name.key)
        if name.key in self._pending or (old is not None and not old.is_usable):
            return None
        if name.parent and self._index.path_to(name.parent) is None:
            return None
        if self._index.path_to(name.key) is not None:
            return None
        end = len(tokens)
        files = self._file_bytes(name, start, end, size)
        self._index.add(Entry(name, start, end, files, False))
        self._pending.add(name.key)
        return Storing(name.text)

    def stored(self, key: str, seconds: float | None) -> None:
        """See `OuterTier.stored`."""
        own = key_of(key)
        self._pending.discard(own)
        self._index.show(own, is_usable=True)
        entry = self._index.get(own)
        assert entry is not None, "what is being stored is not forgotten"
        self.news.append((entry, True))
        self.version += 1
        self._use(own)
        self._forget_oldest()

    def clear(self) -> Sequence[str]:
        """See `OuterTier.clear`; what this server does not know of stays."""
        self.version += 1
        gone = [
            entry
            for entry in self._index.oldest()
            if entry.name.fingerprint == self._fingerprint
            and entry.name.key not in self._pending
        ]
        for entry in gone:
            self._index.remove(entry.name.key)
            self.news.append((entry, False))
        return [entry.name.text for entry in gone]

    # ---------------------------------------------------------------- internal

    def _forget_oldest(self) -> None:
        """Keep to the number that is remembered; the store keeps what is forgotten."""
        excess = len(self._index) - self._most
        if excess <= 0:
            return
        named = (entry.name.key for entry in self._index.oldest())
        idle = (key for key in named if key not in self._pending)
        for key in list(islice(idle, excess)):
            self._index.remove(key)
            self.version += 1
