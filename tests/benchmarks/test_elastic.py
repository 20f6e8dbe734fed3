# SPDX-License-Identifier: Apache-2.0
"""The benchmark of elastic pools, without an engine."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from benchmarks import elastic, elastic_engine
from benchmarks.elastic_engine import Watch, whole_or_nothing
from benchmarks.elastic_picture import Timeline, smoothed
from benchmarks.elastic_table import best_fixed, table
from benchmarks.elastic_workloads import CPU, phases
from benchmarks.prefix_sides import check_plugin
from benchmarks.prefix_workloads import Reply
from hybrid_plugin.tools.doctor import installed

ORDER = ["A", "B"]


def side(a: float, b: float, **more: Any) -> dict[str, Any]:
    """A result with one round of both phases."""
    rounds = {
        phase: [{"wall_s": wall, "failed": 0}]
        for phase, wall in (("A", a), ("B", b))
        if wall
    }
    return {"workloads": rounds, **more}


RESULTS = {
    "stock": side(6, 6),
    "fixed, 30% states": side(2, 8),
    "fixed, 50% states": side(4, 3),
    "elastic": side(2, 2),
    "fixed, dead": side(1, 0, **{"died in": "B"}),
    "fixed, unstarted": {"failed": True},
    "fixed, late": {},
}


def test_ratios_are_those_of_the_best_split_in_each_phase_and_in_all() -> None:
    lines = table(RESULTS, ORDER, ["stock", "absent"]).splitlines()
    assert lines[-4:] == [
        "* A: elastic pools have 1.00x the throughput of the best fixed split "
        "(fixed, 30% states).",
        "* B: elastic pools have 1.50x the throughput of the best fixed split "
        "(fixed, 50% states).",
        "* all phases: elastic pools have 1.75x the throughput of the best single "
        "split (fixed, 50% states).",
        "* all phases: 3.00x that of stock.",
    ]
    assert best_fixed(RESULTS, ORDER) == "fixed, 50% states"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("fixed, dead", "its engine died or hung in `B`"),
        ("fixed, unstarted", "its engine did not start"),
        ("fixed, late", "no time was left for it"),
    ],
)
def test_an_engine_without_a_result_says_why(name: str, words: str) -> None:
    row = next(r for r in table(RESULTS, ORDER, []).splitlines() if name in r)
    assert words in row
    assert row.count("|") == table(RESULTS, ORDER, []).splitlines()[0].count("|")


def test_a_run_that_ended_early_is_compared_by_what_it_came_to() -> None:
    results = {"fixed, 30% states": side(2, 0), "elastic": side(1, 0)}
    assert "all phases: elastic pools have 2.00x" in table(results, ORDER, [])
    assert "B, s" not in table(results, ORDER, [])


def test_documents_are_asked_in_rotation_by_few_readers() -> None:
    running = most = 0
    asked: list[tuple[int, ...]] = []

    async def ask(prompt: Sequence[int], max_tokens: int) -> Reply:
        nonlocal running, most
        asked.append(tuple(prompt[:50]))
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return Reply((1,) * max_tokens, len(prompt), 0, 0.1)

    asyncio.run(phases(CPU)["B: long documents"](ask, random.Random(0)))
    documents = asked[: CPU.documents]
    assert len(set(documents)) == CPU.documents
    assert asked == documents * CPU.questions
    assert most == CPU.readers


@pytest.mark.parametrize("tokens", [(), (1, 2)])
def test_an_answer_that_is_short_counts_as_failed(tokens: tuple[int, ...]) -> None:
    async def ask(prompt: Sequence[int], max_tokens: int) -> Reply:
        if not tokens:
            raise ConnectionError
        return Reply(tokens, len(prompt), 0, 0.1)

    careful = whole_or_nothing(ask)
    assert asyncio.run(careful([1], 3)).tokens == ()
    assert asyncio.run(careful([1], 2)).tokens == tokens


def test_series_count_tokens_as_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic_engine, "INTERVAL_S", 0.001)
    monkeypatch.setattr(elastic_engine, "MOST_POINTS", 4)

    async def steps() -> AsyncIterator[int]:
        for length in range(1, 6):
            await asyncio.sleep(0.005)
            yield length

    async def run(mapped: dict[str, float]) -> dict[str, list[float]]:
        watch = Watch(lambda: mapped)
        for _ in range(2):  # the second phase counts from nothing
            async with watch.sampling():
                assert [s async for s in watch.count(steps(), int)][-1] == 5
        return watch.series()

    series = asyncio.run(run({"kv": 3 << 20, "state": 1 << 20}))
    assert 1 < len(series["t"]) <= 4
    assert series["tokens"][-1] == 5 and series["tokens"] == sorted(series["tokens"])
    assert set(series["pages_mib"]) == {3.0} and set(series["slots_mib"]) == {1.0}
    assert set(asyncio.run(run({}))) == {"t", "tokens"}


def test_phases_of_a_picture_begin_together() -> None:
    def with_series(wall: float, tokens: int) -> dict[str, Any]:
        series = {"t": [0.0, wall], "tokens": [0, tokens], "pages_mib": [1.0, 2.0]}
        return {"workloads": {"A": [{"wall_s": wall, "series": series}] * 2}}

    sides = {"quick": with_series(1, 10), "slow": with_series(4, 10)}
    line = Timeline(sides, ["A"])
    assert line.phases == [("A", 0, 0.0, 4), ("A", 1, 4, 8)]
    assert line.curve(sides["quick"], "pages_mib") == (
        [0.0, 1, 4, 4.0, 5, 8],
        [1.0, 2.0, 2.0, 1.0, 2.0, 2.0],
    )
    assert line.curve(sides["quick"], "slots_mib") == ([], [])


def test_throughput_is_growth_per_second() -> None:
    times = [i / 4 for i in range(20)]
    assert smoothed(times, [40 * t for t in times]) == pytest.approx([40.0] * 20)


def test_engines_are_spread_over_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    line = "elastic --on gpu --ratios 0.5 --only elastic --gpus 2 5"
    monkeypatch.setattr("sys.argv", line.split())
    run = elastic.Run(elastic.parse())
    lanes = [run.variables("elastic", lane) for lane in range(3)]
    assert [lane["CUDA_VISIBLE_DEVICES"] for lane in lanes] == ["2", "5", "2"]
    assert all(lane["HYBRID_PLUGIN"] == "1" for lane in lanes)


def test_nothing_is_measured_as_the_plugin_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HYBRID_PLUGIN", "1")
    check_plugin("vllm")
    monkeypatch.setenv("VLLM_PLUGINS", "another")
    with pytest.raises(RuntimeError, match="does not name vllm_hybrid: add it there"):
        check_plugin("vllm")
    monkeypatch.setattr(installed.metadata, "entry_points", lambda group: [])
    with pytest.raises(RuntimeError, match="install the package hybrid-plugin"):
        check_plugin("sglang")
    monkeypatch.setenv("HYBRID_PLUGIN", "0")
    check_plugin("sglang")
