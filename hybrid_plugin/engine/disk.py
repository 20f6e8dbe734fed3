# SPDX-License-Identifier: Apache-2.0
"""The disk tier where the cache is: opened when the ranks are known."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hybrid_plugin.config import DiskOptions
from hybrid_plugin.engine.rank_files import RanksOnDisk
from hybrid_plugin.engine.session_desk import Serving
from hybrid_plugin.sizes import gib
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
        serving: Serving,
        *,
        own: Mapping[str, Layouts] | None = None,
        gather: Gather = alone,
        make: Callable[..., DiskTier] = DiskTier,
    ) -> None:
        """Read what the folder holds.

        Args:
            disk: the option.
            ranks: whose files they are.
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
        self.serving = serving
        self.book = SessionBook(self.tier, sessions, len(ranks.layouts))
        self._folder.discard(self.tier.trim())

    def found(self) -> str:
        """What was there at the start, for the log."""
        sessions = len(self.book)
        kept = f", {sessions} saved sessions among them" if sessions else ""
        used = gib(self.tier.used_bytes)
        return f"{self.tier.count} bundles, {used}, are on disk{kept}"

    def close(self) -> None:
        """Let another server open the folder."""
        self._folder.close()
