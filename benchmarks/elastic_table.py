# SPDX-License-Identifier: Apache-2.0
"""What the benchmark of elastic pools says: seconds, and ratios of throughput."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.elastic_setup import ELASTIC

ALL = "all phases"
FIXED = "fixed"
"""Names of fixed splits begin with it."""


def seconds(result: Mapping[str, Any], order: Sequence[str]) -> dict[str, float]:
    """Median seconds of each phase, and their sum; empty for an engine that died.

    Args:
        result: of one side, as `Side.result` gives it.
        order: the phases that were sent; one that the side did not come to is
            left out, and the sum with it.
    """
    rounds = {} if "died in" in result else result.get("workloads", {})
    took = {
        phase: statistics.median(r["wall_s"] for r in rounds[phase])
        for phase in order
        if rounds.get(phase)
    }
    return took | (
        {ALL: sum(took.values())} if took and len(took) == len(order) else {}
    )


def sent(results: Mapping[str, Any], order: Sequence[str]) -> list[str]:
    """The phases that the run came to, before its time was over."""
    served = [phase for result in results.values() for phase in _served(result)]
    return [phase for phase in order if phase in served]


def best_fixed(results: Mapping[str, Any], order: Sequence[str]) -> str | None:
    """The fixed split that took the least time for everything."""
    took = _all_seconds(results, sent(results, order))
    fixed = [name for name in took if name.startswith(FIXED) and ALL in took[name]]
    return min(fixed, key=lambda name: took[name][ALL], default=None)


def table(
    results: Mapping[str, Any], order: Sequence[str], stock: Sequence[str]
) -> str:
    """Seconds of each phase and of all; throughput of elastic pools over the rest's.

    Args:
        results: by configuration, as `Side.result` gives them.
        order: the phases of a round.
        stock: the configurations without the plugin.
    """
    order = sent(results, order)
    ran = _all_seconds(results, order)
    columns = [*order, ALL]
    head = " | ".join(f"{column}, s" for column in columns)
    lines = [
        f"| configuration | {head} | rounds | failed |",
        "|---" * (len(columns) + 3) + "|",
    ]
    for name, result in results.items():
        if name in ran:
            took = ran[name]
            cells = " | ".join(f"{took[c]:.2f}" if c in took else "" for c in columns)
            rounds = "-".join(map(str, _rounds(result, order)))
            lines.append(f"| {name} | {cells} | {rounds} | {_failed(result)} |")
        else:
            lines.append(f"| {name} | {_why(result)} |" + " |" * (len(columns) + 1))
    return "\n".join([*lines, "", *_verdict(ran, columns, stock)])


def _all_seconds(
    results: Mapping[str, Any], order: Sequence[str]
) -> dict[str, dict[str, float]]:
    """Of the sides that served anything."""
    took = {name: seconds(result, order) for name, result in results.items()}
    return {name: found for name, found in took.items() if found}


def _served(result: Mapping[str, Any]) -> list[str]:
    return [phase for phase, rounds in result.get("workloads", {}).items() if rounds]


def _rounds(result: Mapping[str, Any], order: Sequence[str]) -> list[int]:
    """How often each phase was served: the least and the most, or both in one."""
    counts = [len(result["workloads"].get(phase, ())) for phase in order]
    return sorted({min(counts), max(counts)})


def _why(result: Mapping[str, Any]) -> str:
    if result.get("failed"):
        return "its engine did not start"
    if "died in" in result:
        return f"its engine died or hung in `{result['died in']}`"
    return "no time was left for it"


def _failed(result: Mapping[str, Any]) -> int:
    return sum(r["failed"] for rounds in result["workloads"].values() for r in rounds)


def _verdict(
    ran: Mapping[str, Mapping[str, float]],
    columns: Sequence[str],
    stock: Sequence[str],
) -> list[str]:
    if ELASTIC not in ran:
        return []
    own = ran[ELASTIC]
    lines = []
    for column in columns:
        rest = {
            name: took[column] / own[column]
            for name, took in ran.items()
            if name.startswith(FIXED) and column in took and column in own
        }
        if rest:
            best = min(rest, key=lambda name: rest[name])
            split = "best single split" if column == ALL else "best fixed split"
            lines.append(
                f"* {column}: elastic pools have {rest[best]:.2f}x the throughput of "
                f"the {split} ({best})."
            )
    lines += [
        f"* {ALL}: {ran[name][ALL] / own[ALL]:.2f}x that of {name}."
        for name in stock
        if ALL in ran.get(name, {}) and ALL in own
    ]
    return lines
