# SPDX-License-Identifier: Apache-2.0
"""A folder of bundles: a size that it never exceeds, and a memory that outlives us."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field
from pathlib import Path

from hybrid_plugin.core.tree.tokens import Tokens
from hybrid_plugin.errors import ConfigError
from hybrid_plugin.sizes import gib
from hybrid_plugin.tiers import bundle_file, header
from hybrid_plugin.tiers.bundle import Bundle, Destination, Layouts, needed
from hybrid_plugin.tiers.bundle_file import BundleReader, Rows
from hybrid_plugin.tiers.describe import describe, tensors_of, with_checksums
from hybrid_plugin.tiers.failure import Failure, Reason
from hybrid_plugin.tiers.files import Files
from hybrid_plugin.tiers.folder_lock import check_private, hold
from hybrid_plugin.tiers.identity import Identity
from hybrid_plugin.tiers.index import BundleIndex, Entry
from hybrid_plugin.tiers.loading import check_tokens, conversions, fill
from hybrid_plugin.tiers.manifest import Manifest

SUFFIX, UNFINISHED = ".bundle", ".unfinished"

_SOUND = (Reason.OTHER_TOKENS, Reason.LAYOUT)
"""A file that failed for these is in order; any other is removed, so that nobody waits
for it again."""
_EXPECTED = (Reason.NO_PARENT, Reason.NO_ROOM, Reason.CLEARED)
"""No fault of the disk, and not worth a line in the log."""
_FULL = (errno.ENOSPC, errno.EDQUOT)

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class FolderStats:
    """What happened since the folder was opened."""

    stored: int = 0
    stored_bytes: int = 0
    loaded: int = 0
    loaded_bytes: int = 0
    evicted: int = 0
    evicted_bytes: int = 0
    failures: Counter[Reason] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class Found:
    """Where a sequence can resume."""

    path: tuple[Manifest, ...]
    """The bundles to load, in the order of the sequence."""

    @property
    def end(self) -> int:
        """Tokens whose KV they hold, with the state behind the last of them."""
        return self.path[-1].end


class BundleFolder:
    """The bundles of one rank.

    One process at a time has it open.  Its methods may be called by several threads;
    `find` does no I/O, `store` and `load` take as long as the disk does.
    """

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
        """Open a folder, or make one, and see what it holds.

        Unfinished and damaged files are removed.  Files of other models and layouts
        count for the size, and are evicted like any others.

        Args:
            path: of the tier; each rank has a folder of its own in it.
            budget: bytes that the files of this rank may have.
            identity: whose bundles are found and stored.
            layouts: of this process's rows.
            files: the system.
            narrow: whether states and KV may be rounded to a smaller element type.

        Raises:
            ConfigError: if the folder cannot be used, or is used by another process.
        """
        self.path = path / identity.rank_name
        self.stats = FolderStats()
        self._budget = budget
        self._fingerprint = identity.fingerprint()
        self._layouts = layouts
        self._files = files or Files()
        self._narrow = narrow
        self._index = BundleIndex()
        self._guard = threading.Lock()
        self._writing = threading.Lock()
        self._told: set[Reason] = set()
        self._generation = 0
        try:
            self._files.make_folder(self.path)
            check_private(self.path)
            self._lock = hold(self.path)
        except OSError as error:
            raise self._unusable(error) from error
        try:
            self._scan()
        except OSError as error:
            self.close()
            raise self._unusable(error) from error

    @property
    def count(self) -> int:
        """Bundles, those that cannot be read here included."""
        with self._guard:
            return len(self._index)

    @property
    def used_bytes(self) -> int:
        """Bytes of all bundles."""
        with self._guard:
            return self._index.used_bytes

    def close(self) -> None:
        """Let another process open the folder."""
        os.close(self._lock)

    def find(
        self, namespace: Hashable, tokens: Tokens, limit: int | None = None
    ) -> Found | None:
        """The longest stored prefix of a sequence; its bundles count as used.

        Args:
            namespace: of the sequence.
            tokens: of the sequence.
            limit: the last position that is of use; by default the last but one, so
                that a token is left to compute.
        """
        limit = len(tokens) - 1 if limit is None else limit
        with self._guard:
            path = self._index.longest(self._fingerprint, namespace, tokens, limit)
            if path is None:
                return None
            self._index.use(path)
        return Found(tuple(entry.manifest for entry in path))

    def store(self, bundle: Bundle) -> Manifest | Failure:
        """Write a bundle, and evict others for it; a stored one is not written again.

        Raises:
            ValueError: if its rows have not the sizes of this process's layouts.
        """
        with self._writing:
            result = self._store(bundle)
        if isinstance(result, Failure):
            self._failed(result)
        return result

    def load(
        self, manifest: Manifest, tokens: Tokens, destination: Destination
    ) -> Failure | None:
        """Read a bundle.  After a failure the destination holds anything.

        Args:
            manifest: of a path that was found.
            tokens: of the sequence, up to the bundle's end at least.
            destination: where to.

        Raises:
            ValueError: if the destination has other sizes.
        """
        path = self._path(manifest.key)
        try:
            with bundle_file.reading(self._files, path) as reader:
                if isinstance(reader, Failure):
                    result: Failure | None = reader
                else:
                    result = self._fill(reader, manifest, tokens, destination)
        except FileNotFoundError:
            result = Failure(Reason.MISSING, path.name)
        except OSError as error:
            result = Failure(Reason.IO, f"{path.name}: {error.strerror}")
        if result is None:
            self._told.clear()
            self._used(manifest)
            self.stats.loaded += 1
            self.stats.loaded_bytes += manifest.data_bytes
            return None
        self._drop(manifest, result)
        return result

    def forget(self) -> None:
        """Find no bundle of this identity any more, nor one that is being stored.

        Does no I/O: the files count for the size until `clear` or eviction.
        """
        with self._guard:
            self._generation += 1
            for entry in list(self._index.oldest()):
                if entry.manifest.fingerprint == self._fingerprint:
                    self._index.hide(entry.manifest.key)

    def clear(self) -> None:
        """Remove all bundles of this identity, as a flush asks for."""
        self.forget()
        with self._writing:
            with self._guard:
                entries = list(self._index.oldest())
            for entry in entries:
                if entry.manifest.fingerprint == self._fingerprint:
                    self._remove(entry)

    # ------------------------------------------------------------------ writing

    def _store(self, bundle: Bundle) -> Manifest | Failure:
        manifest = describe(bundle, self._fingerprint, self._layouts)
        with self._guard:
            generation = self._generation
            old = self._index.get(manifest.key)
            path = self._index.path_to(manifest.key)
            before = self._index.path_to(manifest.parent) if manifest.parent else ()
            self._index.use(path or before or ())
        if path is not None:
            return path[-1].manifest
        if before is None:
            return Failure(Reason.NO_PARENT, f"at token {manifest.start}")
        tensors = tensors_of(bundle)
        manifest = with_checksums(manifest, tensors)
        size = len(header.encode(manifest)) + manifest.data_bytes
        failure = self._make_room(size, before, old) or self._write(manifest, tensors)
        if failure is not None:
            return failure
        return self._enter(Entry(manifest, size, is_usable=True), generation)

    def _enter(self, entry: Entry, generation: int) -> Manifest | Failure:
        """Find a bundle that was written from now on, unless there was a flush."""
        with self._guard:
            self._index.add(entry)
            if generation != self._generation:
                self._index.hide(entry.manifest.key)
            self._index.use(self._index.path_to(entry.manifest.key) or ())
        if generation != self._generation:
            self._remove(entry)
            return Failure(Reason.CLEARED)
        self._told.clear()
        self.stats.stored += 1
        self.stats.stored_bytes += entry.file_bytes
        return entry.manifest

    def _make_room(
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
        if old is not None and not self._remove(old):
            return Failure(Reason.IO, "a bundle cannot be removed")
        with self._guard:
            excess = self._index.used_bytes + size - self._budget
            victims = []
            for entry in self._index.oldest():
                if excess <= 0:
                    break
                if entry.manifest.key not in spared:
                    victims.append(entry)
                    excess -= entry.file_bytes
        for entry in victims:
            if not self._remove(entry):
                return Failure(Reason.IO, "a bundle cannot be removed")
            self.stats.evicted += 1
            self.stats.evicted_bytes += entry.file_bytes
        return None

    def _write(self, manifest: Manifest, tensors: dict[str, Rows]) -> Failure | None:
        finished = self._path(manifest.key)
        unfinished = self.path / (manifest.key + UNFINISHED)
        size = len(header.encode(manifest)) + manifest.data_bytes
        try:
            if self._files.free_bytes(self.path) < size:
                return Failure(Reason.DISK_FULL, str(self.path))
            bundle_file.write(self._files, unfinished, manifest, tensors)
            self._files.rename(unfinished, finished)
            self._files.sync_folder(self.path)
        except OSError as error:
            self._discard(unfinished)
            self._discard(finished)
            if error.errno in _FULL:
                return Failure(Reason.DISK_FULL, str(self.path))
            return Failure(Reason.IO, f"{error.strerror}")
        return None

    # ------------------------------------------------------------------ reading

    def _fill(
        self,
        reader: BundleReader,
        manifest: Manifest,
        tokens: Tokens,
        destination: Destination,
    ) -> Failure | None:
        failure = check_tokens(reader, manifest, tokens)
        if failure is not None:
            return failure
        moves = conversions(reader.manifest, self._layouts, self._narrow)
        if isinstance(moves, Failure):
            return moves
        pages = needed(reader.manifest, self._layouts)
        counts = {pool: pages.count for pool, pages in pages.items()}
        return fill(reader, moves, counts, destination)

    # ------------------------------------------------------------------ keeping

    def _scan(self) -> None:
        """Read what is in the folder, the least recently used first."""
        found: list[tuple[int, int, Entry]] = []
        for name in self._files.names(self.path):
            path = self.path / name
            if name.endswith(UNFINISHED):
                self._discard(path)
            if not name.endswith(SUFFIX):
                continue
            read = self._examine(path)
            if isinstance(read, Failure):
                logger.warning("hybrid-plugin: removed %s: %s", path, read)
                self.stats.failures[read.reason] += 1
                self._discard(path)
            else:
                changed_at, entry = read
                found.append((changed_at, -entry.manifest.end, entry))
        entries = [entry for *_, entry in sorted(found, key=lambda each: each[:2])]
        for entry in entries:
            self._index.add(entry)
        for entry in entries:  # what comes before counts as used later
            self._index.use(self._index.path_to(entry.manifest.key) or ())
        self._make_room(0, ())

    def _unusable(self, error: OSError) -> ConfigError:
        return ConfigError(
            f"The folder {self.path} cannot hold bundles: {error.strerror}."
        )

    def _examine(self, path: Path) -> tuple[int, Entry] | Failure:
        try:
            with bundle_file.reading(self._files, path) as reader:
                if isinstance(reader, Failure):
                    return reader
                if path.name != reader.manifest.key + SUFFIX:
                    return Failure(Reason.MALFORMED, "it has another one's name")
                moves = conversions(reader.manifest, self._layouts, self._narrow)
                usable = not isinstance(moves, Failure)
                entry = Entry(reader.manifest, reader.file_bytes, usable)
                return reader.changed_at, entry
        except OSError as error:
            return Failure(Reason.IO, f"{error.strerror}")

    def _used(self, manifest: Manifest) -> None:
        """Note a use, in the file's time too, where it outlives this process."""
        with self._guard:
            self._index.use(self._index.path_to(manifest.key) or ())
        # The time is of use for the next start's order only.
        with contextlib.suppress(OSError):
            self._files.touch(self._path(manifest.key), time.time_ns())

    def _drop(self, manifest: Manifest, failure: Failure) -> None:
        """Forget a bundle that could not be loaded."""
        self._failed(failure)
        with self._guard:
            entry = self._index.get(manifest.key)
        if entry is None or entry.manifest != manifest:
            return  # evicted, or stored anew since it was found
        if failure.reason not in _SOUND:
            self._remove(entry)

    def _remove(self, entry: Entry) -> bool:
        """Remove a file; False if that cannot be done."""
        try:
            self._files.remove(self._path(entry.manifest.key))
        except FileNotFoundError:
            pass
        except OSError as error:
            logger.warning("hybrid-plugin: a bundle cannot be removed: %s", error)
            return False
        with self._guard:
            self._index.remove(entry.manifest.key)
        return True

    def _discard(self, path: Path) -> None:
        try:
            self._files.remove(path)
        except FileNotFoundError:
            pass
        except OSError as error:
            logger.warning("hybrid-plugin: %s cannot be removed: %s", path, error)

    def _failed(self, failure: Failure) -> None:
        """Count a failure; the first of its kind since something succeeded is logged."""
        self.stats.failures[failure.reason] += 1
        if failure.reason in _EXPECTED or failure.reason in self._told:
            return
        self._told.add(failure.reason)
        logger.warning("hybrid-plugin: a bundle is lost: %s", failure)

    def _path(self, key: str) -> Path:
        return self.path / (key + SUFFIX)
