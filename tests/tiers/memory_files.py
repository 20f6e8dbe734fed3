# SPDX-License-Identifier: Apache-2.0
"""A file system in memory that fails, tears, fills up, flips bits and loses power."""

from __future__ import annotations

import errno
import random
from dataclasses import dataclass, field
from pathlib import Path

from hybrid_plugin.tiers.files import Buffers, Files


@dataclass(slots=True, eq=False)
class Inode:
    content: bytearray = field(default_factory=bytearray)
    durable: bytes | None = None
    """Content at the last sync; None if there was none."""
    changed_at: int = 0


@dataclass(slots=True)
class Faults:
    """What goes wrong, and when."""

    calls_until_failure: int | None = None
    """Calls that still succeed; the one behind them fails."""
    error: int = errno.EIO
    short: bool = False
    """Reads and writes do only a part."""


class PowerLossError(BaseException):
    """The process is gone: nothing of it runs on, no clean-up either."""


class MemoryFiles(Files):
    """Files are in memory; the folder itself, which is locked, is a real one.

    What is not synced may be lost with the power: of a file's content any part that was
    not, of the names any change since the folder was synced.
    """

    def __init__(self, capacity: int, seed: int = 0) -> None:
        self.capacity = capacity
        self.faults = Faults()
        self.die_at: int | None = None
        """Calls until the power is lost."""
        self.calls = 0
        self._random = random.Random(seed)
        self._names: dict[Path, Inode] = {}
        self._durable_names: dict[Path, Inode] = {}
        self._open: dict[int, Inode] = {}
        self._clock = 0

    # ------------------------------------------------------------ what tests do

    @property
    def used(self) -> int:
        """Bytes of all files."""
        return sum(len(inode.content) for inode in self._names.values())

    def paths(self) -> list[Path]:
        """All files, by name."""
        return sorted(self._names)

    def content(self, path: Path) -> bytearray:
        """Of a file, to be changed behind its owner's back."""
        return self._names[path].content

    def lose_power(self) -> None:
        """Keep of what was not synced some part, at random."""
        self._open.clear()
        self.die_at = None
        names = {}
        for path in sorted({*self._names, *self._durable_names}):
            now, before = self._names.get(path), self._durable_names.get(path)
            kept = self._random.choice([now, before])
            if kept is not None:
                names[path] = kept
        for inode in {id(each): each for each in names.values()}.values():
            if inode.durable is None or inode.content != inode.durable:
                inode.content = self._partly_written(inode)
            inode.durable = bytes(inode.content)
        self._names, self._durable_names = names, dict(names)

    def _partly_written(self, inode: Inode) -> bytearray:
        kept = self._random.randint(0, len(inode.content))
        rest = len(inode.content) - kept
        # File systems may know the length before they have the blocks.
        tail = self._random.choice([b"", bytes(rest)])
        return bytearray(inode.content[:kept]) + tail

    def _call(self) -> None:
        self.calls += 1
        if self.die_at is not None:
            self.die_at -= 1
            if self.die_at < 0:
                raise PowerLossError
        faults = self.faults
        if faults.calls_until_failure is not None:
            faults.calls_until_failure -= 1
            if faults.calls_until_failure < 0:
                faults.calls_until_failure = None
                raise OSError(faults.error, "as the test asks")

    # ------------------------------------------------------------ the interface

    def names(self, folder: Path) -> list[str]:
        return [path.name for path in sorted(self._names) if path.parent == folder]

    def create(self, path: Path) -> int:
        self._call()
        if path in self._names:
            raise FileExistsError(errno.EEXIST, "File exists")
        self._names[path] = Inode()
        return self._opened(self._names[path])

    def open(self, path: Path) -> int:
        self._call()
        if path not in self._names:
            raise FileNotFoundError(errno.ENOENT, "No such file")
        return self._opened(self._names[path])

    def _opened(self, inode: Inode) -> int:
        self._clock += 1
        self._open[self._clock] = inode
        return self._clock

    def size(self, file: int) -> int:
        self._call()
        return len(self._open[file].content)

    def changed_at(self, file: int) -> int:
        return self._open[file].changed_at

    def write(self, file: int, buffers: Buffers, offset: int) -> int:
        self._call()
        inode = self._open[file]
        data = b"".join(buffers)
        if self.faults.short:
            data = data[: self._random.randint(1, len(data))]
        room = self.capacity - self.used
        if room <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        data = data[: max(offset + room - len(inode.content), 0)]
        inode.content[offset : offset + len(data)] = data
        self._clock += 1
        inode.changed_at = self._clock
        return len(data)

    def read(self, file: int, buffers: Buffers, offset: int) -> int:
        self._call()
        content = self._open[file].content
        length = min(sum(map(len, buffers)), max(len(content) - offset, 0))
        if self.faults.short and length:
            length = self._random.randint(1, length)
        done = 0
        for buffer in buffers:
            part = content[offset + done : offset + min(done + len(buffer), length)]
            buffer[: len(part)] = part
            done += len(part)
        return done

    def sync(self, file: int) -> None:
        self._call()
        inode = self._open[file]
        inode.durable = bytes(inode.content)

    def close(self, file: int) -> None:
        self._open.pop(file, None)

    def rename(self, old: Path, new: Path) -> None:
        self._call()
        self._names[new] = self._names.pop(old)

    def sync_folder(self, folder: Path) -> None:
        self._call()
        self._durable_names = dict(self._names)

    def remove(self, path: Path) -> None:
        self._call()
        if self._names.pop(path, None) is None:
            raise FileNotFoundError(errno.ENOENT, "No such file")

    def touch(self, path: Path, nanoseconds: int) -> None:
        self._call()
        self._clock += 1
        self._names[path].changed_at = self._clock

    def free_bytes(self, folder: Path) -> int:
        self._call()
        return max(self.capacity - self.used, 0)
