# SPDX-License-Identifier: Apache-2.0
"""vLLM with blocks of drafts, by DFlash, and the plugin's cache.

The draft model reads hidden states of its target alone, which its KV is made of, so
that behind a hit it proposes what it does without one only where that KV was restored.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from hybrid_plugin.tools.demo.compare import NEAR_TIE
from tests.engines.block_phases_vllm import ANSWER, ON_GPU, TURNS
from tests.engines.phases import run_phases

pytest.importorskip("vllm")

from tests.engines.drivers.vllm import IMPORTS

pytestmark = pytest.mark.engine

ROUNDING = NEAR_TIE if ON_GPU else 2e-3
"""Nats by which another token may be likelier, in bfloat16 and in float32."""


@pytest.fixture(scope="module")
def found(
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Any]:
    """What one process serves, all phases."""
    options = json.dumps({"elastic": True})
    folder = str(tmp_path_factory.mktemp("blocks"))
    return run_phases(
        "block_phases_vllm", (options, folder), () if ON_GPU else IMPORTS
    ).found


def test_answers_are_greedy_ones(found: dict[str, Any]) -> None:
    assert max(max(gaps) for gaps in found["gaps"].values()) < ROUNDING
    if ON_GPU:  # a pass of another length rounds differently
        return
    said = found["answers"]
    assert said["second"] == said["second alone"] == said["second, draft KV zeroed"]
    assert said["first"] == said["first again"]


def test_second_turns_restore_the_first(found: dict[str, Any]) -> None:
    whole = [length + ANSWER - 1 for length in TURNS]
    for phase in ("second", "second, draft KV zeroed"):
        lost = zip(whole, found["cached"][phase], strict=True)
        assert all(cached - least in (0, 1) for least, cached in lost), phase
    assert not any(found["cached"]["second alone"] + found["cached"]["second together"])
    assert found["turn_ends_missed"] == 0


def test_the_draft_model_proposes_behind_hits_what_it_does_without(
    found: dict[str, Any],
) -> None:
    """Its KV is restored with the model's; without it, it proposes something else."""
    compared, zeroed = found["proposed"], found["proposed from zeros"]
    assert compared["texts"] > 30 and compared["kinds"] > compared["texts"] / 4
    # A pass of another length rounds differently, where it rounds to bfloat16.
    rounded = found["proposed together"]
    assert rounded["texts"] > 30 and rounded["unlike"] < rounded["texts"] / 2
    share = rounded["unlike"] / rounded["texts"]
    assert compared["unlike"] <= 2 * share * compared["texts"]
    assert zeroed["unlike"] > zeroed["texts"] / 2
