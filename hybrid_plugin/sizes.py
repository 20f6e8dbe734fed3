# SPDX-License-Identifier: Apache-2.0
"""Bytes as people write them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hybrid_plugin.errors import ConfigError

_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}


def parse_bytes(text: str) -> int:
    """Read a size such as `80GB`, `1.5 GiB` or `4096`.

    Raises:
        ConfigError: for anything else, and for nothing at all.
    """
    match = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,9})?)\s*([a-zA-Z]*)\s*", text)
    unit = match.group(2).upper() if match else ""
    if match is None or unit not in _UNITS:
        raise ConfigError(
            f"{text!r:.40} is no size; write one such as 80GB (10^9) or 80GiB (2^30)."
        )
    size = int(float(match.group(1)) * _UNITS[unit])
    if size < 1:
        raise ConfigError(f"A size of {text!r:.40} leaves nothing to divide.")
    return size


@dataclass(frozen=True, slots=True)
class Multiple:
    """A size that is known once another one is, such as `2x`."""

    factor: float

    def __str__(self) -> str:
        """As people write it."""
        return f"{self.factor:g}x"


def parse_size_or_multiple(text: str) -> int | Multiple:
    """Read bytes, as `parse_bytes` does, or a multiple such as `2x` or `0.7x`.

    Raises:
        ConfigError: for anything else, and for nothing at all.
    """
    match = re.fullmatch(r"\s*(\d{1,5}(?:\.\d{1,9})?)\s*[xX]\s*", text)
    if match is None:
        return parse_bytes(text)
    factor = float(match.group(1))
    if not factor:
        raise ConfigError(f"A size of {text!r:.40} leaves nothing to divide.")
    return Multiple(factor)


def gib(size: float) -> str:
    """A size for people, in GiB, or in MiB where that is less than one."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.2f} MiB"
