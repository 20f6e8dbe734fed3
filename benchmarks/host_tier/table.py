# SPDX-License-Identifier: Apache-2.0
"""Rounds of all sides as tables: what came back, what it cost, and ratios."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks.host_tier.sides import HOSTED
from benchmarks.host_tier.traffic import AGENTS, ALONE, BESIDE, RETURN
from benchmarks.low_load.table import ratio, rounds, spread

Round = Mapping[str, Any]
"""One run of a workload, as an engine's process tells it."""
Results = Mapping[str, Any]
"""By side, as `Side.result` gives them."""
Value = Callable[[Round], float | None]
"""Of a round; None where it has none."""
Columns = Mapping[str, tuple[Value, int]]
"""Numbers by name, with their digits."""


def _field(name: str) -> Value:
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
        "TTFT p50 ms": (_field("ttft_ms_p50"), 1),
        "TTFT p95 ms": (_field("ttft_ms_p95"), 1),
        "request ms": (_field("request_ms_mean"), 0),
        "wall s": (_field("wall_s"), 2),
        "decode pass ms": (_field("decode_pass_ms_p50"), 2),
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
        "ms a token": (_field("token_ms"), 2),
        "decode pass ms p50": (_field("decode_pass_ms_p50"), 3),
        "mean": (_field("decode_pass_ms_mean"), 3),
    },
    BESIDE: {
        "ms a token": (_field("token_ms"), 2),
        "decode pass ms p50": (_field("decode_pass_ms_p50"), 3),
        "mean": (_field("decode_pass_ms_mean"), 3),
        "prompts": (_field("beside"), 0),
        "TTFT p50 ms": (_field("ttft_ms_p50"), 1),
        **_MOVED,
    },
}
COMPARED: Mapping[str, Mapping[str, Value]] = {
    AGENTS: {
        "TTFT p50": _field("ttft_ms_p50"),
        "TTFT p95": _field("ttft_ms_p95"),
        "request": _field("request_ms_mean"),
        "wall": _field("wall_s"),
    },
    RETURN: {"back: TTFT": _middle("back_ttft_ms")},
    ALONE: {"ms a token": _field("token_ms")},
    BESIDE: {
        "ms a token": _field("token_ms"),
        "decode pass, mean": _field("decode_pass_ms_mean"),
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
            lines += ["", f"## {workload}", "", *_measured(results, workload)]
            lines += ["", *_ratios(results, workload)]
    lines += _failures(results)
    return "\n".join(lines)


def _measured(results: Results, workload: str) -> Iterator[str]:
    columns = COLUMNS[workload]
    yield from _header(["side", *columns, "rounds"])
    for side in results:
        found = rounds(results, side, workload)
        cells = [_cell(found, *column) for column in columns.values()]
        yield _row([side, *cells, str(len(found))])


def _cell(found: Sequence[Round], value: Value, digits: int) -> str:
    values = [number for one in found if (number := value(one)) is not None]
    return spread(values, digits) if values else ""


def _ratios(results: Results, workload: str) -> Iterator[str]:
    """Of host memory to each other side, over rounds with the same contents."""
    ours = rounds(results, HOSTED, workload) if HOSTED in results else []
    if not ours:
        return
    compared = COMPARED[workload]
    yield from _header([f"{HOSTED}, to", *compared])
    for side in results:
        theirs = rounds(results, side, workload)
        if side == HOSTED or not theirs:
            continue
        cells = [_times(ours, theirs, value) for value in compared.values()]
        yield _row([side, *cells])


def _times(ours: Sequence[Round], theirs: Sequence[Round], value: Value) -> str:
    found = ratio(ours, theirs, lambda one: value(one) or 0.0)
    return "" if found is None else f"{found:.2f}x"


def _failures(results: Results) -> Iterator[str]:
    for side, result in results.items():
        if result.get("failed"):
            yield f"\n{side}: its engine did not start."
        elif "died in" in result:
            yield f"\n{side}: its engine died in `{result['died in']}`."
        for workload, found in result.get("workloads", {}).items():
            if failed := sum(one["failed"] for one in found):
                yield f"\n{side}, {workload}: {failed} requests failed."


def _header(names: Sequence[str]) -> list[str]:
    return [_row(names), "|---" * len(names) + "|"]


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
