# SPDX-License-Identifier: Apache-2.0
"""The files of one rank, which are written, read and removed as somebody else decides.

What is kept, and for how long, is for `DiskTier` to say, which may be in another
process: here nothing is remembered.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from hybrid_plugin.core.commands import Pool
from hybrid_plugin.tiers import bundle_file
from hybrid_plugin.tiers.agreement import Lost
from hybrid_plugin.tiers.bundle import Bundle, Layouts, PageBytes
from hybrid_plugin.tiers.bundle_file import BundleReader
from hybrid_plugin.tiers.describe import (
    describe,
    file_bytes,
    tensors_of,
    with_checksums,
)
from hybrid_plugin.tiers.failure import Failure, Reason
from hybrid_plugin.tiers.files import Files, write_all
from hybrid_plugin.tiers.keys import BundleName
from hybrid_plugin.tiers.loading import check, conversions, fill, gap
from hybrid_plugin.tiers.manifest import Manifest

SUFFIX, RECORD, UNFINISHED = ".bundle", ".session", ".unfinished"

_FULL = (errno.ENOSPC, errno.EDQUOT)

logger = logging.getLogger(__name__)


class BundleShelf:
    """One rank's part of all bundles: a file for each, in a folder of its own."""

    at_once = 1

    def __init__(
        self,
        path: Path,
        rank: str,
        layouts: Layouts,
        *,
        files: Files | None = None,
        narrow: bool = False,
    ) -> None:
        """Does nothing: the folder is there when something is written.

        Args:
            path: of the tier; each rank has a folder of its own in it.
            rank: `Identity.rank_name`.
            layouts: of this rank's rows.
            files: the system.
            narrow: whether states and KV may be rounded to a smaller element type.
        """
        self.path = path / rank
        self.layouts = layouts
        self.files = files or Files()
        self._rank = rank
        self._narrow = narrow
        self._stuck: set[Path] = set()
        """Files that could not be removed.  They take room that others were promised,
        so nothing is written before they are gone."""

    def place(self, key: str) -> Path:
        """The file of a key."""
        return self.path / (key + SUFFIX)

    def write(self, bundle: Bundle) -> Manifest | Failure:
        """Write a bundle, in the place of any other of its key.

        In part it is never found.

        Raises:
            ValueError: if its rows have not the sizes of the layouts.
        """
        starts = {pool: pages.start for pool, pages in bundle.pages.items()}
        tensors = tensors_of(bundle)
        manifest = with_checksums(
            describe(
                BundleName.from_text(bundle.key),
                bundle.start,
                bundle.end,
                starts,
                self._rank,
                self.layouts,
            ),
            tensors,
        )
        finished = self.place(manifest.key)
        unfinished = finished.with_suffix(UNFINISHED)
        for path in list(self._stuck):
            self._remove(path)
        if self._stuck:
            return Failure(Reason.IO, "a bundle cannot be removed")
        try:
            if self.files.free_bytes(self.path) < file_bytes(manifest):
                return Failure(Reason.DISK_FULL, str(self.path))
            bundle_file.write(self.files, unfinished, manifest, tensors)
            self.files.rename(unfinished, finished)
            self.files.sync_folder(self.path)
        except OSError as error:
            self._remove(unfinished)
            self._remove(finished)
            if error.errno in _FULL:
                return Failure(Reason.DISK_FULL, str(self.path))
            return Failure(Reason.IO, f"{error.strerror}")
        return manifest

    def record(self, name: str, text: str | None) -> Failure | None:
        """Keep a text beside the bundles, in the place of any other of its name.

        In part it is never found.

        Args:
            name: hexadecimal digits.
            text: None removes it, if it is there.
        """
        finished = self.path / (name + RECORD)
        unfinished = finished.with_suffix(UNFINISHED)
        try:
            if text is None:
                with contextlib.suppress(FileNotFoundError):
                    self.files.remove(finished)
            else:
                self._write_text(unfinished, text)
                self.files.rename(unfinished, finished)
            self.files.sync_folder(self.path)
        except OSError as error:
            self._remove(unfinished)
            full = error.errno in _FULL
            return Failure(Reason.DISK_FULL if full else Reason.IO, f"{error.strerror}")
        return None

    def _write_text(self, path: Path, text: str) -> None:
        file = self.files.create(path)
        try:
            write_all(self.files, file, [memoryview(text.encode())], 0)
            self.files.sync(file)
        finally:
            self.files.close(file)

    def read(self, wanted: Bundle, *, is_first: bool = True) -> Failure | None:
        """Read a bundle.  After a failure the memory holds anything.

        Args:
            wanted: the bundle, and memory for it.
            is_first: whether its first page lacks the tokens of the bundle before, too,
                if that one ends inside it.

        Raises:
            ValueError: if the memory has other sizes than the layouts say.
        """
        path = self.place(BundleName.from_text(wanted.key).key)
        try:
            with bundle_file.reading(self.files, path) as reader:
                if isinstance(reader, Failure):
                    return reader
                failure = self._fill(reader, wanted, is_first)
        except FileNotFoundError:
            return Failure(Reason.MISSING, path.name)
        except OSError as error:
            return Failure(Reason.IO, f"{path.name}: {error.strerror}")
        if failure is None:
            self._touch(path)
        return failure

    def fetch(self, bundles: Sequence[Bundle]) -> Lost | None:
        """Read bundles, in the order of the sequence: all, or it failed.

        Raises:
            ValueError: if the memory has other sizes than the layouts say.
        """
        for place, wanted in enumerate(bundles):
            failure = self.read(wanted, is_first=not place)
            if failure is not None:
                return Lost(place, failure)
        return None

    def discard(self, keys: Iterable[str]) -> None:
        """Remove files, where they are there; what cannot be removed is logged.

        Args:
            keys: `BundleName.text` of each.
        """
        for key in keys:
            self._remove(self.place(BundleName.from_text(key).key))

    # ---------------------------------------------------------------- internal

    def _fill(
        self, reader: BundleReader, wanted: Bundle, is_first: bool
    ) -> Failure | None:
        failure = check(reader, wanted, self._rank)
        if failure is not None:
            return failure
        moves = conversions(reader.manifest, self.layouts, self._narrow)
        if isinstance(moves, Failure):
            return moves
        failure = fill(reader, moves, wanted)
        if failure is None and is_first:
            return self._fill_before(reader.manifest, wanted)
        return failure

    def _fill_before(self, manifest: Manifest, wanted: Bundle) -> Failure | None:
        """Complete the first page, of which the file has less, from the parent's."""
        page = gap(manifest, self.layouts, wanted)
        if page is None:
            return None
        with bundle_file.reading(self.files, self.place(manifest.parent)) as reader:
            if isinstance(reader, Failure):
                return reader
            name, start = reader.manifest.name, reader.manifest.start
            if (name.key, name.fingerprint) != (manifest.parent, manifest.fingerprint):
                return Failure(Reason.REPLACED, "the bundle before")
            pages = {Pool.KV: PageBytes(max(start, page.start), page.rows)}
            tokens = wanted.tokens[: manifest.start]
            return self._fill(reader, Bundle(name.text, tokens, start, pages), True)

    def _touch(self, path: Path) -> None:
        """Have a file's time say that it is used, for the order at the next start."""
        with contextlib.suppress(OSError):  # it is of no other use
            self.files.touch(path, time.time_ns())

    def _remove(self, path: Path) -> None:
        try:
            self.files.remove(path)
        except FileNotFoundError:
            self._stuck.discard(path)
        except OSError as error:
            if path not in self._stuck:
                logger.warning("hybrid-plugin: %s cannot be removed: %s", path, error)
            self._stuck.add(path)
        else:
            self._stuck.discard(path)
