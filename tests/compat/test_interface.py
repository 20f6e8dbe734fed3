# SPDX-License-Identifier: Apache-2.0
"""What an engine asks of an object of ours, on a small engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybrid_plugin.upstream.hookpoints import Interface, SourceView, Status

OURS = "hybrid_plugin.core.memory.pools:PagePool"


def _view(folder: Path, body: str) -> SourceView:
    (folder / "engine").mkdir()
    (folder / "engine" / "__init__.py").touch()
    (folder / "engine" / "core.py").write_text(
        f"class Core:\n    def step(self):\n        {body}\n"
    )
    return SourceView(folder, "engine", "1.0")


@pytest.mark.parametrize(
    "body",
    [
        "self.pool.free",
        "self.scheduler.pool.in_use",
        "pool.capacity",
        "self.pool.gone = 1",
        "self.carpool.gone()",
        "self.pool.free; self.pool.later()",
    ],
)
def test_ours_has_it(tmp_path: Path, body: str) -> None:
    interface = Interface("engine.core", "pool", OURS, unreached={"later": "never"})
    uses = interface.uses(_view(tmp_path, f"self.pool.usable; {body}"))
    assert "usable" in uses
    assert "gone" not in uses
    finding = interface.check(SourceView(tmp_path, "engine", "1.0"))
    assert finding.problem is None


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (
            "self.pool.defragment()",
            "engine.core:pool.defragment is used, which PagePool does not have",
        ),
        (
            "self.pool.allocate(3, urgent=True)",
            "engine.core:pool.allocate is given urgent as well",
        ),
    ],
)
def test_ours_lacks_it(tmp_path: Path, body: str, problem: str) -> None:
    interface = Interface("engine.core", "pool", OURS)
    finding = interface.check(_view(tmp_path, body))
    assert finding.status is Status.CHANGED
    assert finding.problem == problem


def test_nothing_uses_ours(tmp_path: Path) -> None:
    finding = Interface("engine.core", "pool", OURS).check(_view(tmp_path, "pass"))
    assert finding.status is Status.MISSING
    assert finding.problem == (
        "engine.core:pool is missing (engine.core does not use it)"
    )
