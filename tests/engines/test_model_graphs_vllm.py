# SPDX-License-Identifier: Apache-2.0
"""Short prompts of our model classes in CUDA graphs of the whole model.

On a GPU `pytest -s` shows how many passes replayed one, and how long first tokens took.
A CPU has no graphs: there passes are described as theirs.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm")

from tests.engines.drivers.vllm import IMPORTS, ON_GPU
from tests.engines.model_findings import ROUNDING, check
from tests.engines.model_graph_phases_vllm import LENGTHS
from tests.engines.phases import run_phases
from tests.models.kinds import served

pytestmark = pytest.mark.engine

KINDS = served("vllm") if ON_GPU else ("bamba", "jamba")


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_in_graphs_are_answered_as_without(kind: str, tmp_path: Path) -> None:
    """By the same engine: passes of the crowd and of hits are in graphs, too."""
    arguments = kind, str(tmp_path / kind)
    finding = run_phases("model_graph_phases_vllm", arguments, IMPORTS)
    runs = finding.found["runs"]
    inside, outside = runs["with graphs"], runs["without"]
    alike = sum(
        a == b for a, b in zip(inside["answers"], outside["answers"], strict=True)
    )
    for name, run in runs.items():
        print(
            f"{kind}, {name}: {run['passes']} passes with prompts replayed graphs, "
            f"first token after {run['first token ms']} ms, "
            f"worst answer {max(run['gaps']):.6f} nats"
        )
    print(f"{kind}: {alike} of {len(inside['answers'])} answers are equal")
    if ON_GPU:
        assert "passes with prefills of up to" in finding.log
        assert inside["passes"] >= len(LENGTHS), "prompts replayed no graphs"
    assert outside["passes"] == 0
    assert max(inside["gaps"]) < ROUNDING and max(outside["gaps"]) < ROUNDING
    assert alike >= len(inside["answers"]) - 1, "not for rounding alone"
    check(finding.found["served"], "hybrid_models.vllm.model")
