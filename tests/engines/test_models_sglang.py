# SPDX-License-Identifier: Apache-2.0
"""Every model of the registry on a real SGLang, with the plugin's cache."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("sglang")

from tests.engines.conftest import StartServer
from tests.engines.drivers.sglang import IMPORTS
from tests.engines.model_findings import ROUNDING, Findings, check
from tests.engines.model_workload import gap
from tests.models.kinds import find, served, states_alone

pytestmark = pytest.mark.engine


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


def test_a_server_finds_the_class_by_itself(
    start_server: StartServer, tmp_path: Path
) -> None:
    """By the engine's own command line, with its processes, and none of our flags."""
    kind = find("bamba")
    model = kind.write(tmp_path / "bamba")
    with start_server("models", model=model, dtype="float32") as server:
        turn = list(range(3, 203))
        first = server.ask(turn, 12)
        again = [*turn, *first.tokens, *range(10, 30)]
        second = server.ask(again, 12)
    reference = kind.reference(model)
    assert gap(reference, turn, list(first.tokens)) < ROUNDING
    assert gap(reference, again, list(second.tokens)) < ROUNDING
    assert second.cached_tokens == len(turn) + 12 - 1
