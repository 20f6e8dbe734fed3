# SPDX-License-Identifier: Apache-2.0
"""What is required of a model of the registry on any engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.engines.model_workload import ANSWER, PAGE, SHARED, TURNS
from tests.engines.phases import run_phases

ROUNDING = 1e-3
"""Nats by which another token may be likelier, in float32."""
PHASES = ("first", "second", "shared 2", "crowd", "crowd again", "first again")


@dataclass
class Findings:
    """By kind, each of which is served once."""

    module: str
    """Of `tests.engines`, that serves one."""
    imports: tuple[str, ...]
    folder: Path
    found: dict[str, dict[str, Any]]

    def of(self, kind: str) -> dict[str, Any]:
        """What came out for a kind."""
        if kind not in self.found:
            arguments = kind, str(self.folder / kind)
            self.found[kind] = run_phases(self.module, arguments, self.imports).found
        return self.found[kind]


def check(found: dict[str, Any], module: str) -> None:
    """Right answers, hits, preemption, and wrong answers from zeroed snapshots.

    Args:
        found: what came out.
        module: of the class that the engine must have built.
    """
    assert found["model"] == module
    for phase in PHASES:
        assert max(found["gaps"][phase]) < ROUNDING, (phase, found["gaps"][phase])
    assert found["distinct"]["crowd"] > 20, "answers hardly depend on what they follow"
    # The last token of an answer is sampled, not computed.
    whole = [length + ANSWER - 1 for length in TURNS]
    assert found["cached"]["second"] == whole
    assert found["cached"]["shared 2"] == [SHARED // PAGE * PAGE]
    stats = found["stats"]
    if module.startswith("hybrid_models."):
        assert stats["interior_snapshots"], "prompts were paused for all snapshots"
    assert stats["preemptions"] > stats["before"]["preemptions"]
    assert min(found["cached"]["crowd again"]) > 0
    assert found["cached"]["zeroed"] == whole
    zeroed = found["gaps"]["zeroed"]
    assert max(zeroed) > 100 * ROUNDING, (zeroed, "states hardly matter")
