# SPDX-License-Identifier: Apache-2.0
"""Which bundles there are, and which of them a sequence can resume from."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterator
from dataclasses import dataclass, field, replace

from hybrid_plugin.core.tree.tokens import Tokens
from hybrid_plugin.tiers.keys import CHUNK, BundleName, KeyChain


@dataclass(frozen=True, slots=True)
class Entry:
    """One bundle, of which every rank has its part."""

    name: BundleName
    start: int
    end: int
    file_bytes: int
    """Of all ranks' files."""
    is_usable: bool
    """Whether it is all there, and its layout can be read here."""


@dataclass(slots=True)
class BundleIndex:
    """Bundles by their keys, the least recently used first.

    Whoever uses a bundle uses those before it, and they count as used later.  So the
    least recently used bundle is one behind which nothing in use follows.
    """

    used_bytes: int = 0
    """Of all bundles."""
    _entries: OrderedDict[str, Entry] = field(default_factory=OrderedDict)
    _ends: dict[str, dict[int, set[str]]] = field(default_factory=dict)
    """Keys by the key of their whole chunks, and by their end."""
    _listeners: list[Callable[[str], None]] = field(default_factory=list)

    def tell(self, listener: Callable[[str], None]) -> None:
        """Call a function with the key of each bundle that is added or removed."""
        self._listeners.append(listener)

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: str) -> Entry | None:
        """The bundle of a key."""
        return self._entries.get(key)

    def add(self, entry: Entry) -> None:
        """Enter a bundle, as the most recently used one, in the place of any other."""
        key = entry.name.key
        self.remove(key)
        self._entries[key] = entry
        self.used_bytes += entry.file_bytes
        ends = self._ends.setdefault(entry.name.anchor, {})
        ends.setdefault(entry.end, set()).add(key)
        self._tell(key)

    def remove(self, key: str) -> Entry | None:
        """Forget a bundle; returns it, or None if there was none."""
        entry = self._entries.pop(key, None)
        if entry is None:
            return None
        self.used_bytes -= entry.file_bytes
        anchor, end = entry.name.anchor, entry.end
        ends = self._ends[anchor]
        ends[end].discard(key)
        if not ends[end]:
            del ends[end]
        if not ends:
            del self._ends[anchor]
        self._tell(key)
        return entry

    def _tell(self, key: str) -> None:
        for listener in self._listeners:
            listener(key)

    def show(self, key: str, is_usable: bool) -> None:
        """Find a bundle from now on, or no more; it keeps its place otherwise."""
        self._entries[key] = replace(self._entries[key], is_usable=is_usable)

    def path_to(self, key: str) -> tuple[Entry, ...] | None:
        """The bundles from the start of the sequence to a key, all there and usable."""
        path: list[Entry] = []
        while True:
            entry = self._entries.get(key)
            if entry is None or not entry.is_usable:
                return None
            if path and entry.end != path[-1].start:
                return None
            path.append(entry)
            if not entry.start:
                return tuple(reversed(path))
            key = entry.name.parent

    def use(self, path: Collection[Entry]) -> None:
        """Note that somebody uses the bundles of a path, given from its start."""
        for entry in reversed(list(path)):
            if entry.name.key in self._entries:
                self._entries.move_to_end(entry.name.key)

    def oldest(self) -> Iterator[Entry]:
        """All bundles, the least recently used first."""
        yield from self._entries.values()

    def longest(
        self, fingerprint: str, namespace: Hashable, tokens: Tokens, limit: int
    ) -> tuple[Entry, ...] | None:
        """The path to the last position up to `limit` where the sequence can resume."""
        found: list[tuple[int, str]] = []
        chain = KeyChain(fingerprint, namespace)
        limit = min(limit, len(tokens))
        for position in range(0, limit + 1, CHUNK):
            chain.advance(tokens, position)
            for end, keys in self._ends.get(chain.key(), {}).items():
                if position <= end < min(position + CHUNK, limit + 1):
                    key = chain.at(tokens, end)
                    found += [(end, key)] if key in keys else []
        for _, key in sorted(found, reverse=True):
            path = self.path_to(key)
            if path is not None:
                return path
        return None
