# SPDX-License-Identifier: Apache-2.0
"""What the comparison of restored tokens with and without drafts says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import drafts_restored as restored
from benchmarks.drafts_restored import WITH, WITHOUT
from hybrid_plugin.tools.demo.measure import Result


def result(cached: int, length: float | None = None) -> Result:
    """One workload on one server."""
    return Result(
        requests=4,
        failed=0,
        prompt_tokens=1000,
        cached_tokens=cached,
        ttft_ms_p50=1.0,
        ttft_ms_p95=2.0,
        seconds=3.0,
        right_answers=3,
        peak_pages=5,
        peak_slots=2,
        peak_running=2,
        preemptions=None,
        acceptance_length=length,
    )


def pair(without: int, drafted: int) -> dict[str, Result]:
    """Both sides of a workload."""
    return {WITHOUT: result(without), WITH: result(drafted, 1.75)}


@pytest.mark.parametrize(("drafted", "lost"), [(890, 1.0), (889, 1.1), (950, -5.0)])
def test_a_point_may_be_lost_and_any_number_gained(drafted: int, lost: float) -> None:
    found = {"chats": pair(900, drafted)}
    assert restored.difference(found["chats"]) == pytest.approx(lost)
    text = restored.table(found)
    verdict = text.splitlines()[-1]
    assert (verdict == "More than 1 point is lost in: chats.") == (lost > 1)


def test_a_row_has_both_sides() -> None:
    row = restored.table({"burst": pair(0, 100)}).splitlines()[2]
    assert row == "| burst | 0.0% | 10.0% | -10.0 | 1.75 | 2 | 2 | 3 | 3 | 4 |"


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_only_one_side_drafts_and_memory_is_equal(engine: str) -> None:
    found = restored.engines(engine, drafts=3, cache_mib=16)
    commands = {
        side: list(one.launch(Path("model"), 1, plugin=True).command)
        for side, one in found.items()
    }
    more = [flag for flag in commands[WITH] if flag not in commands[WITHOUT]]
    assert [flag for flag in commands[WITHOUT] if flag not in commands[WITH]] == []
    assert more and all(flag.startswith("--speculative") for flag in more)


def test_the_document_has_every_number() -> None:
    found = restored.document("vllm", {"chats": pair(1, 2)}, version="1", drafts=3)
    read = json.loads(json.dumps(found))
    assert read["drafts"] == 3 and read["version"] == "1"
    assert read["workloads"]["chats"][WITH]["cached_tokens"] == 2
