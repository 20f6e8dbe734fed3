# SPDX-License-Identifier: Apache-2.0
"""The grid: rows of every side, ratios against stock, and going on after a break."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import cache_curves
from benchmarks.curves.picture import write_picture
from benchmarks.curves.shapes import Task
from benchmarks.curves.sides import Side, run_side
from benchmarks.curves.table import geometric_mean, points, table

FOLDER = Path(__file__).parents[2]


def row(cache: str, restored: float, **fields: Any) -> dict[str, Any]:
    place = {"shape": "s", "workload": "w", "seed": 0, "level": 1, "memory": 2**30}
    return {**place, "cache": cache, "restored": restored, **fields}


def test_ratios_are_against_the_best_stock_cache() -> None:
    rows = [row("ours", 0.6), row("vllm", 0.3), row("sglang", 0.5), row("bound", 0.8)]
    (point,) = points(rows)
    assert point.best_stock == ("sglang", 0.5)
    assert point.ratio() == pytest.approx(1.2)
    printed = table(rows)
    assert "| 60.0 % | 30.0 % | 50.0 % | 80.0 % | 1.20 (sglang) | 0.75 |" in printed
    assert "geometric mean 1.200, below 1 at 0 of 1 points" in printed
    assert "| 1 | 1 | 1 | 1.20 |" in printed


def test_points_where_stock_restores_nothing_are_left_out_and_told() -> None:
    rows = [row("ours", 0.6), row("vllm", 0.001)]
    rows += [row("ours", 0.0, level=2), row("vllm", 0.5, level=2)]
    assert [point.ratio() for point in points(rows)] == [None, pytest.approx(0.002)]
    printed = table(rows)
    assert "left out: 1 points where no stock cache restored 1 %" in printed
    assert "* 0.002: s, w, 1.0 GiB: 0.0 % against 50.0 % (vllm)" in printed


def test_seeds_are_averaged_and_failures_told() -> None:
    rows = [row("ours", 0.2), row("ours", 0.4, seed=1, memory=3 << 30)]
    rows.append(row("vllm", 0.0, failed="it fell over"))
    (point,) = points(rows)
    assert point.restored == {"ours": pytest.approx(0.3)}
    assert point.memory == 2 << 30
    assert "* s, w, 1.0 GiB: vllm: it fell over" in table(rows)


def test_geometric_mean() -> None:
    assert geometric_mean([0.5, 2.0, 8.0]) == pytest.approx(2.0)
    with pytest.raises(ValueError, match="No ratios"):
        geometric_mean([])


def test_a_picture_is_written(tmp_path: Path) -> None:
    rows = [row(c, r, level=n) for n in (1, 2) for c, r in (("ours", 1), ("bound", 1))]
    write_picture(rows, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="nothing to draw"):
        write_picture([row("ours", 0.0, failed="x")], tmp_path / "b.png")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    monkeypatch.chdir(FOLDER)
    words = ["cache_curves", "--shapes", "nemotron-h-8b", "--workloads", "few-shot"]
    words += ["--resume", str(tmp_path / "rows"), "--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", words)
    return words


def test_ours_lies_below_the_bound_and_is_not_served_twice(
    asked: list[str], tmp_path: Path
) -> None:
    asked += ["--memory", "2", "40GiB", "--caches", "ours", "ours:lru", "bound"]
    assert cache_curves.main() == 0
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [r["cache"] for r in rows] == ["ours", "ours:lru", "bound"] * 2
    small, large = (
        {r["cache"]: r["restored"] for r in rows[at : at + 3]} for at in (0, 3)
    )
    for found in (small, large):
        assert 0.1 < found["ours"] <= found["bound"] < 0.7
    assert small["ours"] != small["ours:lru"] and small["ours"] < large["ours"]
    assert all(r["recomputed"] >= r["prompt_tokens"] * 0.3 for r in rows[:2])

    kept = (tmp_path / "rows").read_text()
    assert len(kept.splitlines()) == 6
    assert cache_curves.main() == 0
    assert (tmp_path / "rows").read_text() == kept


def test_an_unknown_workload_is_named(
    asked: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    asked[asked.index("few-shot")] = "mooncake"
    assert cache_curves.main() == 2
    assert "No workload mooncake; there are system-200" in capsys.readouterr().err


def test_a_task_that_cannot_be_served_does_not_end_the_side() -> None:
    side = Side("ours", Path(sys.executable), "benchmarks.curves.ours_side")
    small, large = (
        Task("qwen3-next", "few-shot", 0, None, memory, 2048, "ours")
        for memory in (1 << 20, 1 << 30)
    )
    rows: list[dict[str, Any]] = []
    run_side(side, [small, large], {}, rows.append)
    assert "TooLittleMemory" in rows[0]["failed"] or "elastic" in rows[0]["failed"]
    assert rows[1]["requests"] == 120


def test_a_process_that_ends_early_is_noticed() -> None:
    side = Side("broken", Path(sys.executable), "benchmarks.curves.no_such_side")
    task = Task("qwen3-next", "few-shot", 0, None, 1 << 30, 2048, "ours")
    with pytest.raises(RuntimeError, match="broken ended with status 1 after 0 of 1"):
        run_side(side, [task], {}, lambda row: None)
