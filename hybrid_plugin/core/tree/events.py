# SPDX-License-Identifier: Apache-2.0
"""Which pages of KV come and go, for routers that send requests where they hit.

The engines publish three kinds of event with equal contents: a run of pages
was stored behind a parent, pages were removed, everything was cleared.  They
differ in how a page is named, so the adapter brings the hash function of its
engine, and translates the records (fields of vLLM 0.32's
`vllm.distributed.kv_events` and SGLang 0.5.23's `disaggregation.kv_events`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TypeAlias

from hybrid_plugin.core.tree.node import Node
from hybrid_plugin.core.tree.tokens import Tokens

Key: TypeAlias = "int | bytes"
"""Name of a page: the hash of all tokens up to its end, and of the namespace."""

Hasher: TypeAlias = "Callable[[Key | None, Tokens, Hashable], Key]"
"""Makes the key of a page from (key of the page before, its tokens, namespace)."""


@dataclass(frozen=True, slots=True)
class PagesStored:
    """A run of pages entered the cache."""

    namespace: Hashable
    parent: Key | None
    """The page before the first of them; None at the start of a sequence."""
    keys: tuple[Key, ...]
    tokens: Tokens
    """Of all pages, one after another."""
    page_size: int


@dataclass(frozen=True, slots=True)
class PagesRemoved:
    """Pages left the cache."""

    keys: tuple[Key, ...]


@dataclass(frozen=True, slots=True)
class Cleared:
    """Everything left the cache."""


Event = PagesStored | PagesRemoved | Cleared


def sha256_chain(parent: Key | None, tokens: Tokens, namespace: Hashable) -> Key:
    """A key of 64 bits, equal in every process.

    Args:
        parent: a key made by this function; None for the first page.
        tokens: of the page, as 64-bit integers of the machine's byte order.
        namespace: counts by its `repr`, for the first page only.
    """
    digest = sha256(repr(namespace).encode() if parent is None else _bytes(parent))
    digest.update(tokens.tobytes())
    return int.from_bytes(digest.digest()[:8], "big")


def _bytes(key: Key) -> bytes:
    return key if isinstance(key, bytes) else key.to_bytes(8, "big")


@dataclass(slots=True)
class EventLog:
    """Collects events until the adapter takes them."""

    hasher: Hasher = sha256_chain
    _keys: dict[Node, tuple[Key, ...]] = field(default_factory=dict)
    """Of the pages of every segment in the tree."""
    _pending: list[Event] = field(default_factory=list)

    def take(self) -> list[Event]:
        """All events since the last call, in order."""
        pending, self._pending = self._pending, []
        return pending

    def stored(self, leaf: Node, namespace: Hashable, page_size: int) -> None:
        """Note a new leaf of whole pages."""
        parent = self._last_key(leaf.parent)
        key, keys = parent, []
        for start in range(0, len(leaf.tokens), page_size):
            page = leaf.tokens[start : start + page_size]
            key = self.hasher(key, page, namespace)
            keys.append(key)
        self._keys[leaf] = tuple(keys)
        self._pending.append(
            PagesStored(namespace, parent, tuple(keys), leaf.tokens, page_size)
        )

    def removed(self, leaf: Node, kept: int) -> None:
        """Note that a leaf lost its pages from the `kept`-th on."""
        keys = self._keys.pop(leaf)
        if kept:
            self._keys[leaf] = keys[:kept]
        self._pending.append(PagesRemoved(keys[kept:]))

    def split(self, upper: Node, lower: Node, pages: int) -> None:
        """Move the keys of the first `pages` pages of `lower` to `upper`."""
        keys = self._keys[lower]
        self._keys[upper], self._keys[lower] = keys[:pages], keys[pages:]

    def cleared(self) -> None:
        """Note that the tree was emptied."""
        self._keys.clear()
        self._pending.append(Cleared())

    def _last_key(self, node: Node | None) -> Key | None:
        keys = self._keys.get(node) if node is not None else None
        return keys[-1] if keys else None
