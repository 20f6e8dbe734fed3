# SPDX-License-Identifier: Apache-2.0
"""Every model of the registry on a real SGLang, with the plugin's cache."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang")

import torch

from tests.engines.conftest import StartServer
from tests.engines.drivers.sglang import IMPORTS, ON_GPU
from tests.engines.messages import Ask
from tests.engines.model_findings import ROUNDING, Findings, check
from tests.engines.model_workload import gap
from tests.models.kinds import find, served, states_alone

pytestmark = pytest.mark.engine
TWO_RANKS: Mapping[str, Any] = {
    "flags": ("--tp-size=2",),
    "environment": {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"},
}


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> Findings:
    """Those of the kinds that were served so far."""
    folder = tmp_path_factory.mktemp("models")
    return Findings("model_phases_sglang", IMPORTS, folder, {})


@pytest.mark.parametrize("kind", served("sglang"))
def test_it_answers_as_the_reference_with_and_without_hits(
    findings: Findings, kind: str
) -> None:
    found = findings.of(kind)
    check(found, "hybrid_models.sglang.model")
    assert not found["has_graphs_of_prefills"], "state layers would be captured"


@pytest.mark.parametrize("kind", states_alone("sglang"))
def test_states_alone_are_restored(findings: Findings, kind: str) -> None:
    """By SGLang's own classes."""
    found = findings.of(kind)
    check(found, f"sglang.srt.models.{kind}")
    assert found["stats"]["pages_evicted"] == 0


@pytest.mark.skipif(ON_GPU and torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("name", ["bamba"])
def test_a_server_finds_the_class_by_itself(
    start_server: StartServer, tmp_path: Path, name: str
) -> None:
    """By the engine's own command line, with its processes, and none of our flags.

    On two ranks; prompts of several steps, turns that go on, and some at once.
    """
    kind = find(name)
    model = kind.write(tmp_path / name)
    turns = [list(range(3, 203)), list(range(20, 97))]
    with start_server("models", model=model, dtype="float32", **TWO_RANKS) as server:
        first = server.ask_all([Ask(tuple(turn), 12) for turn in turns], len(turns))
        again = [
            [*turn, *answer.tokens, *range(10, 30)]
            for turn, answer in zip(turns, first, strict=True)
        ]
        second = server.ask_all([Ask(tuple(turn), 12) for turn in again], len(turns))
    reference = kind.reference(model)
    asked = zip([*turns, *again], [*first, *second], strict=True)
    gaps = [gap(reference, turn, list(answer.tokens)) for turn, answer in asked]
    assert max(gaps) < ROUNDING, gaps
    cached = [answer.cached_tokens for answer in second]
    assert cached == [len(turn) + 12 - 1 for turn in turns]
