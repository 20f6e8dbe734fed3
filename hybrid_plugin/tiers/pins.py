# SPDX-License-Identifier: Apache-2.0
"""Bundles that never go, with all that they go on from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable

from hybrid_plugin.tiers.index import BundleIndex


class Pins:
    """Who holds which bundle of an index.

    Questions cost the same however many are pinned, except for the first one after pins
    have changed, or after a bundle was added or removed that a pinned one is or goes on
    from: that takes time in proportion to all of these.
    """

    def __init__(self, index: BundleIndex) -> None:
        """Begin with none.

        Args:
            index: of the bundles.
        """
        self._index = index
        self._counts: Counter[str] = Counter()
        """By key, how many hold it; there need not be a bundle."""
        self._kept: dict[str, int] | None = None
        """Bytes by key of what is pinned and what comes before, 0 where there is no
        bundle; None when that has to be found anew."""
        self._bytes = 0
        index.tell(self._changed)

    def __getitem__(self, key: str) -> int:
        """How many hold the bundle of a key."""
        return self._counts[key]

    def pin(self, keys: Iterable[str]) -> None:
        """Hold bundles as long as `unpin` is not called as often, if they are there."""
        self._counts.update(keys)
        self._kept = None

    def unpin(self, keys: Iterable[str]) -> None:
        """Let bundles go again as any others."""
        self._counts.subtract(keys)
        self._counts += Counter()  # without what nobody holds
        self._kept = None

    @property
    def kept(self) -> Container[str]:
        """Keys of what is pinned, and of what comes before."""
        return self._found()

    @property
    def kept_bytes(self) -> int:
        """Of the files of all that."""
        self._found()
        return self._bytes

    # ---------------------------------------------------------------- internal

    def _found(self) -> dict[str, int]:
        if self._kept is None:
            self._kept = {}
            for pinned in self._counts:
                key = pinned
                while key and key not in self._kept:
                    entry = self._index.get(key)
                    self._kept[key] = 0 if entry is None else entry.file_bytes
                    key = "" if entry is None else entry.name.parent
            self._bytes = sum(self._kept.values())
        return self._kept

    def _changed(self, key: str) -> None:
        """Note that the bundle of a key was added or removed."""
        if self._kept is not None and key in self._kept:
            self._kept = None
