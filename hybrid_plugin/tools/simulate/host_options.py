# SPDX-License-Identifier: Apache-2.0
"""Command line options for the link to host memory."""

from __future__ import annotations

import argparse
import math

from hybrid_plugin.config import ConfigError
from hybrid_plugin.sizes import Multiple


def add_bandwidth_option(group: argparse._ArgumentGroup) -> None:
    """Add what `read_bandwidth` reads."""
    group.add_argument(
        "--host-bandwidth",
        type=float,
        metavar="X",
        help="with --host-memory: X * 10^9 bytes come back from there in a second; a "
        "server's log says what it measured",
    )


def read_bandwidth(
    args: argparse.Namespace, host_memory: int | Multiple | None
) -> float:
    """Bytes in a second that come back from host memory; infinite without any.

    Args:
        args: parsed.
        host_memory: the size of it; None for none.

    Raises:
        ConfigError: for a number that makes no sense, or one without the other.
    """
    given: float | None = args.host_bandwidth
    if (host_memory is None) != (given is None):
        raise ConfigError(
            "--host-memory and --host-bandwidth go together: how much there is, and "
            "how fast it comes back; a server's log says what it measured."
        )
    if given is None:
        return math.inf
    if not (given > 0 and math.isfinite(given)):
        raise ConfigError(f"--host-bandwidth must be more than 0, got {given:g}.")
    return given * 1e9
