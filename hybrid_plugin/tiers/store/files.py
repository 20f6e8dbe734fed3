# SPDX-License-Identifier: Apache-2.0
"""Bundles in a store as a shelf sees them: files, each in pieces.

A file is its pieces and a head, which names them and is written last.  Each writing has
pieces of its own, so two servers that write one bundle at once do not mix theirs.  What
a writer leaves without a head, the store lets go as it lets go anything.
"""

from __future__ import annotations

import errno
import json
import time
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Final
from uuid import uuid4

from hybrid_plugin.tiers.files import Buffers, Files
from hybrid_plugin.tiers.row_layout import integer, text
from hybrid_plugin.tiers.store.objects import ObjectStore

MAX_BYTES: Final = 1 << 40
"""Of a file that is read at all."""
MAX_PIECES: Final = 1 << 20
"""Likewise: anybody in the store may have written its head."""
_AT_ONCE: Final = 1024
"""Pieces that are removed together."""


@dataclass(slots=True)
class _Written:
    """A file that has no head yet."""

    mark: str
    pieces: int = 0
    size: int = 0
    rest: bytearray = field(default_factory=bytearray)
    """Of the next piece."""


@dataclass(slots=True)
class _Opened:
    """A file that is read."""

    path: Path
    mark: str
    size: int
    piece: int
    """Bytes of each but the last."""
    index: int = -1
    """Of the piece that is in memory."""
    content: bytes = b""

    @property
    def pieces(self) -> int:
        """How many there are."""
        return -(-self.size // self.piece)


class StoreFiles(Files):
    """Files that nobody finds before they are renamed.

    Paths are names of objects.  Several threads may use it, each for files of its own.
    """

    def __init__(self, objects: ObjectStore, piece: int) -> None:
        """Begin with none open.

        Args:
            objects: of the store.
            piece: bytes of an object at most.
        """
        self._objects = objects
        self._piece = piece
        self._numbers = count()
        self._written: dict[Path, _Written] = {}
        self._creating: dict[int, _Written] = {}
        self._opened: dict[int, _Opened] = {}

    # ------------------------------------------------------------------- write

    def create(self, path: Path) -> int:
        """Begin a file."""
        number = next(self._numbers)
        self._written[path] = self._creating[number] = _Written(uuid4().hex)
        return number

    def write(self, file: int, buffers: Buffers, offset: int) -> int:
        """Write behind what was written."""
        written = self._creating[file]
        if offset != written.size:
            raise OSError(errno.ESPIPE, "files in a store are written in order")
        size = 0
        for buffer in buffers:
            size += len(buffer)
            while len(buffer):
                room = self._piece - len(written.rest)
                written.rest += buffer[:room]
                buffer = buffer[room:]
                if len(written.rest) == self._piece:
                    self._put(written)
        written.size += size
        return size

    def _put(self, written: _Written) -> None:
        name = _piece_name(written.mark, written.pieces)
        self._objects.put(name, bytes(written.rest))
        written.pieces += 1
        written.rest.clear()

    def sync(self, file: int) -> None:
        """Have the store keep all that was written."""
        written = self._creating[file]
        if written.rest:
            self._put(written)

    def sync_folder(self, folder: Path) -> None:
        """There are no folders."""

    def rename(self, old: Path, new: Path) -> None:
        """Have a file found."""
        written = self._written.pop(old)
        head = {"mark": written.mark, "bytes": written.size, "piece": self._piece}
        self._objects.put(str(new), json.dumps(head).encode())

    # -------------------------------------------------------------------- read

    def open(self, path: Path) -> int:
        """Read a file's head.

        Raises:
            FileNotFoundError: if there is none.
            OSError: if it makes no sense.
        """
        number = next(self._numbers)
        self._opened[number] = self._head(path)
        return number

    def _head(self, path: Path) -> _Opened:
        (content,) = self._objects.get([str(path)])
        if content is None:
            raise FileNotFoundError(errno.ENOENT, "it is not in the store", str(path))
        try:
            head = json.loads(content)
            size, piece = integer(head["bytes"]), integer(head["piece"])
            opened = _Opened(path, text(head["mark"]), size, piece)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise OSError(errno.EIO, "its head makes no sense", str(path)) from error
        if (
            not 0 <= opened.size <= MAX_BYTES
            or not 0 < opened.piece <= MAX_BYTES
            or opened.pieces > MAX_PIECES
        ):
            raise OSError(errno.EIO, "its head makes no sense", str(path))
        return opened

    def size(self, file: int) -> int:
        """Bytes of an open file, as its head says."""
        return self._opened[file].size

    def changed_at(self, file: int) -> int:
        """The store does not say."""
        return time.time_ns()

    def read(self, file: int, buffers: Buffers, offset: int) -> int:
        """Read from one piece.

        Raises:
            FileNotFoundError: if that is gone.
        """
        opened = self._opened[file]
        if offset >= opened.size:
            return 0
        index, begin = divmod(offset, opened.piece)
        if index != opened.index:
            opened.content, opened.index = self._get(opened, index), index
        source, done = memoryview(opened.content)[begin:], 0
        for buffer in buffers:
            size = min(len(buffer), len(source) - done)
            buffer[:size] = source[done : done + size]
            done += size
        return done

    def _get(self, opened: _Opened, index: int) -> bytes:
        (content,) = self._objects.get([_piece_name(opened.mark, index)])
        if content is None:
            raise FileNotFoundError(errno.ENOENT, "a piece is gone", str(opened.path))
        return content

    def close(self, file: int) -> None:
        """Let a file's memory go."""
        self._creating.pop(file, None)
        self._opened.pop(file, None)

    # ------------------------------------------------------------------ others

    def remove(self, path: Path) -> None:
        """Remove a file, its head first; or what was written of one without a head."""
        written = self._written.pop(path, None)
        if written is not None:
            mark, pieces = written.mark, written.pieces
        else:
            try:
                opened = self._head(path)
            except FileNotFoundError:
                raise
            except OSError:  # nobody can say which pieces it has
                self._objects.remove([str(path)])
                return
            self._objects.remove([str(path)])
            mark, pieces = opened.mark, opened.pieces
        for first in range(0, pieces, _AT_ONCE):
            some = range(first, min(first + _AT_ONCE, pieces))
            self._objects.remove([_piece_name(mark, index) for index in some])

    def touch(self, path: Path, nanoseconds: int) -> None:
        """The store notes by itself what is read."""

    def free_bytes(self, folder: Path) -> int:
        """The store makes room by itself, or says that it cannot."""
        return MAX_BYTES


def _piece_name(mark: str, index: int) -> str:
    return f"hybrid-piece/{mark}/{index}"
