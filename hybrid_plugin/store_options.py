# SPDX-License-Identifier: Apache-2.0
"""What the option `store` says, checked."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from hybrid_plugin.errors import ConfigError
from hybrid_plugin.sizes import parse_bytes


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """Where a Mooncake Store is, and what this server lends to it.

    Raises:
        ConfigError: for a value out of range.
    """

    option: ClassVar[str] = "store"

    master: str
    """Host and port of the store's master."""
    address: str = "127.0.0.1"
    """IP address at which other members of the store reach this machine."""
    size: int = 0
    """Bytes of memory that each rank lends to the store."""
    metadata: str = "P2PHANDSHAKE"
    """Address of a metadata server; by default members introduce themselves."""
    weights: str | None = None
    """Name of the model's weights, for which the user answers; by default they are
    told by their files."""

    def __post_init__(self) -> None:
        host, colon, port = self.master.rpartition(":")
        if not host or not colon or not port.isdecimal():
            raise ConfigError(
                "store.master takes a host and a port such as 10.0.0.5:50051, got "
                f"{self.master!r}."
            )
        try:
            given = ipaddress.ip_address(self.address)
        except ValueError:
            raise ConfigError(
                "store.address takes the IP address at which the store reaches this "
                f"machine, got {self.address!r}."
            ) from None
        if given.is_unspecified:
            raise ConfigError(
                f"store.address is {self.address}, which nobody can connect to: give "
                "the address at which the store reaches this machine."
            )
        if self.size < 0:
            raise ConfigError(f"store.size must be at least 0, got {self.size}.")
        if self.weights == "":
            raise ConfigError(
                "store.weights is empty: name the weights or leave it out."
            )

    @classmethod
    def from_value(cls, value: Any) -> StoreOptions:
        """Read the option as JSON gives it.

        Raises:
            ConfigError: for anything but an object of known entries.
        """
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise ConfigError(
                "hybrid_plugin option 'store' takes an object such as "
                f'{{"master": "10.0.0.5:50051", "size": "64GiB"}}, got {value!r}.'
            )
        known = [field.name for field in fields(cls)]
        for name, entry in value.items():
            if name not in known:
                raise ConfigError(
                    f"Unknown entry {name!r} of hybrid_plugin option 'store'; known "
                    f"are: {', '.join(known)}."
                )
            if name != "size" and not isinstance(entry, str):
                raise ConfigError(f"store.{name} takes a string, got {entry!r}.")
        if "master" not in value:
            raise ConfigError("hybrid_plugin option 'store' needs a master.")
        return cls(**{**value, "size": _size(value.get("size", 0))})


def _size(value: Any) -> int:
    if isinstance(value, str):
        try:
            return parse_bytes(value)
        except ConfigError as error:
            raise ConfigError(f"store.size: {error}") from error
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"store.size takes a size such as 64GiB, got {value!r}.")
    return value
