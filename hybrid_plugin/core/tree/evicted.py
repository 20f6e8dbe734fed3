# SPDX-License-Identifier: Apache-2.0
"""What was evicted lately: tokens without pages, which explain later misses.

The tokens hang where they were cut off: below a node that is still in the tree, or
behind other evicted ones.  Content is evicted from the leaves towards the root, so what
was evicted behind something is forgotten before it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypeAlias, cast

from hybrid_plugin.core.tree.tokens import Tokens, common_units


@dataclass(slots=True, eq=False)
class EvictedTokens:
    """Tokens of one segment or tail that was evicted."""

    tokens: Tokens
    behind: Below
    """What had been evicted behind it."""
    place: Below
    """Where it is listed, under `key`."""
    key: bytes


Below: TypeAlias = dict[bytes, EvictedTokens]
"""By the bytes of the tokens of a first page, or of all tokens of a tail."""

NOTHING = cast("Below", MappingProxyType({}))
"""One empty mapping that most nodes share, to save memory."""


def nothing() -> Below:
    """That mapping."""
    return NOTHING


@dataclass(slots=True)
class RecentlyEvicted:
    """Evicted tokens of one tree, forgotten in the order in which they came."""

    page_size: int
    most_tokens: int
    """As many as are kept; the oldest go first."""
    _roots: dict[Hashable, Below] = field(default_factory=dict)
    """What was evicted below the root of each namespace."""
    _namespaces: dict[int, Hashable] = field(default_factory=dict)
    """By the identity of the namespace's mapping."""
    _order: OrderedDict[EvictedTokens, None] = field(default_factory=OrderedDict)
    """Oldest first."""
    tokens: int = 0
    """Tokens that are remembered."""

    def below_root(self, namespace: Hashable) -> Below:
        """What was evicted of a namespace from its beginning on."""
        return self._roots.get(namespace, NOTHING)

    def make_root(self, namespace: Hashable) -> Below:
        """The same, to add to."""
        below = self._roots.get(namespace)
        if below is None:
            below = self._roots[namespace] = {}
            self._namespaces[id(below)] = namespace
        return below

    def add(self, place: Below, tokens: Tokens, behind: Below) -> None:
        """Remember tokens that were evicted.

        Args:
            place: of what they followed.
            tokens: of whole pages, or of a tail.
            behind: what had been evicted behind them.
        """
        key = tokens[: self.page_size].tobytes()
        old = place.get(key)
        one = place[key] = EvictedTokens(tokens, behind, place, key)
        if old is not None:
            self._forget(old)
        self._order[one] = None
        self.tokens += len(tokens)
        while self.tokens > self.most_tokens:
            self._forget(next(iter(self._order)))

    def take(self, place: Below, key: bytes) -> EvictedTokens | None:
        """Take out what is listed under a key, because it is computed again."""
        one = place.get(key)
        if one is not None:
            self._unlist(one)
        return one

    def match(self, below: Below, tokens: Tokens, start: int) -> int:
        """Number of tokens from `start` on that were evicted, in whole pages.

        Args:
            below: where those before `start` end.
            tokens: of a sequence.
            start: a page end.
        """
        size, at = self.page_size, start
        while (one := below.get(tokens[at : at + size].tobytes())) is not None:
            if len(one.tokens) < size:
                break
            length = len(one.tokens)
            common = size * common_units(tokens[at : at + length], one.tokens, size)
            at += common
            if common < length:
                break
            below = one.behind
        return at - start

    def match_tail(self, below: Below, tokens: Tokens, start: int, limit: int) -> int:
        """Tokens of the longest evicted tail that a sequence goes on with.

        Args:
            below: where the tokens before `start` end.
            tokens: of the sequence.
            start: a page end.
            limit: where the tail may end at most.
        """
        if not below:
            return 0
        for length in range(min(self.page_size - 1, limit - start), 0, -1):
            if tokens[start : start + length].tobytes() in below:
                return length
        return 0

    def clear(self) -> None:
        """Forget everything."""
        self._order.clear()
        self._roots.clear()
        self._namespaces.clear()
        self.tokens = 0

    def __iter__(self) -> Iterator[EvictedTokens]:
        return iter(self._order)

    def _forget(self, one: EvictedTokens) -> None:
        """Forget tokens with all that was evicted behind them."""
        stack = [one]
        while stack:
            one = stack.pop()
            self._unlist(one)
            stack.extend(one.behind.values())

    def _unlist(self, one: EvictedTokens) -> None:
        place = one.place
        if place[one.key] is one:
            del place[one.key]
        del self._order[one]
        self.tokens -= len(one.tokens)
        if not place and id(place) in self._namespaces:
            del self._roots[self._namespaces.pop(id(place))]
