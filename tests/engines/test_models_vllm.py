# SPDX-License-Identifier: Apache-2.0
"""Every model of the registry on a real vLLM, with the plugin's cache."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

pytest.importorskip("vllm")

import torch

from tests.engines import adapter_phases_vllm, quantised_phases_vllm
from tests.engines.conftest import StartServer
from tests.engines.drivers.vllm import IMPORTS, ON_GPU
from tests.engines.model_findings import ROUNDING, Findings, check
from tests.engines.model_workload import ANSWER, gap
from tests.engines.phases import run_phases
from tests.models.kinds import find, served, states_alone

pytestmark = pytest.mark.engine
two_ranks = pytest.mark.skipif(
    ON_GPU and torch.cuda.device_count() < 2, reason="needs two GPUs"
)
OF_8_BITS = 0.4
"""Nats by which another token may be likelier where tokens are rounded to 8 bits: noise
of a millionth in the norms of the reference moves its own logits by up to 0.2."""


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> Findings:
    """Those of the kinds that were served so far."""
    folder = tmp_path_factory.mktemp("models")
    return Findings("model_phases_vllm", IMPORTS, folder, {})


@pytest.mark.parametrize("kind", served("vllm"))
def test_it_answers_as_the_reference_with_and_without_hits(
    findings: Findings, kind: str
) -> None:
    check(findings.of(kind), "hybrid_models.vllm.model")


@pytest.mark.parametrize("kind", states_alone("vllm"))
def test_states_alone_are_restored(findings: Findings, kind: str) -> None:
    """By vLLM's own classes, with no option that asks for the plugin."""
    found = findings.of(kind)
    check(found, f"vllm.model_executor.models.{kind}")
    assert found["stats"]["pages_evicted"] == 0


@two_ranks
@pytest.mark.parametrize("kind", ["plamo2"])
def test_an_adapter_changes_what_merged_weights_change(
    kind: str, tmp_path: Path
) -> None:
    """Of every linear layer, those inside of state layers as well, on two ranks."""
    arguments = kind, str(tmp_path / kind), "2"
    found = run_phases("adapter_phases_vllm", arguments, IMPORTS).found
    assert found["model"] == "hybrid_models.vllm.model"
    gaps = found["gaps"]
    for right in ("first, merged", "second, merged", "without, base"):
        assert gaps[right] < ROUNDING, gaps
    for wrong in ("first, base", "second, base", "without, merged", "zeroed, merged"):
        assert gaps[wrong] > 100 * ROUNDING, gaps
    assert found["cached"]["second"] == turns(adapter_phases_vllm.PROMPTS)
    assert found["cached"]["without"] == [0, 0], "what an adapter made was restored"


@two_ranks
@pytest.mark.parametrize("kind", ["bamba"])
def test_weights_and_tokens_of_8_bits(kind: str, tmp_path: Path) -> None:
    """On two ranks, that have some parts of a projection whole."""
    arguments = kind, str(tmp_path / kind), "2"
    found = run_phases("quantised_phases_vllm", arguments, IMPORTS).found
    assert found["model"] == "hybrid_models.vllm.model"
    assert found["kernels"] == ["CompressedTensorsLinearMethod"]
    assert found["gaps"]["first"] < OF_8_BITS, found["gaps"]
    assert found["gaps"]["second"] < OF_8_BITS, found["gaps"]
    assert found["gaps"]["zeroed"] > 4 * OF_8_BITS, found["gaps"]
    assert found["cached"]["second"] == turns(quantised_phases_vllm.PROMPTS)


def turns(prompts: Sequence[tuple[int, int]]) -> list[int]:
    """What is restored of second turns; the last token of an answer is not computed."""
    return [length + ANSWER - 1 for _, length in prompts]


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


def test_states_alone_need_no_flag(start_server: StartServer, tmp_path: Path) -> None:
    """vLLM by itself would cache nothing of such a model."""
    kind = find("mamba2")
    model = kind.write(tmp_path / "mamba2")
    with start_server("states alone", model=model, dtype="float32") as server:
        turn = list(range(3, 203))
        first = server.ask(turn, 12)
        again = [*turn, *first.tokens, *range(10, 30)]
        second = server.ask(again, 12)
        metrics = server.metrics()
    reference = kind.reference(model)
    assert gap(reference, turn, list(first.tokens)) < ROUNDING
    assert gap(reference, again, list(second.tokens)) < ROUNDING
    assert second.cached_tokens == len(turn) + 12 - 1
    assert metrics["hit_tokens"] == len(turn) + 12 - 1
    assert metrics["state{cached}"] > 0
