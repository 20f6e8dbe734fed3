# SPDX-License-Identifier: Apache-2.0
"""A file of forward passes, written by an engine's process, read by another.

A record has a fixed length and is appended with one system call, about a microsecond,
once its result is there: what is measured costs all engines the same.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

VARIABLE = "HYBRID_BENCH_PASSES"
"""Of the environment: the file's path.  Processes of an engine inherit it."""
_RECORD = struct.Struct("=dddiii")


@dataclass(frozen=True)
class Pass:
    """One forward pass; times in seconds of `time.monotonic`."""

    began: float
    """When the engine began to prepare and launch it."""
    launched: float
    """When the host was done with that."""
    done: float
    """When the host had its result."""
    prefill_tokens: int
    prefills: int
    """Sequences that it prefilled."""
    decodes: int
    """Sequences that it generated a token for."""


class Log:
    """The end of the file that is written."""

    def __init__(self, path: Path | str | None = None) -> None:
        """Open it.

        Args:
            path: of the file; by default what the environment names.

        Raises:
            KeyError: if the environment names none.
        """
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        self._file = os.open(path or os.environ[VARIABLE], flags)

    def append(self, one: Pass) -> None:
        """Add a pass."""
        os.write(self._file, _RECORD.pack(*astuple(one)))


def read(path: Path, begin: float, end: float = float("inf")) -> list[Pass]:
    """Passes that began in a span of time, in the order of their results.

    Args:
        path: of the file; one that is not there yet has no passes.
        begin: of the span, as `time.monotonic` has it.
        end: the same.
    """
    data = path.read_bytes() if path.exists() else b""
    whole = len(data) - len(data) % _RECORD.size
    passes = [Pass(*fields) for fields in _RECORD.iter_unpack(data[:whole])]
    return [one for one in passes if begin <= one.began < end]


def busy_seconds(passes: Sequence[Pass]) -> list[float]:
    """Of each pass, the time that it alone took: from the last result to its own.

    An engine launches a pass while the one before runs; that wait is not its own.

    Args:
        passes: in the order of their results.
    """
    before, found = float("-inf"), []
    for one in passes:
        found.append(one.done - max(one.began, before))
        before = one.done
    return found


def isolated(passes: Sequence[Pass]) -> list[Pass]:
    """Those that overlap no other: nothing else delays the host or their results.

    Args:
        passes: in the order of their results.
    """
    found = []
    for number, one in enumerate(passes):
        before = passes[number - 1].done if number else float("-inf")
        after = passes[number + 1].began if number + 1 < len(passes) else float("inf")
        if before <= one.began and one.done <= after:
            found.append(one)
    return found


SLOWEST = 5


def slowest(passes: Sequence[Pass]) -> list[dict[str, float]]:
    """The passes that took longest, of their contents and the milliseconds each took.

    A median tells nothing of the few passes that hold everybody up.

    Args:
        passes: in the order of their results.
    """
    pairs = zip(passes, busy_seconds(passes), strict=True)
    longest = sorted(pairs, key=lambda pair: pair[1], reverse=True)[:SLOWEST]
    return [
        {
            "ms": round(1000 * busy, 2),
            "launch_ms": round(1000 * (one.launched - one.began), 2),
            "prefill_tokens": one.prefill_tokens,
            "prefills": one.prefills,
            "decodes": one.decodes,
        }
        for one, busy in longest
    ]
