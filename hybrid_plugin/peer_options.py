# SPDX-License-Identifier: Apache-2.0
"""What the option `peers` says, checked."""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

from hybrid_plugin.errors import ConfigError
from hybrid_plugin.option_entries import check_weights, read_entries

LEAST_SECRET: Final = 16
"""Bytes of a secret that nobody guesses."""


@dataclass(frozen=True, slots=True)
class PeerOptions:
    """Where peers reach this server, and how they prove that they may.

    Raises:
        ConfigError: for a value out of range.
    """

    option: ClassVar[str] = "peers"

    listen: str = "127.0.0.1:0"
    """IP address and port of the first rank; each further one has the next port.  Port
    0 stands for any that is free."""
    secret_file: str | None = None
    """A file with a secret that all peers share."""
    weights: str | None = None
    """Name of the model's weights, for which the user answers; by default they are
    told by their files."""

    def __post_init__(self) -> None:
        address = self._address()
        if address.is_unspecified:
            raise ConfigError(
                f"peers.listen is {self.listen}, which peers cannot connect to: give "
                "the address at which they reach this server."
            )
        if not address.is_loopback and self.secret_file is None:
            raise ConfigError(
                f"peers.listen is {self.listen}, which other machines reach: give "
                "peers.secret_file, or listen on 127.0.0.1."
            )
        if self.secret_file is not None and not Path(self.secret_file).is_absolute():
            raise ConfigError(
                "peers.secret_file must be absolute, for every process of the engine "
                f"reads it; got {self.secret_file!r}."
            )
        check_weights(self.option, self.weights)

    @property
    def host(self) -> str:
        """The IP address."""
        return str(self._address())

    @property
    def is_local(self) -> bool:
        """Whether only processes of this machine can connect."""
        return self._address().is_loopback

    def port(self, rank: int) -> int:
        """Where a rank listens; 0 for any port."""
        first = self._parts()[1]
        return first + rank if first else 0

    def secret(self) -> bytes:
        """What the file holds, without white space around it; empty without a file.

        Raises:
            ConfigError: if it cannot be read, if others may read it, or if it is short.
        """
        if self.secret_file is None:
            return b""
        file = Path(self.secret_file)
        try:
            mode = os.stat(file).st_mode
            content = file.read_bytes().strip()
        except OSError as error:
            raise ConfigError(
                f"peers.secret_file {file} cannot be read: {error.strerror}."
            ) from error
        if mode & 0o077:
            raise ConfigError(
                f"peers.secret_file {file} can be read by others: chmod 600."
            )
        if len(content) < LEAST_SECRET:
            raise ConfigError(
                f"peers.secret_file {file} has fewer than {LEAST_SECRET} bytes; "
                "`openssl rand -hex 32` makes a good one."
            )
        return content

    @classmethod
    def from_value(cls, value: Any) -> PeerOptions:
        """Read the option as JSON gives it.

        Raises:
            ConfigError: for anything but an object of known entries.
        """
        if isinstance(value, cls):
            return value
        example = '{"listen": "127.0.0.1:7600"}'
        return cls(**read_entries(cls.option, cls, value, example))

    # ---------------------------------------------------------------- internal

    def _parts(self) -> tuple[str, int]:
        host, colon, port = self.listen.rpartition(":")
        if not colon or not port.isdecimal() or not int(port) < 1 << 16:
            raise self._malformed()
        return host.removeprefix("[").removesuffix("]"), int(port)

    def _address(self) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
        try:
            return ipaddress.ip_address(self._parts()[0])
        except ValueError:
            raise self._malformed() from None

    def _malformed(self) -> ConfigError:
        return ConfigError(
            "peers.listen takes an IP address and a port such as 10.0.0.5:7600, got "
            f"{self.listen!r}."
        )
