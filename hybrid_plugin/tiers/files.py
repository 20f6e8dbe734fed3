# SPDX-License-Identifier: Apache-2.0
"""What is asked of the operating system, in one place, so that tests can fail it."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

Buffers = Sequence[memoryview]

MAX_BUFFERS = 1024
"""In one call; Linux takes no more."""

_PRIVATE_FILE, _PRIVATE_FOLDER = 0o600, 0o700
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_OLD = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC


class Files:
    """System calls on files; all raise OSError, and none follows a link to a file."""

    def make_folder(self, folder: Path) -> None:
        """Make a folder that only this user reads, and the folders above it."""
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=_PRIVATE_FOLDER, exist_ok=True)

    def names(self, folder: Path) -> list[str]:
        """Names in a folder."""
        return os.listdir(folder)

    def create(self, path: Path) -> int:
        """Open a new file for writing that only this user reads."""
        return os.open(path, _NEW, _PRIVATE_FILE)

    def open(self, path: Path) -> int:
        """Open a file of this user for reading.

        Whoever may rename a folder can put one of their own in its place at any time.
        """
        file = os.open(path, _OLD)
        if os.fstat(file).st_uid != os.geteuid():
            os.close(file)
            raise PermissionError(errno.EPERM, "another user wrote it", str(path))
        return file

    def size_of(self, path: Path) -> int:
        """Bytes of a file that is not open."""
        return os.lstat(path).st_size

    def size(self, file: int) -> int:
        """Bytes of an open file."""
        return os.fstat(file).st_size

    def changed_at(self, file: int) -> int:
        """When an open file was changed or touched, in nanoseconds."""
        return os.fstat(file).st_mtime_ns

    def write(self, file: int, buffers: Buffers, offset: int) -> int:
        """Write at a place; returns the bytes written, which may be fewer."""
        return os.pwritev(file, buffers, offset)

    def read(self, file: int, buffers: Buffers, offset: int) -> int:
        """Read from a place; returns the bytes read, which may be fewer."""
        return os.preadv(file, buffers, offset)

    def sync(self, file: int) -> None:
        """Wait until a file's content is on the disk."""
        os.fsync(file)

    def forget(self, file: int) -> None:
        """Have the system keep no copy of a synced file in memory, if it can do so."""
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self, file: int) -> None:
        """Close a file."""
        os.close(file)

    def rename(self, old: Path, new: Path) -> None:
        """Put a file in the place of another, or of none."""
        os.replace(old, new)

    def sync_folder(self, folder: Path) -> None:
        """Wait until the names in a folder are on the disk."""
        file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(file)
        finally:
            os.close(file)

    def remove(self, path: Path) -> None:
        """Remove a file."""
        os.unlink(path)

    def touch(self, path: Path, nanoseconds: int) -> None:
        """Set the time that `changed_at` tells."""
        os.utime(path, ns=(nanoseconds, nanoseconds), follow_symlinks=False)

    def free_bytes(self, folder: Path) -> int:
        """Bytes that this user may still write to the disk of a folder."""
        status = os.statvfs(folder)
        return status.f_bavail * status.f_frsize


def write_all(files: Files, file: int, buffers: Buffers, offset: int) -> int:
    """Write buffers one behind the other; returns where they end.

    Raises:
        OSError: if the file system fails.
    """
    rest = list(buffers)
    while rest:
        written = files.write(file, rest[:MAX_BUFFERS], offset)
        offset += written
        rest = _behind(rest, written)
    return offset


def read_all(files: Files, file: int, buffers: Buffers, offset: int) -> bool:
    """Fill buffers one behind the other; False if the file ends before.

    Raises:
        OSError: if the file system fails.
    """
    rest = [buffer for buffer in buffers if len(buffer)]
    while rest:
        read = files.read(file, rest[:MAX_BUFFERS], offset)
        if read == 0:
            return False
        offset += read
        rest = _behind(rest, read)
    return True


def _behind(buffers: list[memoryview], done: int) -> list[memoryview]:
    """What is left of buffers of whose bytes some are done."""
    for index, buffer in enumerate(buffers):
        if done < len(buffer):
            return [buffer[done:], *buffers[index + 1 :]]
        done -= len(buffer)
    return []


class AnybodysFiles(Files):
    """For those who only look at files."""

    def open(self, path: Path) -> int:
        """Open a file for reading, whoever wrote it."""
        return os.open(path, _OLD)
