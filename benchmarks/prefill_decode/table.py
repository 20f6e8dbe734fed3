# SPDX-License-Identifier: Apache-2.0
"""Rounds of all sides as tables: times, what was moved, what was computed twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from benchmarks.host_tier.table import (
    Columns,
    Results,
    Round,
    Value,
    field,
    measured,
    ratios,
)
from benchmarks.low_load.table import rounds
from benchmarks.prefill_decode import counters
from benchmarks.prefill_decode.sides import (
    BOTH,
    DECODE,
    PLUGIN_PAIR,
    PREFILL,
    STOCK_ONE,
)


def _counted(role: str, count: Callable[[counters.Counters], float]) -> Value:
    def value(one: Round) -> float | None:
        found = one["counters"].get(role)
        return None if found is None else count(found)

    return value


def _computed(counted: counters.Counters) -> float:
    return counted.get(counters.COMPUTED, 0.0)


def _answering(one: Round) -> str:
    """The role of the server that answers."""
    return DECODE if DECODE in one["counters"] else BOTH


def _computed_by_answering(one: Round) -> float | None:
    return _counted(_answering(one), _computed)(one)


COLUMNS: Columns = {
    "TTFT p50 ms": (field("ttft_ms_p50"), 1),
    "TTFT p95 ms": (field("ttft_ms_p95"), 1),
    "ms a token p50": (field("token_ms_p50"), 2),
    "p95": (field("token_ms_p95"), 2),
    "request ms p50": (field("request_ms_p50"), 0),
    "wall s": (field("wall_s"), 2),
    "prompt tokens": (field("prompt_tokens"), 0),
    "computed by prefill": (_counted(PREFILL, _computed), 0),
    "by the server that answers": (_computed_by_answering, 0),
    "moved MB": (_counted(DECODE, lambda one: counters.moved(one) / 1e6), 1),
    "failed moves": (_counted(DECODE, counters.failed), 0),
    "failed requests": (field("failed"), 0),
}
COMPARED: Mapping[str, Value] = {
    "TTFT p50": field("ttft_ms_p50"),
    "TTFT p95": field("ttft_ms_p95"),
    "ms a token": field("token_ms_p50"),
    "request": field("request_ms_p50"),
    "wall": field("wall_s"),
    "moved bytes": _counted(DECODE, counters.moved),
}
"""Less is better."""


def table(results: Results, order: Sequence[str]) -> str:
    """What each side did, and what the plugin's pair takes to what others take.

    Args:
        results: by side.
        order: of the workloads.
    """
    lines = ["Medians over rounds; quartiles in brackets from four rounds on."]
    for workload in order:
        if any(rounds(results, side, workload) for side in results):
            lines += ["", f"## {workload}", "", *measured(results, workload, COLUMNS)]
            lines += ["", *ratios(results, workload, PLUGIN_PAIR, COMPARED)]
            lines += _answers(results, workload)
    lines += _failures(results)
    return "\n".join(lines)


def equal_answers(ours: Sequence[Round], theirs: Sequence[Round]) -> tuple[int, int]:
    """How many answers to equal prompts are equal, and how many prompts are.

    Args:
        ours: rounds of one side, with answers.
        theirs: of another one; rounds with the same contents are compared.
    """
    by_seed = {one["seed"]: one["answers"] for one in theirs}
    equal = both = 0
    for one in ours:
        others = by_seed.get(one["seed"], {})
        for prompt in one["answers"].keys() & others.keys():
            both += 1
            equal += one["answers"][prompt] == others[prompt]
    return equal, both


def _answers(results: Results, workload: str) -> Iterator[str]:
    """Where answers mean something: those equal to what one stock server answers."""
    base = rounds(results, STOCK_ONE, workload) if STOCK_ONE in results else []
    if not base or "answers" not in base[0]:
        return
    yield ""
    for side in results:
        found = rounds(results, side, workload)
        if side == STOCK_ONE or not found:
            continue
        equal, both = equal_answers(found, base)
        asked = sum(one["requests"] for one in found)
        yield (
            f"* {side}: {equal} of {both} answers to equal prompts are those of "
            f"{STOCK_ONE}; {asked} requests."
        )


def _failures(results: Results) -> Iterator[str]:
    for side, result in results.items():
        if result.get("failed"):
            yield f"\n{side}: did not start.\n"
        elif "died in" in result:
            yield f"\n{side}: died in `{result['died in']}`.\n"
        yield from (f"    {line}" for line in result.get("log", ()))
        for workload, found in result.get("workloads", {}).items():
            said = {text for one in found for text in one.get("errors", ())}
            yield from (f"\n{side}, {workload}: {text}" for text in sorted(said))
