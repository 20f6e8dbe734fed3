# SPDX-License-Identifier: Apache-2.0
"""Bytes as people write them."""

from __future__ import annotations

import re

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


def gib(size: float) -> str:
    """A size for people, in GiB, or in MiB where that is less than one."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.2f} MiB"
