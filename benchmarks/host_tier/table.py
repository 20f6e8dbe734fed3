# SPDX-License-Identifier: Apache-2.0
"""Rounds of all sides as tables: what came back, what it cost, and ratios."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks.host_tier.sides import HOSTED
from benchmarks.host_tier.traffic import AGENTS, ALONE, BESIDE, RETURN
from benchmarks.low_load.table import failures, header, rounds, row, spread, times

Round = Mapping[str, Any]
"""One run of a workload, as an engine's process tells it."""
Results = Mapping[str, Any]
"""By side, as `Side.result` gives them."""
Value = Callable[[Round], float | None]
"""Of a round; None where it has none."""
Columns = Mapping[str, tuple[Value, int]]
"""Numbers by name, with their digits."""


def field(name: str) -> Value:
    """A number of a round by its name."""
    return lambda one: one.get(name)


def _restored(one: Round) -> float:
    return float(100 * one["cached_tokens"] / one["prompt_tokens"])


def _from_host(one: Round) -> float | None:
    if "hit_tokens" not in one["host"]:
        return None
    return float(100 * one["host"]["hit_tokens"] / one["prompt_tokens"])


def _megabytes(name: str) -> Value:
    def value(one: Round) -> float | None:
        return one["host"][name] / 1e6 if name in one["host"] else None

    return value


def _middle(name: str) -> Value:
    return lambda one: float(statistics.median(one[name]))


def _came_back(one: Round) -> float:
    return float(100 * sum(one["back_cached_tokens"]) / sum(one["back_prompt_tokens"]))


def _of_recomputing(one: Round) -> float:
    return float(
        statistics.median(one["back_ttft_ms"]) / statistics.median(one["first_ttft_ms"])
    )


_MOVED: Columns = {
    "stored MB": (_megabytes("stored_bytes"), 0),
    "loaded MB": (_megabytes("loaded_bytes"), 0),
}
COLUMNS: Mapping[str, Columns] = {
    AGENTS: {
        "restored %": (_restored, 1),
        "from the host %": (_from_host, 1),
        "TTFT p50 ms": (field("ttft_ms_p50"), 1),
        "TTFT p95 ms": (field("ttft_ms_p95"), 1),
        "back: TTFT p50 ms": (field("back_ttft_ms_p50"), 1),
        "back: p95": (field("back_ttft_ms_p95"), 1),
        "request ms": (field("request_ms_mean"), 0),
        "wall s": (field("wall_s"), 2),
        "decode pass ms": (field("decode_pass_ms_p50"), 2),
        **_MOVED,
    },
    RETURN: {
        "first TTFT ms": (_middle("first_ttft_ms"), 1),
        "back: TTFT ms": (_middle("back_ttft_ms"), 1),
        "back: restored %": (_came_back, 1),
        "back / first": (_of_recomputing, 3),
        **_MOVED,
    },
    ALONE: {
        "ms a token": (field("token_ms"), 2),
        "decode pass ms p50": (field("decode_pass_ms_p50"), 3),
        "mean": (field("decode_pass_ms_mean"), 3),
    },
    BESIDE: {
        "ms a token": (field("token_ms"), 2),
        "decode pass ms p50": (field("decode_pass_ms_p50"), 3),
        "mean": (field("decode_pass_ms_mean"), 3),
        "prompts": (field("beside"), 0),
        "TTFT p50 ms": (field("ttft_ms_p50"), 1),
        **_MOVED,
    },
}
COMPARED: Mapping[str, Mapping[str, Value]] = {
    AGENTS: {
        "TTFT p50": field("ttft_ms_p50"),
        "TTFT p95": field("ttft_ms_p95"),
        "back: TTFT p50": field("back_ttft_ms_p50"),
        "back: p95": field("back_ttft_ms_p95"),
        "request": field("request_ms_mean"),
        "wall": field("wall_s"),
    },
    RETURN: {"back: TTFT": _middle("back_ttft_ms")},
    ALONE: {"ms a token": field("token_ms")},
    BESIDE: {
        "ms a token": field("token_ms"),
        "decode pass, mean": field("decode_pass_ms_mean"),
    },
}
"""Less is better."""


def table(results: Results, order: Sequence[str]) -> str:
    """What each side did, and what others take to what host memory takes.

    Args:
        results: by side.
        order: of the workloads.
    """
    lines = ["Medians over rounds; quartiles in brackets from four rounds on."]
    for workload in order:
        if any(rounds(results, side, workload) for side in results):
            lines += [
                "",
                f"## {workload}",
                "",
                *measured(results, workload, COLUMNS[workload]),
            ]
            compared = COMPARED[workload]
            lines += ["", *ratios(results, workload, HOSTED, compared)]
    lines += failures(results)
    return "\n".join(lines)


def measured(results: Results, workload: str, columns: Columns) -> Iterator[str]:
    """A table of what each side did."""
    yield from header(["side", *columns, "rounds"])
    for side in results:
        found = rounds(results, side, workload)
        cells = [_cell(found, *column) for column in columns.values()]
        yield row([side, *cells, str(len(found))])


def ratios(
    results: Results, workload: str, ours: str, compared: Mapping[str, Value]
) -> Iterator[str]:
    """A table of one side to each other side, over rounds with the same contents.

    Args:
        results: by side.
        workload: its name.
        ours: the one side; nothing is told where it did not run.
        compared: numbers by name.
    """
    own = rounds(results, ours, workload) if ours in results else []
    if not own:
        return
    yield from header([f"{ours}, to", *compared])
    for side in results:
        theirs = rounds(results, side, workload)
        if side == ours or not theirs:
            continue
        cells = [times(own, theirs, _or_zero(value)) for value in compared.values()]
        yield row([side, *cells])


def _or_zero(value: Value) -> Callable[[Round], float]:
    return lambda one: value(one) or 0.0


def _cell(found: Sequence[Round], value: Value, digits: int) -> str:
    values = [number for one in found if (number := value(one)) is not None]
    return spread(values, digits) if values else ""
