# SPDX-License-Identifier: Apache-2.0
"""The header of a bundle: that of a safetensors file, padded to 4096 bytes.

The file can be read with the safetensors library.  It is not read with it here: the
library maps files, and a mapped file that somebody truncates kills the process.  A
header is valid only if it is, byte for byte, the one that its manifest makes, so no
flipped bit in it goes unnoticed.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping

import xxhash

from hybrid_plugin.tiers.failure import Failure, Reason
from hybrid_plugin.tiers.identity import FORMAT
from hybrid_plugin.tiers.manifest import Manifest

ALIGNMENT = 4096
"""Data begins at a multiple of so many bytes, for direct I/O."""

MAX_HEADER = 64 << 20
"""Bytes of a header that is read at all."""

_LENGTH = struct.Struct("<Q")


def encode(manifest: Manifest) -> bytes:
    """The bytes before the data."""
    texts = manifest.as_texts()
    entries: dict[str, object] = {
        "__metadata__": {"format": FORMAT, "checksum": _checksum(texts), **texts}
    }
    place = 0
    for tensor in manifest.tensors():
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [place, place + tensor.size],
        }
        place += tensor.size
    text = json.dumps(entries, separators=(",", ":")).encode()
    length = -(-(_LENGTH.size + len(text)) // ALIGNMENT) * ALIGNMENT - _LENGTH.size
    return _LENGTH.pack(length) + text.ljust(length)


def total_length(first: bytes, file_bytes: int) -> int | Failure:
    """Bytes before the data.

    Args:
        first: the beginning of the file, 8 bytes at least if it has so many.
        file_bytes: its length.
    """
    if len(first) < _LENGTH.size:
        return Failure(Reason.TORN, f"{file_bytes} bytes")
    length = _LENGTH.size + int(_LENGTH.unpack_from(first)[0])
    if length > MAX_HEADER or length % ALIGNMENT:
        return Failure(Reason.MALFORMED, f"a header of {length} bytes")
    if length > file_bytes:
        return Failure(Reason.TORN, f"{file_bytes} bytes, {length} of them header")
    return length


def decode(header: bytes) -> Manifest | Failure:
    """What a header says.

    Args:
        header: all `total_length` bytes.
    """
    try:
        metadata = json.loads(header[_LENGTH.size :])["__metadata__"]
        if metadata["format"] != FORMAT:
            return Failure(Reason.VERSION, f"{metadata['format']!r:.40}")
        manifest = Manifest.from_texts(metadata)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return Failure(Reason.MALFORMED, f"{error!r:.80}")
    if encode(manifest) != header:
        return Failure(Reason.CORRUPT, "header")
    return manifest


def _checksum(texts: Mapping[str, str]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(texts).encode())
