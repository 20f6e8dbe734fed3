# SPDX-License-Identifier: Apache-2.0
"""What the folders of a tier hold when a server starts, as the files' headers say."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias, TypeVar

from hybrid_plugin.errors import ConfigError
from hybrid_plugin.tiers import bundle_file
from hybrid_plugin.tiers.bundle import Layouts
from hybrid_plugin.tiers.failure import Failure, Reason
from hybrid_plugin.tiers.files import Files, read_all
from hybrid_plugin.tiers.folder_lock import check_private, hold
from hybrid_plugin.tiers.index import Entry
from hybrid_plugin.tiers.keys import BundleName
from hybrid_plugin.tiers.loading import conversions
from hybrid_plugin.tiers.manifest import Manifest
from hybrid_plugin.tiers.saved_session import MAX_FILE, SavedSession
from hybrid_plugin.tiers.shelf import RECORD, SUFFIX, UNFINISHED

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StockedFile:
    """One rank's part of a bundle, in order as far as its header says."""

    name: BundleName
    start: int
    end: int
    file_bytes: int
    is_usable: bool
    """Whether its layout can be read on its rank."""
    used_at: int
    """When it was written or last used, in nanoseconds."""


@dataclass(frozen=True, slots=True)
class UnreadFile:
    """One rank's part of a bundle that could not be read this time."""

    file_bytes: int


Stock: TypeAlias = dict[str, dict[str, StockedFile | UnreadFile]]
"""By rank and key; ranks send it to each other."""

Own = TypeVar("Own")


class Gather(Protocol):
    """Exchanges what ranks have, where each decides for itself."""

    def __call__(self, own: Own, /) -> Sequence[Own]:
        """What all ranks give, on each of them, in the same order."""


def alone(own: Own) -> Sequence[Own]:
    """Where one process decides for all ranks."""
    return [own]


class TierFolder:
    """The folders of the ranks for which this process decides.

    It has them for itself until it closes them: one server at a time uses them.
    """

    def __init__(
        self,
        path: Path,
        layouts: Mapping[str, Layouts],
        *,
        files: Files | None = None,
        narrow: bool = False,
    ) -> None:
        """Open the folders, or make them, and see what they hold.

        Unfinished and damaged files are removed.  What the file system cannot read now
        it may read later: that stays until its room is needed, but this server does not
        find it.

        Args:
            path: of the tier; each rank has a folder of its own in it.
            layouts: by `Identity.rank_name`, of the ranks for which this process
                decides: all those of a replica, or its own, where each rank decides
                for itself.
            files: the system.
            narrow: whether states and KV may be rounded to a smaller element type.

        Raises:
            ConfigError: if a folder cannot be used, or is used by another process.
        """
        self._files = files or Files()
        self._path = path
        self._narrow = narrow
        self._held = ExitStack()
        try:
            for rank in layouts:
                self._open(path / rank)
            self._stock: Stock = {
                rank: self._scan(path / rank, own) for rank, own in layouts.items()
            }
        except OSError as error:
            self.close()
            raise ConfigError(
                f"The folder {path} cannot hold bundles: {error.strerror}."
            ) from error
        except ConfigError:
            self.close()
            raise

    def close(self) -> None:
        """Let another server open the folders."""
        self._held.close()

    def entries(self, gather: Gather = alone) -> list[Entry]:
        """The bundles of which every rank has its part, the least recently used first.

        The others are removed.  All ranks that decide for themselves call it at once,
        and get the same.

        Args:
            gather: exchanges what ranks have, where each decides for itself.
        """
        ranks: Stock = {}
        for stock in gather(self._stock):
            ranks |= stock
        common = set.intersection(*[set(files) for files in ranks.values()])
        found = []
        for key in common:
            parts = [files[key] for files in ranks.values()]
            read = [part for part in parts if isinstance(part, StockedFile)]
            is_read = len(read) == len(parts)
            entry = _whole(read) if is_read else _unread_bundle(key, parts)
            if entry is not None:
                used_at = max([part.used_at for part in read], default=0)
                found.append((used_at, -entry.end, key, entry))
        found.sort(key=lambda each: each[:3])
        self._remove_all_but({key for *_, key, _ in found})
        return [entry for *_, entry in found]

    def sessions(self, gather: Gather = alone) -> list[SavedSession]:
        """The sessions that every rank has, in the order of their files' names.

        The others, and damaged ones, are removed.  All ranks that decide for themselves
        call it at once, and get the same.

        Args:
            gather: as for `entries`.
        """
        own = {rank: self._read_sessions(self._path / rank) for rank in self._stock}
        ranks: dict[str, dict[str, SavedSession]] = {}
        for each in gather(own):
            ranks |= each
        first, *others = ranks.values()
        common = {
            key: session
            for key, session in sorted(first.items())
            if all(other.get(key) == session for other in others)
        }
        for rank, found in own.items():
            for key in found.keys() - common.keys():
                self._remove(self._path / rank / (key + RECORD))
        return list(common.values())

    def discard(self, keys: Iterable[str]) -> None:
        """Remove bundles of the ranks for which this process decides.

        Args:
            keys: of `DiskTier.trim`.
        """
        for key in keys:
            for rank in self._stock:
                name = BundleName.from_text(key).key + SUFFIX
                self._remove(self._path / rank / name)

    # ---------------------------------------------------------------- internal

    def _open(self, folder: Path) -> None:
        self._files.make_folder(folder)
        check_private(folder)
        self._held.callback(os.close, hold(folder))

    def _scan(self, folder: Path, own: Layouts) -> dict[str, StockedFile | UnreadFile]:
        """Read all headers; remove what is unfinished or damaged.

        Raises:
            OSError: if the folder cannot be read.
        """
        found: dict[str, StockedFile | UnreadFile] = {}
        for name in self._files.names(folder):
            path = folder / name
            if name.endswith(UNFINISHED):
                self._remove(path)
            if not name.endswith(SUFFIX):
                continue
            read = self._examine(path, own)
            if not isinstance(read, Failure):
                found[read.name.key] = read
            elif read.reason is Reason.IO:
                logger.warning("hybrid-plugin: cannot read %s: %s", path, read)
                found[name.removesuffix(SUFFIX)] = self._unread_file(path)
            else:
                logger.warning("hybrid-plugin: removed %s: %s", path, read)
                self._remove(path)
        return found

    def _unread_file(self, path: Path) -> UnreadFile:
        try:
            return UnreadFile(self._files.size_of(path))
        except OSError:
            return UnreadFile(0)  # nobody can say

    def _read_sessions(self, folder: Path) -> dict[str, SavedSession]:
        """Read all sessions of a rank by their keys; remove what is damaged.

        What cannot be read now may be read later, and stays.
        """
        found = {}
        for name in self._files.names(folder):
            if not name.endswith(RECORD):
                continue
            session = read_session(self._files, folder / name)
            if isinstance(session, Failure):
                logger.warning("hybrid-plugin: no session in %s: %s", name, session)
                if session.reason != Reason.IO:
                    self._remove(folder / name)
            else:
                found[session.key] = session
        return found

    def _examine(self, path: Path, own: Layouts) -> StockedFile | Failure:
        try:
            with bundle_file.reading(self._files, path) as reader:
                if isinstance(reader, Failure):
                    return reader
                manifest = reader.manifest
                place = path.name, path.parent.name
                if place != (manifest.key + SUFFIX, manifest.rank):
                    return Failure(Reason.REPLACED, f"it is {manifest.rank}'s")
                return StockedFile(
                    manifest.name,
                    manifest.start,
                    manifest.end,
                    reader.file_bytes,
                    self._is_usable(manifest, own),
                    reader.changed_at,
                )
        except OSError as error:
            return Failure(Reason.IO, f"{error.strerror}")

    def _is_usable(self, manifest: Manifest, own: Layouts) -> bool:
        return not isinstance(conversions(manifest, own, self._narrow), Failure)

    def _remove_all_but(self, keys: set[str]) -> None:
        """Remove what other ranks lack: nobody finds it."""
        for rank, files in self._stock.items():
            for key in files.keys() - keys:
                self._remove(self._path / rank / (key + SUFFIX))

    def _remove(self, path: Path) -> None:
        try:
            self._files.remove(path)
        except FileNotFoundError:
            pass
        except OSError as error:
            logger.warning("hybrid-plugin: %s cannot be removed: %s", path, error)


def read_session(files: Files, path: Path) -> SavedSession | Failure:
    """Read the file of a session.

    Args:
        files: the system.
        path: of the file.
    """
    try:
        file = files.open(path)
        try:
            size = files.size(file)
            if size > MAX_FILE:
                return Failure(Reason.MALFORMED, f"{size} bytes")
            content = bytearray(size)
            if not read_all(files, file, [memoryview(content)], 0):
                return Failure(Reason.TORN, "session")
        finally:
            files.close(file)
    except OSError as error:
        return Failure(Reason.IO, f"{error.strerror}")
    session = SavedSession.from_text(content.decode(errors="replace"))
    if isinstance(session, SavedSession) and path.name != session.key + RECORD:
        return Failure(Reason.REPLACED, f"it is {session.name!r:.80}")
    return session


def _unread_bundle(key: str, parts: Sequence[StockedFile | UnreadFile]) -> Entry:
    """A bundle of which some rank could not read its part: all but its key and size are
    unknown, and nobody finds it."""
    name = BundleName(key, "", "", "")
    return Entry(name, 0, 0, sum(part.file_bytes for part in parts), is_usable=False)


def _whole(parts: Sequence[StockedFile]) -> Entry | None:
    """The bundle that parts of all ranks make; None if they do not belong together."""
    first = parts[0]
    if any(
        (part.name, part.start, part.end) != (first.name, first.start, first.end)
        for part in parts
    ):
        return None
    return Entry(
        first.name,
        first.start,
        first.end,
        sum(part.file_bytes for part in parts),
        all(part.is_usable for part in parts),
    )
