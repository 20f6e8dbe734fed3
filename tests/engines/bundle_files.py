# SPDX-License-Identifier: Apache-2.0
"""What can happen to the files of a disk tier while no server uses them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from hybrid_plugin.tiers import bundle_file
from hybrid_plugin.tiers.bundle_file import BundleReader, checksum
from hybrid_plugin.tiers.files import Files
from hybrid_plugin.tiers.manifest import STATE
from hybrid_plugin.tiers.shelf import SUFFIX


def files_of(folder: Path) -> list[Path]:
    """All files of bundles, of every rank."""
    return sorted(folder.rglob("*" + SUFFIX))


def flip_a_bit_in_each(folder: Path) -> int:
    """Flip a bit in the data of every file; returns how many there are."""
    files = files_of(folder)
    for file in files:
        content = bytearray(file.read_bytes())
        content[-5] ^= 4
        file.write_bytes(content)
    return len(files)


def zero_states(folder: Path) -> int:
    """Zero the state in every file, as if that had been stored: with its checksum.

    Returns how many files there are.
    """
    files = files_of(folder)
    for file in files:
        _rewrite(file)
    return len(files)


def _rewrite(path: Path) -> None:
    files = Files()
    with bundle_file.reading(files, path) as reader:
        assert isinstance(reader, BundleReader), reader
        tensors = dict(_tensors(reader))
        manifest = reader.manifest
    assert tensors[STATE][0].any(), "there is nothing to zero"
    tensors[STATE] = [np.zeros_like(tensors[STATE][0])]
    sums = tuple(checksum(tensors[tensor.name]) for tensor in manifest.tensors())
    path.unlink()
    bundle_file.write(files, path, replace(manifest, checksums=sums), tensors)


def _tensors(reader: BundleReader) -> Iterator[tuple[str, list[bundle_file.Row]]]:
    for tensor in reader.manifest.tensors():
        rows = [np.empty(tensor.size, dtype=np.uint8)]
        assert reader.read(tensor.name, rows) is None
        yield tensor.name, rows
