# SPDX-License-Identifier: Apache-2.0
"""A saved session: a name for a prefix on disk, which stays as long as the name does.

It is a small file of JSON beside the bundles that it names.  Its own name is a hash, so
whatever a client calls a session, it is no path.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Final

import xxhash

from hybrid_plugin.core.tree.tokens import Tokens
from hybrid_plugin.tiers.failure import Failure, Reason
from hybrid_plugin.tiers.row_layout import integer, text

FORMAT: Final = "hybrid-session/1"
"""Name and version of the files' format."""
MAX_NAME: Final = 256
"""Characters of a name."""
MAX_FILE: Final = 64 << 20
"""Bytes of a file that is read at all."""

_DIGEST = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class SavedSession:
    """What is known of a session.

    Raises:
        ValueError: for a name that is none, or contents that contradict each other.
    """

    name: str
    """As the user gave it."""
    fingerprint: str
    """`Identity.fingerprint` of the model."""
    namespace: str
    """`keys.namespace_digest` of the adapter and the salt, in hexadecimal digits."""
    tokens: Tokens
    """That can be resumed, **in clear**."""
    keys: tuple[str, ...]
    """Of its bundles, from the start of the sequence to its end."""
    size: int
    """Bytes of their files, on all ranks."""
    created: int
    """Seconds since 1970."""
    model: str
    """What the server called the model; for people."""
    engine: str
    """Which engine computed it; for people."""

    def __post_init__(self) -> None:
        check_name(self.name)
        for digest in (self.fingerprint, self.namespace, *self.keys):
            if not _DIGEST.fullmatch(digest):
                raise ValueError(f"{digest!r:.80} is no SHA-256")
        if not self.tokens or not self.keys:
            raise ValueError("a session has tokens, and bundles")
        if self.size < 0:
            raise ValueError(f"{self.size} bytes")

    @property
    def key(self) -> str:
        """What its file is called."""
        return key_of(self.fingerprint, self.name)

    def as_text(self) -> str:
        """The file, in the one form that it may have."""
        fields = {
            "format": FORMAT,
            "name": self.name,
            "fingerprint": self.fingerprint,
            "namespace": self.namespace,
            "size": self.size,
            "created": self.created,
            "model": self.model,
            "engine": self.engine,
            "keys": list(self.keys),
            "tokens": self.tokens.tolist(),
        }
        return _encode({"checksum": _checksum(fields), **fields})

    @classmethod
    def from_text(cls, content: str) -> SavedSession | Failure:
        """Read what `as_text` made."""
        try:
            fields: dict[str, Any] = json.loads(content)
            if fields["format"] != FORMAT:
                return Failure(Reason.VERSION, f"{fields['format']!r:.40}")
            checksum = text(fields.pop("checksum"))
            if checksum != _checksum(fields):
                return Failure(Reason.CORRUPT, "session")
            return cls(
                name=text(fields["name"]),
                fingerprint=text(fields["fingerprint"]),
                namespace=text(fields["namespace"]),
                tokens=array("q", map(integer, fields["tokens"])),
                keys=tuple(map(text, fields["keys"])),
                size=integer(fields["size"]),
                created=integer(fields["created"]),
                model=text(fields["model"]),
                engine=text(fields["engine"]),
            )
        except (
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            OverflowError,
            RecursionError,
        ) as error:
            return Failure(Reason.MALFORMED, f"{error!r:.80}")


def check_name(name: str) -> None:
    """Refuse what cannot be the name of a session.

    Raises:
        ValueError: for nothing, more than `MAX_NAME` characters, and what cannot be
            printed on one line.
    """
    if not 0 < len(name) <= MAX_NAME or not name.isprintable():
        raise ValueError(
            f"a session's name has 1 to {MAX_NAME} printable characters, unlike "
            f"{name!r:.80}"
        )


def key_of(fingerprint: str, name: str) -> str:
    """What the file of a model's session is called: SHA-256 in hexadecimal digits.

    Args:
        fingerprint: `Identity.fingerprint` of the model.
        name: of the session, which `check_name` let pass.
    """
    digest = sha256(bytes.fromhex(fingerprint))
    digest.update(name.encode())
    return digest.hexdigest()


def _checksum(fields: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(_encode(fields).encode())


def _encode(fields: Mapping[str, Any]) -> str:
    return json.dumps(fields, separators=(",", ":"))
