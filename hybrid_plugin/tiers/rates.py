# SPDX-License-Identifier: Apache-2.0
"""How fast a rank writes to its folder, and reads from it."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from dataclasses import dataclass
from pathlib import Path

from hybrid_plugin.errors import ConfigError
from hybrid_plugin.sizes import gib
from hybrid_plugin.tiers.files import Files, read_all, write_all

SAMPLE = 64 << 20
"""Bytes that are written and read: enough that the first request to the disk does not
count, and a few tenths of a second on a slow disk."""
LEAST = 1 << 20
"""Bytes of the smallest file that tells anything."""
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_NAME = "rate.unfinished"
"""Of the file: as unfinished it is removed at the next start, should it stay."""


@dataclass(frozen=True, slots=True)
class DiskRates:
    """Of one rank, while the others do the same; the least of all counts."""

    write_bytes_per_second: float
    """To the disk itself: until it says that it has them."""
    read_bytes_per_second: float
    """From the disk itself where the system forgets what it keeps of a file when it is
    asked to; file systems in memory, of networks and of containers may not."""


def measure(folder: Path, files: Files | None = None, size: int = SAMPLE) -> DiskRates:
    """Write a file to a rank's folder, and read it back; all ranks at once.

    On a disk with less room, which what lies there already may have filled, the file is
    the half, down to `LEAST`.

    Args:
        folder: of the rank, which is there.
        files: the system.
        size: bytes of the file.

    Raises:
        ConfigError: if it cannot be written or read.
    """
    files = files or Files()
    _remove(files, folder / _NAME)  # of a server that was killed
    while True:
        try:
            return _measure(folder, files, size)
        except OSError as error:
            if error.errno not in _NO_ROOM or size // 2 < LEAST:
                raise ConfigError(
                    f"The folder {folder} did not take and give back a file of "
                    f"{gib(size)}: {error.strerror}."
                ) from error
        size //= 2


def _measure(folder: Path, files: Files, size: int) -> DiskRates:
    content = os.urandom(size)  # disks may compress
    try:
        begin = time.perf_counter()
        _write(files, folder / _NAME, content)
        written = time.perf_counter()
        seconds = _read(files, folder / _NAME, bytearray(size))
    finally:
        _remove(files, folder / _NAME)
    return DiskRates(size / (written - begin), size / seconds)


def _write(files: Files, path: Path, content: bytes) -> None:
    file = files.create(path)
    try:
        write_all(files, file, [memoryview(content)], 0)
        files.sync(file)
        files.forget(file)
    finally:
        files.close(file)


def _read(files: Files, path: Path, memory: bytearray) -> float:
    """Seconds that it takes to read a file."""
    file = files.open(path)
    try:
        begin = time.perf_counter()
        read_all(files, file, [memoryview(memory)], 0)
        return time.perf_counter() - begin
    finally:
        files.close(file)


def _remove(files: Files, path: Path) -> None:
    with contextlib.suppress(OSError):  # it is not there, or removed at the next start
        files.remove(path)
