# SPDX-License-Identifier: Apache-2.0
"""Mooncake Store, over TCP: a master that knows where objects are, and members that
lend it memory.

It knows no passwords: whoever reaches a member's port can read and write what it lends.
"""

from __future__ import annotations

import errno
import importlib
import importlib.util
import os
from collections.abc import Sequence
from types import ModuleType
from typing import Any, Final

from hybrid_plugin.errors import ConfigError

PIECE: Final = 4 << 20
"""Bytes of an object at most: members copy each through a buffer of a fixed size."""
_BUFFER = 16 * PIECE
_PACKAGE = "mooncake"
_PROTOCOL = "tcp"
_FORCE_TCP = "MC_FORCE_TCP"
"""Environment variable: without it the library looks for RDMA devices first."""
_NOT_THERE, _FULL = -704, (-200, -600)
"""Of the library's numbers for what went wrong; see its `types.h`."""


def is_installed() -> bool:
    """Whether the library is there, without loading it."""
    return importlib.util.find_spec(_PACKAGE) is not None


def library() -> ModuleType:
    """The library's Python interface.

    Raises:
        ConfigError: if it is not installed, or lacks a library of the system.
    """
    if not is_installed():
        raise ConfigError(
            "store needs the Mooncake Store, which is not installed: pip install "
            "mooncake-transfer-engine-non-cuda, or mooncake-transfer-engine."
        )
    try:
        return importlib.import_module(f"{_PACKAGE}.store")
    except ImportError as error:
        raise ConfigError(
            f"store cannot load the Mooncake Store ({error}): install what it names, "
            "such as the system's libibverbs1."
        ) from error


class MooncakeObjects:
    """This process as a member of the store."""

    def __init__(self, master: str, address: str, metadata: str, lent: int) -> None:
        """Join it.

        Args:
            master: host and port of the store's master.
            address: at which other members reach this machine.
            metadata: address of a metadata server, or `P2PHANDSHAKE` for none.
            lent: bytes of memory that this process lends to it.

        Raises:
            ConfigError: if the library or the master cannot be reached.
        """
        os.environ.setdefault(_FORCE_TCP, "1")
        self._store: Any = library().MooncakeDistributedStore()
        failed = self._store.setup(
            address, metadata, lent, _BUFFER, _PROTOCOL, "", master
        )
        if failed:
            raise ConfigError(
                f"store cannot join the Mooncake Store at {master} (error "
                f"{failed}): start its master, or leave store out."
            )

    def get(self, names: Sequence[str]) -> list[bytes | None]:
        """See `ObjectStore.get`."""
        # Its answer for what is not there is an empty object, and so is that for what
        # it cannot reach.
        found: list[bytes] = self._store.get_batch(list(names))
        return [content or None for content in found]

    def put(self, name: str, content: bytes | memoryview) -> None:
        """See `ObjectStore.put`."""
        _check(self._store.upsert(name, content), name)

    def remove(self, names: Sequence[str]) -> None:
        """See `ObjectStore.remove`."""
        for name in names:
            failed = self._store.remove(name, True)
            if failed != _NOT_THERE:
                _check(failed, name)

    def exist(self, names: Sequence[str]) -> list[bool]:
        """See `ObjectStore.exist`."""
        found: list[int] = self._store.batch_is_exist(list(names))
        if any(one < 0 for one in found):
            _check(min(found), names[0])
        return [bool(one) for one in found]

    def close(self) -> None:
        """See `ObjectStore.close`."""
        self._store.close()


def _check(failed: int, name: str) -> None:
    """Raise what the library says in a number.

    Raises:
        OSError: for anything but success.
    """
    if failed in _FULL:
        raise OSError(errno.ENOSPC, "the store is full", name)
    if failed:
        raise OSError(errno.EIO, f"the store says {failed}", name)
