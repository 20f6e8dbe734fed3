# SPDX-License-Identifier: Apache-2.0
"""What the option `store` says, checked."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Any, ClassVar

from hybrid_plugin.errors import ConfigError
from hybrid_plugin.option_entries import check_weights, read_entries


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
        check_weights(self.option, self.weights)

    @classmethod
    def from_value(cls, value: Any) -> StoreOptions:
        """Read the option as JSON gives it.

        Raises:
            ConfigError: for anything but an object of known entries.
        """
        if isinstance(value, cls):
            return value
        example = '{"master": "10.0.0.5:50051", "size": "64GiB"}'
        return cls(**read_entries(cls.option, cls, value, example))
