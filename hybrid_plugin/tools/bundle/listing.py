# SPDX-License-Identifier: Apache-2.0
"""What is in a folder of bundles, and in which order it is."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from hybrid_plugin.sizes import gib
from hybrid_plugin.tiers.bundle_file import reading
from hybrid_plugin.tiers.failure import Failure, Reason
from hybrid_plugin.tiers.files import AnybodysFiles
from hybrid_plugin.tiers.folder_lock import hold
from hybrid_plugin.tiers.manifest import Manifest
from hybrid_plugin.tiers.saved_session import SavedSession
from hybrid_plugin.tiers.shelf import RECORD, SUFFIX
from hybrid_plugin.tiers.stock import read_session

_SHOWN = 12
"""Digits of a key that people see."""


@dataclass(frozen=True, slots=True)
class Listed:
    """One file."""

    path: Path
    size: int
    used_at: float
    """Seconds since 1970."""
    manifest: Manifest | None
    """None if the header cannot be read."""
    failure: Failure | None
    """What is wrong with it, as far as it was read."""

    @property
    def key(self) -> str:
        """Its key, by the name of the file."""
        return self.path.name.removesuffix(SUFFIX)

    @property
    def model(self) -> str:
        """Fingerprint of the model, or nothing."""
        return self.manifest.fingerprint if self.manifest is not None else ""


def read(folder: Path, whole: bool = False) -> list[Listed] | None:
    """All bundles in a folder of a server, or of a rank, the last used first.

    Args:
        folder: of either.
        whole: whether contents are read and compared with their checksums.

    Returns:
        None if there is no folder.
    """
    if not folder.is_dir():
        return None
    files = [file for place in _places(folder) for file in place.glob("*" + SUFFIX)]
    listed = [each for file in files if (each := _listed(file, whole)) is not None]
    return sorted(listed, key=lambda each: (-each.used_at, each.path))


def sessions(folder: Path) -> list[tuple[Path, SavedSession]]:
    """All sessions of a server's folder, or of a rank's; damaged ones are left out."""
    found = []
    for path in sorted([*folder.glob("*" + RECORD), *folder.glob("rank-*/*" + RECORD)]):
        session = read_session(AnybodysFiles(), path)
        if isinstance(session, SavedSession):
            found.append((path, session))
    return found


def kept_by(path: Path, session: SavedSession) -> set[Path]:
    """Files of the bundles that a session keeps in a rank's folder.

    Args:
        path: of the session's own file there.
        session: of which it is.
    """
    return {path.parent / (key + SUFFIX) for key in session.keys}


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Keep servers from the folder meanwhile.

    Raises:
        ConfigError: if a server has it open.
    """
    with ExitStack() as stack:
        for place in _places(folder):
            stack.callback(os.close, hold(place))
        yield


def as_lines(bundles: Sequence[Listed]) -> Iterator[str]:
    """A table for a terminal."""
    now = time.time()
    for bundle in bundles:
        manifest = bundle.manifest
        about = (
            f"{bundle.failure}"
            if manifest is None
            else f"tokens {manifest.start} to {manifest.end}"
        )
        yield (
            f"{bundle.key[:_SHOWN]}  {gib(bundle.size):>12}  "
            f"{_age(now - bundle.used_at):>8}  {bundle.model[:_SHOWN]:{_SHOWN}}  "
            f"{bundle.path.parent.name}  {about}"
        )
    models = {bundle.model for bundle in bundles if bundle.model}
    total = sum(bundle.size for bundle in bundles)
    yield f"{len(bundles)} bundles of {len(models)} models, {gib(total)}"


def as_json(bundle: Listed) -> dict[str, object]:
    """The same, with every number as a number."""
    manifest = bundle.manifest
    return {
        "file": str(bundle.path),
        "key": bundle.key,
        "bytes": bundle.size,
        "used_at": bundle.used_at,
        "model": bundle.model or None,
        "parent": manifest.parent or None if manifest is not None else None,
        "start": manifest.start if manifest is not None else None,
        "end": manifest.end if manifest is not None else None,
        "problem": str(bundle.failure) if bundle.failure is not None else None,
    }


def _places(folder: Path) -> list[Path]:
    ranks = sorted(place for place in folder.glob("rank-*-of-*") if place.is_dir())
    return ranks or ([folder] if folder.is_dir() else [])


def _listed(path: Path, whole: bool) -> Listed | None:
    """One file; None if it is gone meanwhile."""
    manifest: Manifest | None = None
    failure: Failure | None
    try:
        status = path.lstat()
        with reading(AnybodysFiles(), path) as reader:
            if isinstance(reader, Failure):
                failure = reader
            else:
                manifest = reader.manifest
                failure = reader.verify() if whole else None
                place = path.parent.name, path.name
                if failure is None and place != (manifest.rank, manifest.key + SUFFIX):
                    failure = Failure(Reason.REPLACED, f"it is {manifest.rank}'s")
    except FileNotFoundError:
        return None
    except OSError as error:
        status = path.lstat()
        failure = Failure(Reason.IO, f"{error.strerror}")
    return Listed(path, status.st_size, status.st_mtime, manifest, failure)


def _age(seconds: float) -> str:
    """How long ago, in the largest whole unit."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{int(seconds // size)} {unit}"
    return f"{max(int(seconds), 0)} s"
