# SPDX-License-Identifier: Apache-2.0
"""Caches side by side, as numbers and as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hybrid_plugin.tools.simulate.latency import Times


@dataclass(frozen=True, slots=True)
class Compared:
    """What came out of one cache."""

    name: str
    hit_rate: float
    """Share of the measured prompt tokens that were restored."""
    too_long: int
    """Requests that did not fit even alone."""
    preemptions: int
    times: Times | None


def as_lines(rows: Sequence[Compared]) -> list[str]:
    """A table for people."""
    lines = [
        f"{'cache':<22}{'hits':>8}{'TTFT p50':>11}{'TTFT p95':>11}{'TPOT p50':>11}"
        f"{'good req/s':>12}"
    ]
    for row in rows:
        line = f"{row.name:<22}{100 * row.hit_rate:>6.1f} %"
        if row.times is not None:
            times = row.times
            line += f"{times.ttft['p50']:>9.3f} s{times.ttft['p95']:>9.3f} s"
            tpot = f"{1000 * times.tpot['p50']:.1f} ms" if times.tpot else "none"
            line += f"{tpot:>11}{times.goodput:>12.3f}"
        if row.too_long:
            line += f"  ({row.too_long:,} requests never fitted)"
        lines.append(line)
    return lines
