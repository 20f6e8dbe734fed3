# SPDX-License-Identifier: Apache-2.0
"""The files of a folder: no more bytes than it may have, the least used goes first."""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from hybrid_plugin.sizes import gib
from hybrid_plugin.tiers import bundle_file, header
from hybrid_plugin.tiers.bundle_file import Rows
from hybrid_plugin.tiers.failure import Failure, Reason
from hybrid_plugin.tiers.files import Files
from hybrid_plugin.tiers.index import BundleIndex, Entry
from hybrid_plugin.tiers.manifest import Manifest
from hybrid_plugin.tiers.outcomes import Outcomes

SUFFIX, UNFINISHED = ".bundle", ".unfinished"

_FULL = (errno.ENOSPC, errno.EDQUOT)

logger = logging.getLogger(__name__)


class Shelf:
    """Files and the index of them, which always agree as far as anybody can tell."""

    def __init__(
        self, path: Path, budget: int, files: Files, outcomes: Outcomes
    ) -> None:
        """Begin with an empty index; `scan` fills it.

        Args:
            path: of the folder, whose name is the rank's.
            budget: bytes of all files together.
            files: the system.
            outcomes: where evictions and failures are counted.
        """
        self.path = path
        self.files = files
        self.index = BundleIndex()
        self.guard = threading.Lock()
        """To be held by whoever uses the index; not while waiting for a disk."""
        self._budget = budget
        self._outcomes = outcomes

    def place(self, key: str) -> Path:
        """The file of a key."""
        return self.path / (key + SUFFIX)

    def scan(self, is_usable: Callable[[Manifest], bool]) -> None:
        """Read all headers; remove what is unfinished or damaged, or too much.

        Args:
            is_usable: whether a layout can be read here.

        Raises:
            OSError: if the folder cannot be read.
        """
        found: list[tuple[int, int, Entry]] = []
        for name in self.files.names(self.path):
            path = self.path / name
            if name.endswith(UNFINISHED):
                self._discard(path)
            if not name.endswith(SUFFIX):
                continue
            read = self._examine(path, is_usable)
            if isinstance(read, Failure):
                logger.warning("hybrid-plugin: removed %s: %s", path, read)
                self._outcomes.failures[read.reason] += 1
                self._discard(path)
            else:
                changed_at, entry = read
                found.append((changed_at, -entry.manifest.end, entry))
        entries = [entry for *_, entry in sorted(found, key=lambda each: each[:2])]
        for entry in entries:
            self.index.add(entry)
        for entry in entries:  # what comes before counts as used later
            self.index.use(self.index.path_to(entry.manifest.key) or ())
        self.make_room(0, ())

    def make_room(
        self, size: int, kept: tuple[Entry, ...], old: Entry | None = None
    ) -> Failure | None:
        """Evict what was not used for the longest time.

        Args:
            size: bytes that are to be had.
            kept: what stays: the bundles before the new one.
            old: goes in any case: it has the key of the new one, and is of no use.
        """
        spared = {entry.manifest.key for entry in kept}
        if size > self._budget - sum(entry.file_bytes for entry in kept):
            return Failure(Reason.NO_ROOM, f"{gib(size)} of {gib(self._budget)}")
        if old is not None and not self.remove(old):
            return Failure(Reason.IO, "a bundle cannot be removed")
        with self.guard:
            excess = self.index.used_bytes + size - self._budget
            victims = []
            for entry in self.index.oldest():
                if excess <= 0:
                    break
                if entry.manifest.key not in spared:
                    victims.append(entry)
                    excess -= entry.file_bytes
        for entry in victims:
            if not self.remove(entry):
                return Failure(Reason.IO, "a bundle cannot be removed")
            self._outcomes.was_evicted(entry.file_bytes)
        return None

    def write(self, manifest: Manifest, tensors: dict[str, Rows]) -> Failure | None:
        """Write a file, for which there must be room; in part it is never found."""
        finished = self.place(manifest.key)
        unfinished = self.path / (manifest.key + UNFINISHED)
        size = len(header.encode(manifest)) + manifest.data_bytes
        try:
            if self.files.free_bytes(self.path) < size:
                return Failure(Reason.DISK_FULL, str(self.path))
            bundle_file.write(self.files, unfinished, manifest, tensors)
            self.files.rename(unfinished, finished)
            self.files.sync_folder(self.path)
        except OSError as error:
            self._discard(unfinished)
            self._discard(finished)
            if error.errno in _FULL:
                return Failure(Reason.DISK_FULL, str(self.path))
            return Failure(Reason.IO, f"{error.strerror}")
        return None

    def touch(self, key: str) -> None:
        """Have a file's time say that it is used, for the order at the next start."""
        with contextlib.suppress(OSError):  # it is of no other use
            self.files.touch(self.place(key), time.time_ns())

    def remove(self, entry: Entry) -> bool:
        """Remove a file; False if that cannot be done."""
        try:
            self.files.remove(self.place(entry.manifest.key))
        except FileNotFoundError:
            pass
        except OSError as error:
            logger.warning("hybrid-plugin: a bundle cannot be removed: %s", error)
            return False
        with self.guard:
            self.index.remove(entry.manifest.key)
        return True

    def _examine(
        self, path: Path, is_usable: Callable[[Manifest], bool]
    ) -> tuple[int, Entry] | Failure:
        try:
            with bundle_file.reading(self.files, path) as reader:
                if isinstance(reader, Failure):
                    return reader
                manifest = reader.manifest
                if (path.name, self.path.name) != (
                    manifest.key + SUFFIX,
                    manifest.rank,
                ):
                    return Failure(Reason.REPLACED, f"it is {manifest.rank}'s")
                entry = Entry(manifest, reader.file_bytes, is_usable(manifest))
                return reader.changed_at, entry
        except OSError as error:
            return Failure(Reason.IO, f"{error.strerror}")

    def _discard(self, path: Path) -> None:
        try:
            self.files.remove(path)
        except FileNotFoundError:
            pass
        except OSError as error:
            logger.warning("hybrid-plugin: %s cannot be removed: %s", path, error)
