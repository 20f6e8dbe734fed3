# SPDX-License-Identifier: Apache-2.0
"""Writes and reads one file of a bundle."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from hybrid_plugin.tiers import header
from hybrid_plugin.tiers.failure import Failure, Reason
from hybrid_plugin.tiers.files import Files, read_all, write_all
from hybrid_plugin.tiers.manifest import Manifest

Rows = Sequence[npt.NDArray[np.uint8]]
"""The bytes of a tensor, in contiguous pieces that may lie anywhere."""


def checksum(rows: Rows) -> str:
    """XXH3 with 128 bits over all pieces, in hexadecimal digits."""
    state = xxhash.xxh3_128()
    for row in rows:
        state.update(row.data)
    return state.hexdigest()


def write(
    files: Files, path: Path, manifest: Manifest, tensors: Mapping[str, Rows]
) -> None:
    """Write a new file, and wait until it is on the disk.

    Args:
        files: the system.
        path: of the file.
        manifest: with the checksums of `tensors`.
        tensors: by the names in the manifest.

    Raises:
        OSError: if the file system fails; the file may be there in part.
        ValueError: if a tensor has not the size that the manifest says.
    """
    pieces = [memoryview(header.encode(manifest))]
    for tensor in manifest.tensors():
        rows = tensors[tensor.name]
        if sum(row.nbytes for row in rows) != tensor.size:
            raise ValueError(f"{tensor.name} has not the {tensor.size} bytes it says")
        pieces += [row.data.cast("B") for row in rows]
    file = files.create(path)
    try:
        write_all(files, file, [piece for piece in pieces if len(piece)], 0)
        files.sync(file)
    finally:
        files.close(file)


@dataclass(frozen=True, slots=True)
class BundleReader:
    """A file whose header was read and whose length was checked."""

    manifest: Manifest
    file_bytes: int
    changed_at: int
    """When it was written or last used, in nanoseconds."""
    _files: Files
    _file: int
    _places: Mapping[str, int]

    def read(self, name: str, rows: Rows) -> Failure | None:
        """Fill memory with a tensor.  After a failure it holds anything.

        Args:
            name: of the tensor.
            rows: writable, as many bytes as the tensor has.

        Raises:
            OSError: if the file system fails.
            ValueError: if `rows` have another size.
        """
        names = [tensor.name for tensor in self.manifest.tensors()]
        index = names.index(name)
        size = list(self.manifest.tensors())[index].size
        if sum(row.nbytes for row in rows) != size:
            raise ValueError(f"{name} takes {size} bytes")
        pieces = [row.data.cast("B") for row in rows]
        if not read_all(self._files, self._file, pieces, self._places[name]):
            return Failure(Reason.TORN, name)
        if checksum(rows) != self.manifest.checksums[index]:
            return Failure(Reason.CORRUPT, name)
        return None

    def verify(self) -> Failure | None:
        """Read all, and compare checksums; takes the memory of the largest tensor.

        Raises:
            OSError: if the file system fails.
        """
        for tensor in self.manifest.tensors():
            failure = self.read(tensor.name, [np.empty(tensor.size, dtype=np.uint8)])
            if failure is not None:
                return failure
        return None


@contextmanager
def reading(files: Files, path: Path) -> Iterator[BundleReader | Failure]:
    """Open a file for reading; every size in its header was checked.

    Raises:
        OSError: if the file system fails.
    """
    file = files.open(path)
    try:
        yield _reader(files, file)
    finally:
        files.close(file)


def _reader(files: Files, file: int) -> BundleReader | Failure:
    size = files.size(file)
    first = bytearray(min(header.ALIGNMENT, size))
    if not read_all(files, file, [memoryview(first)], 0):
        return Failure(Reason.TORN, "header")
    length = header.total_length(bytes(first), size)
    if isinstance(length, Failure):
        return length
    rest = bytearray(length - len(first))
    if not read_all(files, file, [memoryview(rest)], len(first)):
        return Failure(Reason.TORN, "header")
    manifest = header.decode(bytes(first + rest))
    if isinstance(manifest, Failure):
        return manifest
    if length + manifest.data_bytes != size:
        detail = f"{size} bytes, not {length + manifest.data_bytes}"
        return Failure(Reason.TORN, detail)
    places = dict(_places(manifest, length))
    return BundleReader(manifest, size, files.changed_at(file), files, file, places)


def _places(manifest: Manifest, start: int) -> Iterable[tuple[str, int]]:
    for tensor in manifest.tensors():
        yield tensor.name, start
        start += tensor.size
