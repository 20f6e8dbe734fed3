# SPDX-License-Identifier: Apache-2.0
"""What the option `disk` says, checked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from hybrid_plugin.errors import ConfigError
from hybrid_plugin.option_entries import check_weights, read_entries


@dataclass(frozen=True, slots=True)
class DiskOptions:
    """Where cached content is kept as files, and how much of it.

    Raises:
        ConfigError: for a value out of range.
    """

    option: ClassVar[str] = "disk"

    path: str
    """An absolute folder."""
    size: int
    """Bytes that the files of all ranks on this machine may take together."""
    weights: str | None = None
    """Name of the model's weights, for which the user answers; by default they are
    told by their files."""

    def __post_init__(self) -> None:
        if not Path(self.path).is_absolute():
            raise ConfigError(
                f"disk.path must be absolute, for every process of the engine opens "
                f"it; got {self.path!r}."
            )
        if self.size < 1:
            raise ConfigError(f"disk.size must be at least 1, got {self.size}.")
        check_weights(self.option, self.weights)

    @property
    def folder(self) -> Path:
        """The folder."""
        return Path(self.path)

    @classmethod
    def from_value(cls, value: Any) -> DiskOptions:
        """Read the option as JSON gives it.

        Raises:
            ConfigError: for anything but an object of known entries.
        """
        if isinstance(value, cls):
            return value
        example = '{"path": "/var/cache/hybrid", "size": "100GiB"}'
        entries = read_entries(cls.option, cls, value, example)
        path = str(Path(entries["path"]).expanduser())
        return cls(**{**entries, "path": path})
