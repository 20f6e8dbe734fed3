# SPDX-License-Identifier: Apache-2.0
"""Events for cache-aware routers: which KV pages were stored and removed.

Both engines publish three kinds of event with equal contents: pages were stored after a
parent, pages were removed, everything was cleared.  The engines differ in how they name
a page, so the adapter supplies its engine's hash function and converts the records
(fields of vLLM 0.32's `vllm.distributed.kv_events` and SGLang 0.5.23's
`disaggregation.kv_events`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TypeAlias

from hybrid_plugin.core.tree.node import Node
from hybrid_plugin.core.tree.tokens import Tokens

Key: TypeAlias = "int | bytes"
"""Name of a page: a hash of the namespace and of all tokens up to its end."""

Hasher: TypeAlias = "Callable[[Key | None, Tokens, Hashable], Key]"
"""Computes the key of a page from the previous key, its tokens and the namespace."""


@dataclass(frozen=True, slots=True)
class PagesStored:
    """Consecutive pages were stored."""

    namespace: Hashable
    parent: Key | None
    """Key of the page before the first; None at the start of a sequence."""
    keys: tuple[Key, ...]
    tokens: Tokens
    """Tokens of all pages, concatenated."""
    page_size: int


@dataclass(frozen=True, slots=True)
class PagesRemoved:
    """Pages were removed."""

    keys: tuple[Key, ...]


@dataclass(frozen=True, slots=True)
class Cleared:
    """The cache was cleared."""


Event = PagesStored | PagesRemoved | Cleared


def sha256_chain(parent: Key | None, tokens: Tokens, namespace: Hashable) -> Key:
    """A 64-bit key that is equal in every process.

    Args:
        parent: a key made by this function; None for the first page.
        tokens: of the page, as 64-bit integers of the machine's byte order.
        namespace: enters by its `repr`, for the first page only.
    """
    digest = sha256(repr(namespace).encode() if parent is None else _bytes(parent))
    digest.update(tokens.tobytes())
    return int.from_bytes(digest.digest()[:8], "big")


def _bytes(key: Key) -> bytes:
    return key if isinstance(key, bytes) else key.to_bytes(8, "big")


@dataclass(slots=True)
class EventLog:
    """Collects events for the adapter."""

    hasher: Hasher = sha256_chain
    _keys: dict[Node, tuple[Key, ...]] = field(default_factory=dict)
    """Keys of the pages of every segment in the tree."""
    _pending: list[Event] = field(default_factory=list)

    def take(self) -> list[Event]:
        """All events since the last call, in order."""
        pending, self._pending = self._pending, []
        return pending

    def stored(self, leaf: Node, namespace: Hashable, page_size: int) -> None:
        """Record a new leaf of whole pages."""
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
        """Record that a leaf lost all but its first `kept` pages."""
        keys = self._keys.pop(leaf)
        if kept:
            self._keys[leaf] = keys[:kept]
        self._pending.append(PagesRemoved(keys[kept:]))

    def split(self, upper: Node, lower: Node, pages: int) -> None:
        """Move the keys of the first `pages` pages of `lower` to `upper`."""
        keys = self._keys[lower]
        self._keys[upper], self._keys[lower] = keys[:pages], keys[pages:]

    def cleared(self) -> None:
        """Record that the tree was cleared."""
        self._keys.clear()
        self._pending.append(Cleared())

    def _last_key(self, node: Node | None) -> Key | None:
        keys = self._keys.get(node) if node is not None else None
        return keys[-1] if keys else None
