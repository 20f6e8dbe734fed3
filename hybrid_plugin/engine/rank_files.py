# SPDX-License-Identifier: Apache-2.0
"""The disk tier as a rank sees it: files of its own, written and read as it is told."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hybrid_plugin.config import ConfigError, DiskOptions
from hybrid_plugin.device.host.copies import HostCopies
from hybrid_plugin.sizes import gib
from hybrid_plugin.tiers import rates
from hybrid_plugin.tiers.agreement import Lost
from hybrid_plugin.tiers.bundle import Bundle, Layouts
from hybrid_plugin.tiers.failure import Failure, Reason
from hybrid_plugin.tiers.files import Files
from hybrid_plugin.tiers.folder_lock import check_private, hold
from hybrid_plugin.tiers.identity import Identity
from hybrid_plugin.tiers.keys import BundleName
from hybrid_plugin.tiers.manifest import Manifest
from hybrid_plugin.tiers.rates import DiskRates
from hybrid_plugin.tiers.shelf import BundleShelf
from hybrid_plugin.tiers.transfers import check_rows


@dataclass(frozen=True, slots=True)
class RanksOnDisk:
    """What whoever decides for the ranks has to know of them."""

    identity: Identity
    """Of any of them."""
    layouts: Mapping[str, Layouts]
    """By `Identity.rank_name`, of all ranks whose files share the size."""
    read_bytes_per_second: float
    """That any of them reads at least, while all do."""


class FilesOfWeights:
    """A rank's files, as long as they are of the weights that it was started with.

    Weights that are updated in memory are in no file.  Who decides hears of an update a
    step or two later; what it orders until then under the old name is refused here.
    """

    at_once = 1

    def __init__(self, shelf: BundleShelf, fingerprint: str) -> None:
        """Begin with the weights of the files.

        Args:
            shelf: of the rank.
            fingerprint: of these weights.
        """
        self._shelf = shelf
        self._fingerprint = fingerprint
        self.updates = 0
        """Of weights, since the start."""

    def write(self, bundle: Bundle) -> Manifest | Failure:
        """See `Sink.write`."""
        if self._is_outdated(bundle):
            return Failure(Reason.CLEARED)
        return self._shelf.write(bundle)

    def fetch(self, bundles: Sequence[Bundle]) -> Lost | None:
        """See `Source.fetch`."""
        for place, bundle in enumerate(bundles):
            if self._is_outdated(bundle):
                return Lost(place, Failure(Reason.OTHER_TOKENS, "of other weights"))
        return self._shelf.fetch(bundles)

    def discard(self, keys: Sequence[str]) -> None:
        """See `Sink.discard`."""
        self._shelf.discard(keys)

    def record(self, name: str, text: str | None) -> Failure | None:
        """See `Sink.record`: what is named was written, of whatever weights it is."""
        return self._shelf.record(name, text)

    def _is_outdated(self, bundle: Bundle) -> bool:
        name = BundleName.from_text(bundle.key)
        return self.updates > 0 and name.fingerprint == self._fingerprint


def files_of(
    host: HostCopies, disk: DiskOptions, identity: Identity, layouts: Layouts
) -> FilesOfWeights:
    """The files of one rank.

    Args:
        host: memory of the rank.
        disk: the option.
        identity: of the rank.
        layouts: of its rows.
    """
    check_rows(layouts, host)
    shelf = BundleShelf(disk.folder, identity.rank_name, layouts)
    return FilesOfWeights(shelf, identity.fingerprint())


def try_folder(
    disk: DiskOptions, identity: Identity, files: Files | None = None
) -> DiskRates:
    """Make a rank's folder, and measure it.  All ranks do it at once.

    Args:
        disk: the option.
        identity: of the rank.
        files: the system.

    Raises:
        ConfigError: if it cannot be used, or another server uses it.
    """
    files = files or Files()
    folder = disk.folder / identity.rank_name
    try:
        files.make_folder(folder)
        check_private(folder)
        held = hold(folder)
    except OSError as error:
        raise ConfigError(
            f"disk cannot use the folder {folder}: {error.strerror}; give another one, "
            "or leave disk out."
        ) from error
    try:
        return rates.measure(folder, files)
    finally:
        os.close(held)


def describe(disk: DiskOptions, least: DiskRates, ranks: int) -> str:
    """The tier in one line, for the log.

    Args:
        disk: the option.
        least: of the rates of all ranks.
        ranks: whose files share the size.
    """
    who = "it" if ranks == 1 else f"each of {ranks} ranks"
    return (
        f"hybrid-plugin keeps up to {gib(disk.size)} of files in {disk.path}: {who} "
        f"writes {least.write_bytes_per_second / 1e9:.2f} GB in a second "
        f"and reads {least.read_bytes_per_second / 1e9:.2f} GB."
    )
