# SPDX-License-Identifier: Apache-2.0
"""What the option `disk` says, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

from hybrid_plugin.errors import ConfigError
from hybrid_plugin.sizes import parse_bytes


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
        if self.weights == "":
            raise ConfigError(
                "disk.weights is empty: name the weights or leave it out."
            )

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
        if not isinstance(value, Mapping):
            raise ConfigError(
                "hybrid_plugin option 'disk' takes an object such as "
                f'{{"path": "/var/cache/hybrid", "size": "100GiB"}}, got {value!r}.'
            )
        known = [field.name for field in fields(cls)]
        for name in value:
            if name not in known:
                raise ConfigError(
                    f"Unknown entry {name!r} of hybrid_plugin option 'disk'; known "
                    f"are: {', '.join(known)}."
                )
        for name in ("path", "size"):
            if name not in value:
                raise ConfigError(f"hybrid_plugin option 'disk' needs a {name}.")
        weights = value.get("weights")
        return cls(
            path=str(Path(_text("path", value["path"])).expanduser()),
            size=_size(value["size"]),
            weights=None if weights is None else _text("weights", weights),
        )


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"disk.{name} takes a string, got {value!r}.")
    return value


def _size(value: Any) -> int:
    if isinstance(value, str):
        try:
            return parse_bytes(value)
        except ConfigError as error:
            raise ConfigError(f"disk.size: {error}") from error
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"disk.size takes a size such as 100GiB, got {value!r}.")
    return value
