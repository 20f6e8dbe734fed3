# SPDX-License-Identifier: Apache-2.0
"""A disk tier with one rank: who decides, and who reads and writes, without threads."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hybrid_plugin.core.commands import PoolId
from hybrid_plugin.core.tiers.outer_tier import StoredBundle
from hybrid_plugin.core.tree.tokens import Tokens
from hybrid_plugin.tiers.bundle import Bundle, Layouts, PageBytes, Row
from hybrid_plugin.tiers.disk import DiskTier
from hybrid_plugin.tiers.failure import Failure
from hybrid_plugin.tiers.files import Files
from hybrid_plugin.tiers.identity import Identity
from hybrid_plugin.tiers.manifest import Manifest
from hybrid_plugin.tiers.shelf import BundleShelf
from hybrid_plugin.tiers.stock import TierFolder


@dataclass(frozen=True)
class Made:
    """What a model has computed."""

    namespace: Hashable
    tokens: Tokens
    start: int
    pages: Mapping[PoolId, PageBytes]
    state: Row | None

    @property
    def size(self) -> int:
        """Bytes of its rows."""
        rows = [row.nbytes for each in self.pages.values() for row in each.rows]
        return sum(rows) + (0 if self.state is None else self.state.nbytes)


@dataclass(frozen=True)
class Found:
    """Where a sequence can resume."""

    path: tuple[StoredBundle, ...]

    @property
    def end(self) -> int:
        return self.path[-1].end


class OneRank:
    """Runs at once what the tier orders."""

    def __init__(
        self,
        path: Path,
        budget: int,
        identity: Identity,
        layouts: Layouts,
        *,
        files: Files | None = None,
        narrow: bool = False,
    ) -> None:
        rank = identity.rank_name
        self.layouts = layouts
        self.path = path / rank
        self.folder = TierFolder(path, {rank: layouts}, files=files, narrow=narrow)
        self.shelf = BundleShelf(path, rank, layouts, files=files, narrow=narrow)
        self.tier = DiskTier(
            self.folder.entries(), budget, identity, {rank: layouts}, 1e9
        )
        self.folder.discard(self.tier.trim())

    @property
    def count(self) -> int:
        return self.tier.count

    @property
    def used_bytes(self) -> int:
        return self.tier.used_bytes

    def find(
        self, namespace: Hashable, tokens: Tokens, limit: int | None = None
    ) -> Found | None:
        path = self.tier.find(
            namespace, tokens, len(tokens) - 1 if limit is None else limit
        )
        return Found(tuple(path)) if path else None

    def store(self, made: Made) -> Manifest | Failure | None:
        """None if the tier refuses it."""
        storing = self.tier.begin_store(
            made.namespace, made.tokens, made.start, made.size
        )
        if storing is None:
            return None
        self.shelf.discard(storing.discard)
        result = self.shelf.write(
            Bundle(storing.key, made.tokens, made.start, made.pages, made.state)
        )
        if isinstance(result, Failure):
            self.shelf.discard(self.tier.store_failed(storing.key, result.reason))
        else:
            self.tier.stored(storing.key, None)
        return result

    def load(
        self,
        bundles: Sequence[StoredBundle],
        tokens: Tokens,
        pages: Sequence[Mapping[PoolId, PageBytes]],
        state: Row | None,
    ) -> Failure | None:
        """Load a path, of which all but the last bundle leave the state in the file."""
        wanted = [
            Bundle(
                one.key,
                tokens[: one.end],
                one.start,
                own,
                state if one is bundles[-1] else None,
            )
            for one, own in zip(bundles, pages, strict=True)
        ]
        lost = self.shelf.fetch(wanted)
        keys = [one.key for one in bundles]
        if lost is None:
            self.tier.fetched(keys, 0, None)
            return None
        reason = lost.failure.reason
        self.shelf.discard(self.tier.fetch_failed(keys[lost.bundle], reason))
        return lost.failure

    def clear(self) -> None:
        self.shelf.discard(self.tier.clear())

    def close(self) -> None:
        self.folder.close()
