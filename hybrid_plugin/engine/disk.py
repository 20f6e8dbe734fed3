# SPDX-License-Identifier: Apache-2.0
"""The disk tier where the cache is: opened when the ranks are known, and renewed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from uuid import uuid4

from hybrid_plugin.config import DiskOptions
from hybrid_plugin.core.cache import HybridCache
from hybrid_plugin.engine.rank_files import RanksOnDisk
from hybrid_plugin.engine.session_desk import Serving, SessionDesk
from hybrid_plugin.sizes import gib
from hybrid_plugin.tiers.agreement import Outcome
from hybrid_plugin.tiers.bundle import Layouts
from hybrid_plugin.tiers.disk import DiskTier
from hybrid_plugin.tiers.session_book import SessionBook
from hybrid_plugin.tiers.stock import Gather, TierFolder, alone


class Disk:
    """The disk tier of one cache."""

    def __init__(
        self,
        disk: DiskOptions,
        ranks: RanksOnDisk,
        cache: HybridCache,
        serving: Serving,
        *,
        own: Mapping[str, Layouts] | None = None,
        gather: Gather = alone,
        make: Callable[..., DiskTier] = DiskTier,
    ) -> None:
        """Read what the folder holds, and put it behind the cache's host memory.

        Args:
            disk: the option.
            ranks: whose files they are.
            cache: that has no outer tier yet.
            serving: what sessions that are saved say of this server.
            own: layouts of the ranks for which this process decides, by their names;
                by default all.
            gather: exchanges what ranks have, where each decides for itself.
            make: the tier, of the arguments of `DiskTier`.

        Raises:
            ConfigError: if a folder cannot be used, or is used by another process, or
                if saved sessions do not fit into it any more.
        """
        self._folder = TierFolder(disk.folder, ranks.layouts if own is None else own)
        entries = self._folder.entries(gather)
        sessions = self._folder.sessions(gather)
        self.tier = make(
            entries,
            disk.size,
            ranks.identity,
            ranks.layouts,
            ranks.read_bytes_per_second,
        )
        self._cache = cache
        book = SessionBook(self.tier, sessions, len(ranks.layouts))
        self.sessions = SessionDesk(cache, self.tier, book, serving)
        self._folder.discard(self.tier.trim())
        cache.use_tiers([self.tier])

    def found(self) -> str:
        """What was there at the start, for the log."""
        sessions = len(self.sessions.book)
        kept = f", {sessions} saved sessions among them" if sessions else ""
        used = gib(self.tier.used_bytes)
        return f"{self.tier.count} bundles, {used}, are on disk{kept}"

    def take(self, outcomes: Iterable[Outcome]) -> None:
        """Tell the cache what became of writes and fetches.

        Args:
            outcomes: on which all ranks agree, in order.
        """
        for outcome in outcomes:
            lost = outcome.lost
            if lost is None:
                self._cache.outer_done(outcome.ticket, True, seconds=outcome.seconds)
            else:
                self._cache.outer_done(
                    outcome.ticket,
                    False,
                    reason=lost.failure.reason,
                    bundle=lost.bundle,
                    seconds=outcome.seconds,
                )
            # What is saved is kept before anything makes room.
            self.sessions.step()

    def renew(self, update: str | None = None) -> None:
        """Find and store for other weights from now on, which no restart has.

        Args:
            update: a name for them, equal on all ranks; by default a random one.
        """
        self.tier.renew(uuid4().hex if update is None else update)

    def close(self) -> None:
        """Let another server open the folder."""
        self._folder.close()
