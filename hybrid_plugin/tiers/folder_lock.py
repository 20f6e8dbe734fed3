# SPDX-License-Identifier: Apache-2.0
"""Whose folder it is: this user's alone, and one process's at a time."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from hybrid_plugin.errors import ConfigError

LOCK = ".lock"
"""Name of the file that is locked."""


def check_private(folder: Path) -> None:
    """Refuse a folder into which somebody else could put bundles.

    Raises:
        ConfigError: if others own it or may write to it.
    """
    status = folder.stat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise ConfigError(
            f"The folder {folder} belongs to another user, or others may write to it: "
            "give one of your own, with mode 0700."
        )


def hold(folder: Path) -> int:
    """Hold the folder; the system lets it go with the process.

    Raises:
        ConfigError: if another process holds it.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    file = os.open(folder / LOCK, flags, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        raise ConfigError(
            f"The folder {folder} is in use by another process: give each server a "
            "folder of its own."
        ) from None
    return file
