# SPDX-License-Identifier: Apache-2.0
"""The disk tier where the cache is: opened when the ranks are known."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hybrid_plugin.config import DiskOptions
from hybrid_plugin.engine.rank_files import RanksOnDisk
from hybrid_plugin.sizes import gib
from hybrid_plugin.tiers.bundle import Layouts
from hybrid_plugin.tiers.disk import DiskTier
from hybrid_plugin.tiers.stock import Gather, TierFolder


class Disk:
    """The disk tier of one cache."""

    def __init__(
        self,
        disk: DiskOptions,
        ranks: RanksOnDisk,
        *,
        own: Mapping[str, Layouts] | None = None,
        gather: Gather | None = None,
        make: Callable[..., DiskTier] = DiskTier,
    ) -> None:
        """Read what the folder holds.

        Args:
            disk: the option.
            ranks: whose files they are.
            own: layouts of the ranks for which this process decides, by their names;
                by default all.
            gather: exchanges what ranks have, where each decides for itself.
            make: the tier, of the arguments of `DiskTier`.

        Raises:
            ConfigError: if a folder cannot be used, or is used by another process.
        """
        self._folder = TierFolder(disk.folder, ranks.layouts if own is None else own)
        entries = self._folder.entries(*(() if gather is None else (gather,)))
        self.tier = make(
            entries,
            disk.size,
            ranks.identity,
            ranks.layouts,
            ranks.read_bytes_per_second,
        )
        self._folder.discard(self.tier.trim())

    def found(self) -> str:
        """What was there at the start, for the log."""
        return f"{self.tier.count} bundles, {gib(self.tier.used_bytes)}, are on disk"

    def close(self) -> None:
        """Let another server open the folder."""
        self._folder.close()
