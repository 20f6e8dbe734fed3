# SPDX-License-Identifier: Apache-2.0
"""The benchmark of copies runs, checks what it measures, and writes both files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import state_moves


def test_all_ways_are_measured_in_every_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    state_moves.main(["--out", str(tmp_path / "new"), "--tiny"])
    found = json.loads((tmp_path / "new" / "state-moves.json").read_text())
    rows = found["rows"]
    assert len(rows) == 4 * (4 + 8)
    assert {row["layout"] for row in rows} == {
        "layer-major (fixed)",
        "slot-major (elastic)",
        "contiguous",
        "strided",
    }
    assert all(row["microseconds"] > 0 for row in rows)
    kernel = [row for row in rows if row["way"] == state_moves.KERNEL]
    assert len(kernel) == 12 and {row["times_the_kernel"] for row in kernel} == {1.0}
    written = (tmp_path / "new" / "state-moves.md").read_text()
    assert written.count("\n|") == 2 + len(rows)


def test_a_way_that_copies_wrongly_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    make = next(state_moves.cases(state_moves.TINY, torch.device("cpu")))
    monkeypatch.setattr(
        state_moves, "ways", lambda case: {state_moves.KERNEL: lambda *ids: None}
    )
    with pytest.raises(AssertionError, match="kernel"):
        state_moves.measure(make(), 1)
