# SPDX-License-Identifier: Apache-2.0
"""A shared store as a rank sees it: a member that writes and reads as it is told."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

from hybrid_plugin.config import ConfigError, StoreOptions
from hybrid_plugin.device.host.copies import HostCopies
from hybrid_plugin.engine.rank_files import FilesOfWeights
from hybrid_plugin.sizes import gib
from hybrid_plugin.tiers.bundle import Layouts
from hybrid_plugin.tiers.identity import Identity
from hybrid_plugin.tiers.rates import DiskRates
from hybrid_plugin.tiers.shelf import BundleShelf
from hybrid_plugin.tiers.store.directory import ROOT
from hybrid_plugin.tiers.store.files import StoreFiles
from hybrid_plugin.tiers.store.mooncake import PIECE, MooncakeObjects
from hybrid_plugin.tiers.store.objects import ObjectStore
from hybrid_plugin.tiers.transfers import check_rows

Join: TypeAlias = Callable[[StoreOptions, int], ObjectStore]
"""Makes this process a member that lends so many bytes."""
_SAMPLE: Final = 4
"""Pieces that are written and read to measure."""


def join_store(options: StoreOptions, lent: int) -> ObjectStore:
    """Make this process a member of a Mooncake Store.

    Args:
        options: of the store.
        lent: bytes of memory that it lends.

    Raises:
        ConfigError: if the library or the master cannot be reached.
    """
    return MooncakeObjects(options.master, options.address, options.metadata, lent)


@dataclass(frozen=True, slots=True)
class RanksInStore:
    """What whoever decides for the ranks has to know of them."""

    identity: Identity
    """Of any of them."""
    layouts: Mapping[str, Layouts]
    """By `Identity.rank_name`, of all ranks."""
    read_bytes_per_second: float
    """That any of them reads at least, while all do."""


class RankStore:
    """One rank's part of all bundles, and what it lends to the store."""

    def __init__(
        self,
        host: HostCopies,
        options: StoreOptions,
        identity: Identity,
        layouts: Layouts,
        *,
        join: Join | None = None,
    ) -> None:
        """Join the store, and measure it.  All ranks do it at once.

        Args:
            host: memory of the rank.
            options: of the store.
            identity: of the rank.
            layouts: of its rows.
            join: the store; by default Mooncake's.

        Raises:
            ConfigError: if it cannot be joined, or takes nothing.
        """
        check_rows(layouts, host)
        self.objects = (join or join_store)(options, options.size)
        try:
            self.rates = measure(self.objects, options)
        except ConfigError:
            self.objects.close()
            raise
        rank, files = identity.rank_name, StoreFiles(self.objects, PIECE)
        shelf = BundleShelf(Path(ROOT), rank, layouts, files=files)
        self.files = FilesOfWeights(shelf, identity.fingerprint())

    def close(self) -> None:
        """Leave the store."""
        self.objects.close()


def measure(objects: ObjectStore, options: StoreOptions) -> DiskRates:
    """Write some pieces, and read them back.

    Args:
        objects: of the store.
        options: of it.

    Raises:
        ConfigError: if it does not take them, or does not give them back.
    """
    content, mark = os.urandom(PIECE), os.urandom(8).hex()
    names = [f"hybrid-rate/{mark}/{index}" for index in range(_SAMPLE)]
    size = PIECE * _SAMPLE
    try:
        begin = time.perf_counter()
        for name in names:
            objects.put(name, content)
        written = time.perf_counter()
        found = [one for name in names for one in objects.get([name])]
        read = time.perf_counter()
        objects.remove(names)
    except OSError as error:
        raise _silent(options, size, f"{error.strerror}") from error
    if any(one != content for one in found):
        raise _silent(options, size, "what came back differs")
    return DiskRates(size / (written - begin), size / (read - written))


def _silent(options: StoreOptions, size: int, why: str) -> ConfigError:
    return ConfigError(
        f"The store at {options.master} did not take and give back {gib(size)}: {why}; "
        "have a member lend memory to it, such as this server by store.size."
    )


def describe(options: StoreOptions, least: DiskRates, ranks: int) -> str:
    """The tier in one line, for the log.

    Args:
        options: of the store.
        least: of the rates of all ranks.
        ranks: how many there are.
    """
    who = "it" if ranks == 1 else f"each of {ranks} ranks"
    return (
        f"hybrid-plugin shares prefixes in the store at {options.master}, to which "
        f"{who} lends {gib(options.size)}, writes "
        f"{least.write_bytes_per_second / 1e9:.2f} GB in a second and from which {who} "
        f"reads {least.read_bytes_per_second / 1e9:.2f} GB.  Whoever reaches the ports "
        "of its members can read prompts and change what is cached: keep them in a "
        "private network."
    )
