# SPDX-License-Identifier: Apache-2.0
"""Bundles that a tier knows, with what all such tiers do alike.

What becomes of them, and when they go, each tier decides for itself.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace

from hybrid_plugin.core.stats import OuterStats
from hybrid_plugin.core.tiers.outer_tier import StoredBundle
from hybrid_plugin.core.tree.tokens import Tokens
from hybrid_plugin.tiers.bundle import Layouts
from hybrid_plugin.tiers.describe import frame_bytes
from hybrid_plugin.tiers.failure import Reason
from hybrid_plugin.tiers.identity import Identity
from hybrid_plugin.tiers.index import BundleIndex
from hybrid_plugin.tiers.keys import BundleName
from hybrid_plugin.tiers.last_reads import LastReads

SOUND: tuple[str, ...] = (Reason.OTHER_TOKENS, Reason.LAYOUT)
"""A bundle that could not be read for these is in order, and stays for others."""


class KnownBundles:
    """A part of what `OuterTier` asks for.

    Of a bundle every rank has a file, or an object, with its part.
    """

    keeps_bundles = True
    offers_bundles = False
    is_divisible = False
    reads_at_once = 1

    def __init__(
        self,
        identity: Identity,
        layouts: Mapping[str, Layouts],
        read_bytes_per_second: float,
    ) -> None:
        """Know of none.

        Args:
            identity: whose bundles are found and stored, of any of its ranks.
            layouts: of all ranks that count, by their names.
            read_bytes_per_second: that a rank reads while the others do, as measured.
        """
        self.stats = OuterStats()
        self.version = 0
        self._identity = identity
        self._fingerprint = identity.fingerprint()
        self._layouts = dict(layouts)
        self._index = BundleIndex()
        self._pending: set[str] = set()
        """Keys of what is being stored."""
        # A second of reading, as much as the first fetches are worth.
        self._reads = LastReads((read_bytes_per_second, 1.0))

    @property
    def read_bytes_per_second(self) -> float:
        """That a rank reads while the others do: of the last reads together."""
        return self._reads.bytes_per_second

    @property
    def fingerprint(self) -> str:
        """Of the model whose bundles are found."""
        return self._fingerprint

    def renew(self, update: str) -> None:
        """Find and store for other weights from now on.

        Args:
            update: `Identity.update`.
        """
        self._identity = replace(self._identity, update=update)
        self._fingerprint = self._identity.fingerprint()
        self.version += 1

    # ----------------------------------------------------------------- finding

    def find(
        self, namespace: Hashable, tokens: Tokens, limit: int
    ) -> Sequence[StoredBundle]:
        """See `OuterTier.find`; what has no name outside this process is not there."""
        try:
            path = self._index.longest(self._fingerprint, namespace, tokens, limit)
        except TypeError:  # no such name
            return ()
        return [StoredBundle(one.name.text, one.start, one.end) for one in path or ()]

    def read_seconds(self, key: str, size: int) -> float:
        """See `OuterTier.read_seconds`."""
        return self._reads.seconds(size)

    def token_seconds(self, key: str) -> None:
        """See `OuterTier.token_seconds`: nobody says it."""

    def patience(self, computing: float) -> float:
        """As long as computing takes: nobody is served later than twice the time."""
        return computing

    def fetch_refused(self, key: str, computing: float) -> None:
        """See `OuterTier.fetch_refused`; it changes nothing here."""

    def begin_fetch(self, key: str, size: int) -> None:
        """See `OuterTier.begin_fetch`; it changes nothing here."""

    def fetched(self, keys: Sequence[str], size: int, seconds: float | None) -> None:
        """See `OuterTier.fetched`."""
        for key in keys:
            self._use(key_of(key))
        if seconds:
            self._reads.add(size, seconds)

    # ----------------------------------------------------------------- storing

    def store_failed(self, key: str, reason: str) -> Sequence[str]:
        """See `OuterTier.store_failed`."""
        own = key_of(key)
        self._pending.discard(own)
        self._index.remove(own)
        return (key,)

    def _file_bytes(self, name: BundleName, start: int, end: int, size: int) -> int:
        """Bytes of all ranks' files, or a little more."""
        return sum(
            size + frame_bytes(name, start, end, rank, own)
            for rank, own in self._layouts.items()
        )

    def _use(self, key: str) -> None:
        """Note that somebody uses a bundle, and those before it."""
        self._index.use(self._index.path_to(key) or ())


def key_of(text: str) -> str:
    """What a file is called, by the name that commands carry."""
    return BundleName.from_text(text).key
