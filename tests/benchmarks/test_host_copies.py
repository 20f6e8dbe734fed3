# SPDX-License-Identifier: Apache-2.0
"""The benchmark of host copies runs, checks what it measures, and writes both files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks import host_copies
from hybrid_plugin.core.commands import Load
from hybrid_plugin.device.host.copies import HostCopies


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_prefixes_and_steps_are_measured_in_every_layout(tmp_path: Path) -> None:
    host_copies.main(["--out", str(tmp_path / "new"), "--tiny"])
    found = json.loads((tmp_path / "new" / "host-copies.json").read_text())
    moved, slowed = found["moved"], found["slowed"]
    assert len(moved) == 2 * 2 * 2 and len(slowed) == 2 * (1 + 3)
    assert {row["layout"] for row in moved} == set(host_copies.LAYOUTS)
    assert all(
        row["store_gb_per_second"] > 0 < row["load_gb_per_second"] for row in moved
    )
    assert {step["copies"] for step in slowed} == {
        "none",
        "store",
        "load",
        "store and load",
    }
    written = (tmp_path / "new" / "host-copies.md").read_text()
    assert written.count("\n|") == 2 * 2 + len(moved) + len(slowed)


def without_slots(run: Callable[..., None]) -> Callable[..., None]:
    def broken(copies: HostCopies, command: object) -> None:
        if not (isinstance(command, Load) and command.pool == "state"):
            run(copies, command)

    return broken


def test_copies_that_lose_something_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostCopies, "run", without_slots(HostCopies.run))
    prefix = host_copies.Prefix("tiny", "packed", host_copies.TINY)
    with pytest.raises(AssertionError, match="states differ"):
        prefix.check("in order")
