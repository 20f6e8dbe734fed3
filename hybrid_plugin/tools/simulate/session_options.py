# SPDX-License-Identifier: Apache-2.0
"""Command line options for recorded conversations."""

from __future__ import annotations

import argparse

from hybrid_plugin.config import ConfigError
from hybrid_plugin.tools.simulate.weka import SessionSample

_LIMITS = {
    "sessions": (1, 1 << 20),
    "skip_sessions": (0, 1 << 20),
    "session_gap": (0, 10**6),
}


def add_session_options(parser: argparse.ArgumentParser) -> None:
    """Add them to `parser`."""
    group = parser.add_argument_group("recorded conversations (--format weka)")
    group.add_argument(
        "--sessions", type=int, metavar="N", help="number of them; by default all"
    )
    group.add_argument(
        "--skip-sessions",
        type=int,
        metavar="N",
        help="leave so many of them out before, for another sample",
    )
    group.add_argument(
        "--session-gap",
        type=float,
        metavar="SECONDS",
        help=f"mean time between two starts ({SessionSample().gap:g})",
    )


def read_sample(args: argparse.Namespace, form: str) -> SessionSample:
    """The sample that is meant.

    Args:
        args: parsed.
        form: of the trace.

    Raises:
        ConfigError: for a number that makes no sense, or for another trace.
    """
    for name, (least, most) in _LIMITS.items():
        value = getattr(args, name)
        flag = "--" + name.replace("_", "-")
        if value is not None and form != "weka":
            raise ConfigError(
                f"{flag} is for recorded conversations: say --format weka, or leave "
                "it out."
            )
        if value is not None and not least <= value <= most:
            raise ConfigError(
                f"{flag} must lie between {least} and {most}, got {value:g}."
            )
    return SessionSample(
        sessions=args.sessions,
        skip=args.skip_sessions or 0,
        gap=SessionSample().gap if args.session_gap is None else args.session_gap,
        seed=args.seed,
    )
