# SPDX-License-Identifier: Apache-2.0
"""What outer tiers found for sequences that wait, so that they are not asked each step.

A tier names bundles by hashes of all tokens: for 100,000 of them that takes
milliseconds, and a waiting sequence is looked up in every step.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from hybrid_plugin.core.tiers.outer_tier import OuterTier, StoredBundle
from hybrid_plugin.core.tree.tokens import Tokens


@dataclass(frozen=True, slots=True)
class _Found:
    tokens: weakref.ref[Tokens]
    namespace: Hashable
    limit: int
    version: int
    bundles: Sequence[StoredBundle]


class RecentFinds:
    """What one tier found, for as long as it holds and somebody has the sequence."""

    def __init__(self, tier: OuterTier) -> None:
        """Start with nothing.

        Args:
            tier: that is asked.
        """
        self._tier = tier
        self._found: dict[int, _Found] = {}
        """By the identity of the sequence's tokens."""

    def __len__(self) -> int:
        return len(self._found)

    def find(
        self, namespace: Hashable, tokens: Tokens, limit: int
    ) -> Sequence[StoredBundle]:
        """See `OuterTier.find`; `tokens` must not change as long as they are there."""
        version, identity = self._tier.version, id(tokens)
        known = self._found.get(identity)
        if known is None or (known.namespace, known.limit, known.version) != (
            namespace,
            limit,
            version,
        ):
            gone = weakref.ref(tokens, lambda _: self._found.pop(identity, None))
            bundles = self._tier.find(namespace, tokens, limit)
            known = _Found(gone, namespace, limit, version, bundles)
            self._found[identity] = known
        return known.bundles
