# SPDX-License-Identifier: Apache-2.0
"""Names of bundles: a hash of all tokens up to their end, and of what these mean.

A name does not depend on pages, so processes with pages of other sizes find each
other's bundles.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from hashlib import sha256

from hybrid_plugin.core.tree.tokens import Tokens

CHUNK = 256
"""Tokens between the positions under which bundles are looked up.  A look-up hashes the
sequence once, and tries the ends of the bundles in a chunk only where all tokens before
that chunk agree: at most this many more hashes for each such chunk."""


@dataclass(frozen=True, slots=True)
class BundleName:
    """What a bundle is called, and where it belongs; the same on all ranks.

    Whoever decides makes it, and ranks write it into their files as it is: so they need
    not hash sequences once more, nor know of updates of weights.
    """

    key: str
    """Of all tokens up to its end; `KeyChain.key`."""
    parent: str
    """Key of the bundle that ends where this one starts; empty at token 0."""
    anchor: str
    """Key of the whole chunks of tokens before its end."""
    fingerprint: str
    """`Identity.fingerprint`."""

    @property
    def text(self) -> str:
        """In one piece, as commands carry it."""
        return ".".join((self.key, self.parent, self.anchor, self.fingerprint))

    @classmethod
    def from_text(cls, text: str) -> BundleName:
        """Read what `text` is.

        Raises:
            ValueError: for anything else.
        """
        parts = text.split(".")
        if len(parts) != 4:
            raise ValueError(f"{text!r:.80} is no name of a bundle")
        return cls(*parts)


def name_of(
    fingerprint: str, namespace: Hashable, tokens: Tokens, start: int
) -> BundleName:
    """The name of a bundle.

    Args:
        fingerprint: `Identity.fingerprint`.
        namespace: of the sequence.
        tokens: from its start to the bundle's end.
        start: where the bundle begins.

    Raises:
        TypeError: for a namespace that has no name on disk.
    """
    end = len(tokens)
    anchor = anchor_of(end)
    keys = keys_at(fingerprint, namespace, tokens, {start, anchor, end})
    return BundleName(
        keys[end], keys[start] if start else "", keys[anchor], fingerprint
    )


class KeyChain:
    """Hashes a sequence, whose key can be had at any position on the way."""

    def __init__(self, fingerprint: str, namespace: Hashable) -> None:
        """Begin a sequence.

        Args:
            fingerprint: `Identity.fingerprint`.
            namespace: of the request: strings, None, or tuples of these.

        Raises:
            TypeError: for a namespace of anything else.
        """
        self._hash = sha256(bytes.fromhex(fingerprint))
        self._hash.update(namespace_digest(namespace))
        self.position = 0

    def advance(self, tokens: Tokens, position: int) -> None:
        """Go on to a position.

        Args:
            tokens: the sequence, from its start on.
            position: at least the one where this is.
        """
        self._hash.update(_bytes(tokens[self.position : position]))
        self.position = position

    def key(self) -> str:
        """The key of the sequence up to this position, in hexadecimal digits."""
        return self._hash.hexdigest()

    def at(self, tokens: Tokens, position: int) -> str:
        """The key a little further on, without going there."""
        ahead = self._hash.copy()
        ahead.update(_bytes(tokens[self.position : position]))
        return ahead.hexdigest()


def keys_at(
    fingerprint: str, namespace: Hashable, tokens: Tokens, positions: Iterable[int]
) -> dict[int, str]:
    """The keys of a sequence at several positions, hashing it once."""
    chain = KeyChain(fingerprint, namespace)
    keys = {}
    for position in sorted(positions):
        chain.advance(tokens, position)
        keys[position] = chain.key()
    return keys


def anchor_of(end: int) -> int:
    """The position under which a bundle that ends at `end` is looked up."""
    return end // CHUNK * CHUNK


def namespace_digest(namespace: Hashable) -> bytes:
    """SHA-256 of a namespace; a namespace of nothing but None is none.

    Raises:
        TypeError: for what is neither string, None nor a tuple of these.
    """
    return sha256(json.dumps(_plain(namespace)).encode()).digest()


def _bytes(run: Tokens) -> Tokens:
    """A run that may be changed, with the least byte of each token first."""
    if sys.byteorder == "big":
        run.byteswap()
    return run


def _plain(namespace: Hashable) -> object:
    if namespace is None or isinstance(namespace, str):
        return namespace
    if isinstance(namespace, tuple):
        parts = [_plain(part) for part in namespace]
        return None if all(part is None for part in parts) else parts
    raise TypeError(f"a namespace of {type(namespace).__name__} has no name on disk")
