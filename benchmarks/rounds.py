# SPDX-License-Identifier: Apache-2.0
"""Rounds of a benchmark: who takes part, until when, and where its results are kept."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.prefix_sides import machine, write

T = TypeVar("T")


def check_known(names: Iterable[str], known: Iterable[str], option: str) -> None:
    """Make sure that all names of an option are known.

    Raises:
        SystemExit: if one is not.
    """
    known = list(known)
    for name in names:
        if name not in known:
            raise SystemExit(f"{option}: {name!r} is none of: {'; '.join(known)}")


def groups(names: Sequence[str], at_once: int) -> list[Sequence[str]]:
    """Names in order, at most so many together."""
    return [names[i : i + at_once] for i in range(0, len(names), at_once)]


def shares(parts: Sequence[T], end: float) -> Iterator[tuple[T, float]]:
    """Parts one after the other, each with the time at which it should be over.

    Args:
        parts: of a benchmark; those that are left share the time that is left.
        end: of all, by Python's monotonic clock.
    """
    for number, part in enumerate(parts):
        now = time.monotonic()
        yield part, now + (end - now) / (len(parts) - number)


def in_time(turns: Iterable[T], end: float, what: str = "more") -> Iterator[T]:
    """Turns, until one that takes as long as the longest so far would end too late.

    Args:
        turns: each is over when the next one is asked for.
        end: by Python's monotonic clock.
        what: there is no time for, as it is said then.
    """
    longest = 0.0
    for turn in turns:
        before = time.monotonic()
        if before + longest > end:
            print(f"no time for {what}", file=sys.stderr, flush=True)
            return
        yield turn
        longest = max(longest, time.monotonic() - before)


def first_round(results: Mapping[str, Any], name: str) -> int:
    """The number of the first round that a side has not served."""
    workloads = results.get(name, {}).get("workloads", {})
    served = [one["seed"] for found in workloads.values() for one in found]
    return max(served, default=-1) + 1


def read(out: Path) -> dict[str, Any]:
    """What `save` has written."""
    found: dict[str, Any] = json.loads(out.with_name(out.name + ".json").read_text())
    return found


def save(
    out: Path,
    document: Mapping[str, Any],
    title: str,
    about: Mapping[str, Any],
    text: str,
) -> None:
    """Write results as JSON, and as a page.

    Args:
        out: path without suffix.
        document: all of it.
        title: of the page.
        about: what stands below the title, behind the machine.
        text: the rest of the page.
    """
    write(out, ".json", json.dumps(document, indent=1))
    facts = {**machine(), **about}
    head = ", ".join(f"{name} {value}" for name, value in facts.items())
    write(out, ".md", f"# {title}\n\n{head}\n\n{text}")
