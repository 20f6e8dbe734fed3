# SPDX-License-Identifier: Apache-2.0
"""Rounds of all sides as tables: medians, quartiles, ratios."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks.low_load.sides import PLUGIN

Round = Mapping[str, Any]
"""One run of a cell, as an engine's process tells it."""
Results = Mapping[str, Any]
"""By side, as `Side.result` gives them."""
Value = Callable[[Round], float]


def _field(name: str) -> Value:
    return lambda one: float(one[name])


def _per_request(kind: str) -> Value:
    return lambda one: one["passes"][kind]["passes"] / one["requests"]


def _all_passes(one: Round) -> float:
    return _per_request("prefill")(one) + _per_request("decode")(one)


def _restored(one: Round) -> float:
    return float(100 * one["cached_tokens"] / one["prompt_tokens"])


def _of(kind: str, name: str) -> Value:
    return lambda one: float(one["passes"][kind][name])


COMPARED: dict[str, Value] = {
    "TTFT p50": _field("ttft_ms_p50"),
    "TTFT p95": _field("ttft_ms_p95"),
    "request": _field("request_ms_mean"),
    "wall": _field("wall_s"),
    "passes": _all_passes,
    "prefill passes": _per_request("prefill"),
}
"""Less is better."""
COLUMNS: dict[str, tuple[Value, int]] = {
    "restored %": (_restored, 1),
    "running": (_field("running"), 1),
    "TTFT p50 ms": (_field("ttft_ms_p50"), 1),
    "TTFT p95 ms": (_field("ttft_ms_p95"), 1),
    "request ms": (_field("request_ms_mean"), 0),
    "wall s": (_field("wall_s"), 2),
    "prefill passes a request": (_per_request("prefill"), 2),
    "decode passes a request": (_per_request("decode"), 1),
    "prefill tokens a pass": (
        lambda one: (
            one["passes"]["prefill"]["tokens"]
            / max(1, one["passes"]["prefill"]["passes"])
        ),
        0,
    ),
    "prefill launch ms": (_of("prefill", "launch_ms_p50"), 1),
    "prefill result ms": (_of("prefill", "result_ms_p50"), 1),
    "decode launch ms": (_of("decode", "launch_ms_p50"), 1),
    "decode result ms": (_of("decode", "result_ms_p50"), 1),
    "busy s": (
        lambda one: _of("prefill", "busy_s")(one) + _of("decode", "busy_s")(one),
        2,
    ),
}


def rounds(results: Results, side: str, cell: str) -> list[Round]:
    """What a side did of a cell, round after round."""
    return list(results[side].get("workloads", {}).get(cell, []))


def spread(values: Sequence[float], digits: int) -> str:
    """The median, and the quartiles where there are enough values for them."""
    middle = f"{statistics.median(values):.{digits}f}"
    if len(values) < 4:
        return middle
    low, _, high = statistics.quantiles(values, method="inclusive")
    return f"{middle} ({low:.{digits}f}-{high:.{digits}f})"


def ratio(ours: Sequence[Round], theirs: Sequence[Round], value: Value) -> float | None:
    """Median over rounds of ours over theirs, each with the same contents."""
    of_theirs = {one["seed"]: value(one) for one in theirs}
    found = [
        value(one) / of_theirs[one["seed"]]
        for one in ours
        if of_theirs.get(one["seed"])
    ]
    return statistics.median(found) if found else None


def best_stock(results: Results, cell: str, value: Value) -> str | None:
    """The stock side with the least median."""
    medians = {
        side: statistics.median(map(value, found))
        for side in results
        if not side.startswith(PLUGIN) and (found := rounds(results, side, cell))
    }
    return min(medians, key=medians.__getitem__, default=None)


def cells_of(results: Results) -> list[str]:
    """All that any side served, in order."""
    served = [cell for side in results.values() for cell in side.get("workloads", {})]
    return list(dict.fromkeys(served))


def table(results: Results) -> str:
    """What each side did, and the plugin's ratios to the best stock setting."""
    lines = ["Medians over rounds, quartiles in brackets.", ""]
    lines += header(["cell", "side", *COLUMNS])
    for cell in cells_of(results):
        for side in results:
            found = rounds(results, side, cell)
            cells = [
                spread([value(one) for one in found], digits) if found else ""
                for value, digits in COLUMNS.values()
            ]
            lines.append(row([cell, side, *cells]))
        failed = sum(one["failed"] for s in results for one in rounds(results, s, cell))
        if failed:
            lines.append(row([cell, f"{failed} requests failed"]))
    lines += ["", *_ratios(results)]
    for side, result in results.items():
        if result.get("failed"):
            lines += ["", f"{side}: its engine did not start."]
        elif "died in" in result:
            lines += ["", f"{side}: its engine died in `{result['died in']}`."]
    return "\n".join(lines)


def _ratios(results: Results) -> Iterator[str]:
    yield (
        "Ratios of the plugin to the stock setting that is best at that number, and of "
        "elastic pools to fixed ones: medians over rounds with the same contents."
    )
    yield ""
    yield from header(
        ["cell", "side", *COMPARED, *(f"{n}, to fixed" for n in COMPARED)]
    )
    for cell in cells_of(results):
        for side in results:
            ours = rounds(results, side, cell)
            if not side.startswith(PLUGIN) or not ours:
                continue
            to_stock = [
                times_side(results, cell, ours, best_stock(results, cell, value), value)
                for value in COMPARED.values()
            ]
            twin = side.removesuffix("elastic") + "fixed"
            fixed = twin if twin != side and twin in results else None
            to_fixed = [
                times_side(results, cell, ours, fixed, value)
                for value in COMPARED.values()
            ]
            yield row([cell, side, *to_stock, *to_fixed])


def times(ours: Sequence[Round], theirs: Sequence[Round], value: Value) -> str:
    """`ratio` as a cell; empty where there is none."""
    found = ratio(ours, theirs, value)
    return "" if found is None else f"{found:.2f}x"


def times_side(
    results: Results,
    workload: str,
    ours: Sequence[Round],
    base: str | None,
    value: Value,
) -> str:
    """The same to what a side did, if there is one to compare with."""
    return "" if base is None else times(ours, rounds(results, base, workload), value)


def failures(results: Results) -> Iterator[str]:
    """Sides whose engines did not start or died, and requests that failed."""
    for side, result in results.items():
        if result.get("failed"):
            yield f"\n{side}: its engine did not start."
        elif "died in" in result:
            yield f"\n{side}: its engine died in `{result['died in']}`."
        for workload, found in result.get("workloads", {}).items():
            if failed := sum(one["failed"] for one in found):
                yield f"\n{side}, {workload}: {failed} requests failed."


def header(names: Sequence[str]) -> list[str]:
    """The first two lines of a Markdown table."""
    return [row(names), "|---" * len(names) + "|"]


def row(cells: Sequence[str]) -> str:
    """A line of a Markdown table."""
    return "| " + " | ".join(cells) + " |"
