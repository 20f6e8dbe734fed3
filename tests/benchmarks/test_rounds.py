# SPDX-License-Identifier: Apache-2.0
"""Who takes part in a benchmark, until when, and what is kept of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import rounds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """What time it is: the one number in it."""
    now = [0.0]
    monkeypatch.setattr(rounds.time, "monotonic", lambda: now[0])
    yield now


def test_names_are_known_or_the_program_ends() -> None:
    rounds.check_known(["a"], {"a": 1, "b": 2}, "--only")
    with pytest.raises(SystemExit, match="--only: 'c' is none of: a; b"):
        rounds.check_known(["a", "c"], {"a": 1, "b": 2}, "--only")


def test_groups_are_as_large_as_fits() -> None:
    assert rounds.groups(["a", "b", "c"], 2) == [["a", "b"], ["c"]]


def test_what_one_part_leaves_is_for_the_others(clock: list[float]) -> None:
    ends = []
    for part, end in rounds.shares("abc", 90.0):
        ends.append((part, end))
        clock[0] += 10.0
    assert ends == [("a", 30.0), ("b", 50.0), ("c", 90.0)]


def test_no_turn_begins_that_could_end_too_late(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    ran = []
    for turn in rounds.in_time(iter([3.0, 1.0, 1.0]), 6.5, "another"):
        ran.append(turn)
        clock[0] += turn
    assert ran == [3.0, 1.0]  # the third would end at 7 if it took 3
    assert capsys.readouterr().err == "no time for another\n"


def test_results_are_read_as_they_were_saved(tmp_path: Path) -> None:
    out = tmp_path / "qwen3.5"
    rounds.save(out, {"results": {"a": 1}}, "A title", {"rounds": 2}, "A table.")
    assert rounds.read(out) == {"results": {"a": 1}}
    title, about, text = (tmp_path / "qwen3.5.md").read_text().split("\n\n")
    assert (title, text) == ("# A title", "A table.\n")
    assert about.startswith("device ") and about.endswith(", rounds 2")
