# SPDX-License-Identifier: Apache-2.0
"""Rounds of all sides as tables: medians, quartiles, ratios to stock."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.drafts.sides import PLUGIN
from benchmarks.drafts.traffic import decoding
from benchmarks.low_load.table import (
    failures,
    header,
    rounds,
    row,
    spread,
    times_side,
)

Results = Mapping[str, Any]
"""By side, as `Side.result` gives them."""
Value = Callable[[Mapping[str, Any]], float]


@dataclass(frozen=True)
class Column:
    """A number of a round."""

    name: str
    value: Value
    digits: int
    more: bool | None = None
    """Whether more of it is better; None where neither is."""


def _field(name: str) -> Value:
    return lambda one: float(one[name] or 0)


def _restored(one: Mapping[str, Any]) -> float:
    return float(100 * one["cached_tokens"] / one["prompt_tokens"])


def steady(one: Mapping[str, Any]) -> float:
    """Tokens a second while all sequences decode: their number, by a step's tokens."""
    if not one["step_ms"]:
        return 0.0
    length = one["acceptance"] or 1.0
    return float(1000 * one["at_once"] * length / one["step_ms"])


COLUMNS = (
    Column("tokens/s", _field("tokens_per_s"), 0, more=True),
    Column("TTFT p50 ms", _field("ttft_ms_p50"), 0, more=False),
    Column("TTFT p95 ms", _field("ttft_ms_p95"), 0, more=False),
    Column("request ms", _field("request_ms_mean"), 0, more=False),
    Column("restored %", _restored, 1, more=True),
    Column("at once", _field("at_once"), 0, more=True),
    Column("decoding", _field("decoding"), 1),
    Column("tokens a verification", _field("acceptance"), 2),
    Column("step ms", _field("step_ms"), 2, more=False),
)
RATES = tuple(one for one in COLUMNS if one.name == "restored %")
"""Numbers that may be none at all; others were then not measured."""
STEADY = Column("steady tokens/s", steady, 0, more=True)
"""Of workloads that only decode."""
COMPARED = ("tokens/s", "TTFT p50 ms", "request ms", STEADY.name)
"""Not the time of a step: with drafts it gives more tokens."""


def columns(workload: str) -> tuple[Column, ...]:
    """Numbers that say something of a workload."""
    return (*COLUMNS, STEADY) if decoding(workload) is not None else COLUMNS


def better_stock(results: Results, workload: str, column: Column) -> str | None:
    """The stock side whose median is best; None where none ran."""
    medians = {
        side: statistics.median(map(column.value, found))
        for side in results
        if not side.startswith(PLUGIN) and (found := rounds(results, side, workload))
    }
    choose = max if column.more else min
    return choose(medians, key=medians.__getitem__, default=None)


def table(results: Results, order: Sequence[str]) -> str:
    """What each side did, and the plugin's ratios to stock.

    Args:
        results: by side.
        order: of the workloads.
    """
    ran = [
        name
        for name in order
        if any(name in side.get("workloads", {}) for side in results.values())
    ]
    lines = ["Medians over rounds; quartiles in brackets from four rounds on.", ""]
    lines += _measured(results, ran)
    lines += ["", "Ratios of medians over rounds with the same contents:", ""]
    lines += _ratios(results, ran)
    lines += failures(results)
    return "\n".join(lines)


def _measured(results: Results, ran: Sequence[str]) -> Iterator[str]:
    every = (*COLUMNS, STEADY)
    yield from header(["workload", "side", *(one.name for one in every)])
    for workload in ran:
        shown = columns(workload)
        for side in results:
            found = rounds(results, side, workload)
            cells = [_middle(found, one) if one in shown else "" for one in every]
            yield row([workload, side, *cells])


def _middle(found: Sequence[Mapping[str, Any]], column: Column) -> str:
    values = [column.value(one) for one in found]
    if not values:
        return ""
    # A step of all sequences that there never was took no time.
    return spread(values, column.digits) if any(values) or column in RATES else ""


def _ratios(results: Results, ran: Sequence[str]) -> Iterator[str]:
    """The plugin's sides to each stock side, and to the one that is better."""
    stock = [side for side in results if not side.startswith(PLUGIN)]
    heads = [f"to {side}" for side in stock]
    yield from header(["workload", "side", "number", *heads, "to the better of them"])
    for workload in ran:
        for side in results:
            ours = rounds(results, side, workload)
            if not side.startswith(PLUGIN) or not ours:
                continue
            for column in columns(workload):
                if column.name not in COMPARED:
                    continue
                best = better_stock(results, workload, column)
                bases = [*stock, best]
                if not any(column.value(one) for one in ours):
                    continue
                cells = [
                    times_side(results, workload, ours, b, column.value) for b in bases
                ]
                yield row([workload, side, column.name, *cells])
