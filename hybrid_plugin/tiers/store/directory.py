# SPDX-License-Identifier: Apache-2.0
"""Which bundles a store has: a directory for each chunk of a sequence, as an object.

A server knows the tokens of a request, and no position at which another server has left
a state.  So for every 256 tokens there is an object, named after all tokens before the
chunk, that lists the bundles that end in the chunk.  Servers write directories without
asking each other: what one of them writes may be lost to the other, and is missed.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from hybrid_plugin.core.tree.tokens import Tokens
from hybrid_plugin.tiers.index import Entry
from hybrid_plugin.tiers.keys import CHUNK, BundleName, KeyChain
from hybrid_plugin.tiers.manifest import MAX_TOKENS, is_digest
from hybrid_plugin.tiers.row_layout import integer, text
from hybrid_plugin.tiers.shelf import SUFFIX
from hybrid_plugin.tiers.store.objects import ObjectStore

FORMAT: Final = "hybrid-directory/1"
MOST: Final = 64
"""Bundles that a directory lists, the latest."""
ROOT: Final = "hybrid-bundle-1"
"""What the names of all bundles in a store begin with."""


@dataclass(frozen=True, slots=True)
class Found:
    """What a store has of one sequence."""

    there: tuple[Entry, ...]
    """Bundles of which all ranks' parts are there."""
    gone: tuple[str, ...]
    """Keys of those that are listed only."""


class Directory:
    """The directories of one model's bundles.

    Methods take as long as the store does, and raise OSError if it does not answer.
    """

    def __init__(self, objects: ObjectStore, ranks: Sequence[str]) -> None:
        """Do nothing yet.

        Args:
            objects: of the store.
            ranks: `Identity.rank_name` of all that have a part of a bundle.
        """
        self._objects = objects
        self._ranks = tuple(ranks)

    def look(self, fingerprint: str, namespace: Hashable, tokens: Tokens) -> Found:
        """What there is of a sequence.

        Raises:
            TypeError: for a namespace that has no name outside this process.
        """
        listed = list(self._listed(fingerprint, namespace, tokens))
        names = [
            f"{ROOT}/{rank}/{entry.name.key}{SUFFIX}"
            for entry in listed
            for rank in self._ranks
        ]
        exist = self._objects.exist(names) if names else []
        ranks = len(self._ranks)
        whole = [all(exist[i * ranks : (i + 1) * ranks]) for i in range(len(listed))]
        pairs = list(zip(listed, whole, strict=True))
        return Found(
            tuple(entry for entry, is_there in pairs if is_there),
            tuple(entry.name.key for entry, is_there in pairs if not is_there),
        )

    def add(self, entry: Entry) -> None:
        """List a bundle that all ranks have written."""
        name, others = _name(entry.name), self._without(entry.name)
        self._put(name, [*others, entry][-MOST:])

    def drop(self, bundle: BundleName) -> None:
        """List a bundle no more."""
        self._put(_name(bundle), self._without(bundle))

    # ---------------------------------------------------------------- internal

    def _listed(
        self, fingerprint: str, namespace: Hashable, tokens: Tokens
    ) -> Iterable[Entry]:
        """Bundles of the sequence, as directories say."""
        chain, at = KeyChain(fingerprint, namespace), {}
        for position in range(0, len(tokens), CHUNK):
            chain.advance(tokens, position)
            at[position] = chain.key()
        names = [f"{ROOT}/{fingerprint}/{anchor}" for anchor in at.values()]
        exist = self._objects.exist(names)
        there = [name for name, is_there in zip(names, exist, strict=True) if is_there]
        contents = dict(
            zip(there, self._objects.get(there) if there else (), strict=True)
        )
        chain = KeyChain(fingerprint, namespace)
        for (position, anchor), name in zip(at.items(), names, strict=True):
            chain.advance(tokens, position)
            for entry in _entries(contents.get(name), fingerprint, anchor):
                inside = position <= entry.end < min(position + CHUNK, len(tokens) + 1)
                if inside and chain.at(tokens, entry.end) == entry.name.key:
                    yield entry

    def _without(self, bundle: BundleName) -> list[Entry]:
        """The other bundles of a directory."""
        (content,) = self._objects.get([_name(bundle)])
        found = _entries(content, bundle.fingerprint, bundle.anchor)
        return [entry for entry in found if entry.name.key != bundle.key]

    def _put(self, name: str, entries: Sequence[Entry]) -> None:
        listed = [
            [one.name.key, one.name.parent, one.start, one.end, one.file_bytes]
            for one in entries
        ]
        content = {"format": FORMAT, "bundles": listed}
        self._objects.put(name, json.dumps(content).encode())


def _name(bundle: BundleName) -> str:
    return f"{ROOT}/{bundle.fingerprint}/{bundle.anchor}"


def _entries(content: bytes | None, fingerprint: str, anchor: str) -> list[Entry]:
    """What a directory lists; nothing where it makes no sense."""
    if content is None:
        return []
    try:
        said = json.loads(content)
        if said["format"] != FORMAT:
            return []
        return [_entry(one, fingerprint, anchor) for one in said["bundles"][:MOST]]
    except (ValueError, KeyError, TypeError, RecursionError):
        return []


def _entry(listed: Any, fingerprint: str, anchor: str) -> Entry:
    key, parent, start, end, size = listed
    name = BundleName(text(key), text(parent), anchor, fingerprint)
    start, end, size = integer(start), integer(end), integer(size)
    if not (0 <= start < end <= MAX_TOKENS and size >= 0 and is_digest(key)):
        raise ValueError("a bundle of no tokens")
    if bool(parent) != (start > 0) or (parent and not is_digest(parent)):
        raise ValueError("a bundle has a parent if it does not start at 0")
    return Entry(name, start, end, size, True)
