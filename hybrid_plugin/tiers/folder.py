# SPDX-License-Identifier: Apache-2.0
"""A folder of bundles: a size that it never exceeds, and a memory that outlives us."""

from __future__ import annotations

import os
import threading
from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path

from hybrid_plugin.core.tree.tokens import Tokens
from hybrid_plugin.errors import ConfigError
from hybrid_plugin.tiers import bundle_file, header
from hybrid_plugin.tiers.bundle import Bundle, Destination, Layouts, needed
from hybrid_plugin.tiers.bundle_file import BundleReader
from hybrid_plugin.tiers.describe import describe, tensors_of, with_checksums
from hybrid_plugin.tiers.failure import Failure, Reason
from hybrid_plugin.tiers.files import Files
from hybrid_plugin.tiers.folder_lock import check_private, hold
from hybrid_plugin.tiers.identity import Identity
from hybrid_plugin.tiers.index import Entry
from hybrid_plugin.tiers.loading import check_tokens, conversions, fill
from hybrid_plugin.tiers.manifest import Manifest
from hybrid_plugin.tiers.outcomes import Outcomes
from hybrid_plugin.tiers.shelf import Shelf

_SOUND = (Reason.OTHER_TOKENS, Reason.LAYOUT)
"""A file that failed for these is in order; any other is removed, so that nobody waits
for it again."""


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
        self.outcomes = Outcomes()
        self._identity = identity
        self._fingerprint = identity.fingerprint()
        self._layouts = layouts
        self._narrow = narrow
        self._writing = threading.Lock()
        self._generation = 0
        files = files or Files()
        self._shelf = Shelf(self.path, budget, files, self.outcomes)
        self._index, self._guard = self._shelf.index, self._shelf.guard
        try:
            files.make_folder(self.path)
            check_private(self.path)
            self._lock = hold(self.path)
        except OSError as error:
            raise self._unusable(error) from error
        try:
            self._shelf.scan(self._is_usable)
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
            self.outcomes.failed(result)
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
        path = self._shelf.place(manifest.key)
        try:
            with bundle_file.reading(self._shelf.files, path) as reader:
                if isinstance(reader, Failure):
                    result: Failure | None = reader
                else:
                    result = self._fill(reader, manifest, tokens, destination)
        except FileNotFoundError:
            result = Failure(Reason.MISSING, path.name)
        except OSError as error:
            result = Failure(Reason.IO, f"{path.name}: {error.strerror}")
        if result is None:
            self._used(manifest)
            self.outcomes.was_loaded(manifest.data_bytes)
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
                    self._shelf.remove(entry)

    # ------------------------------------------------------------------ writing

    def _store(self, bundle: Bundle) -> Manifest | Failure:
        manifest = describe(bundle, self._identity, self._layouts)
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
        failure = self._shelf.make_room(size, before, old) or self._shelf.write(
            manifest, tensors
        )
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
            self._shelf.remove(entry)
            return Failure(Reason.CLEARED)
        self.outcomes.was_stored(entry.file_bytes)
        return entry.manifest

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

    def _is_usable(self, manifest: Manifest) -> bool:
        moves = conversions(manifest, self._layouts, self._narrow)
        return not isinstance(moves, Failure)

    def _unusable(self, error: OSError) -> ConfigError:
        return ConfigError(
            f"The folder {self.path} cannot hold bundles: {error.strerror}."
        )

    def _used(self, manifest: Manifest) -> None:
        """Note a use, in the file's time too, where it outlives this process."""
        with self._guard:
            self._index.use(self._index.path_to(manifest.key) or ())
        self._shelf.touch(manifest.key)

    def _drop(self, manifest: Manifest, failure: Failure) -> None:
        """Forget a bundle that could not be loaded."""
        self.outcomes.failed(failure)
        with self._guard:
            entry = self._index.get(manifest.key)
            if entry is None or entry.manifest != manifest:
                return  # evicted, or stored anew since it was found
            if failure.reason in _SOUND:
                return
            self._index.hide(manifest.key)  # should it not let itself be removed
        self._shelf.remove(entry)
