# SPDX-License-Identifier: Apache-2.0
"""Memory moves between the pools of a real vLLM, and nobody notices.

The pools' addresses are looked at from within the engine's process, so this
cannot be written against a server; see `elastic_phases`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engines import slow_decay
from tests.engines.phases import run_phases

pytest.importorskip("vllm")

from tests.engines.drivers.vllm import IMPORTS

pytestmark = pytest.mark.engine

ON_GPU = torch.cuda.is_available()
BUDGET = (24 if ON_GPU else 8) << 20
ELASTIC = {"elastic": True, "gpu_memory_budget": BUDGET}
STATES, KV, STATES_AGAIN, KV_AGAIN = range(4)

Found = dict[str, Any]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In float32, so that equal computation gives equal tokens."""
    return slow_decay.write_nemotron_h(tmp_path_factory.mktemp("model") / "nemotron-h")


@pytest.fixture(scope="module", params=[None, "LBHNC"], ids=["packed", "layer-major"])
def layout(request: pytest.FixtureRequest) -> str | None:
    """What vLLM is told about its layout; None for the plugin's choice."""
    value: str | None = request.param
    return value


@pytest.fixture(scope="module")
def moving(model: Path, layout: str | None) -> Found:
    """What was seen of pools over one budget."""
    if ON_GPU:
        pytest.skip("resident memory is looked at on CPUs")
    return serve(model, ELASTIC, layout=layout)


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[list[int]]]:
    """What vLLM alone answers."""
    return answers(serve(model, {"enabled": False}))


def serve(
    model: Path,
    options: dict[str, Any],
    ranks: int = 1,
    count: int = 4,
    layout: str | None = None,
) -> Found:
    """Serve the first so many phases in a process of its own."""
    arguments = (str(model), json.dumps(options), str(ranks), str(count))
    environment = {"VLLM_KV_CACHE_LAYOUT": layout} if layout else {}
    imports = () if ON_GPU else IMPORTS
    finding = run_phases("elastic_phases", arguments, imports, environment)
    return finding.found | {"log": finding.log}


def answers(found: Found) -> list[list[list[int]]]:
    return [phase["tokens"] for phase in found["phases"]]


def test_memory_goes_where_it_is_wanted(moving: Found) -> None:
    phases = moving["phases"]
    for wants_states, wants_kv in ((STATES, KV), (STATES_AGAIN, KV_AGAIN)):
        less, more = phases[wants_states], phases[wants_kv]
        assert more["resident_kv"] > 2 * less["resident_kv"]
        assert less["resident_state"] > 2 * more["resident_state"]
    assert moving["stats"]["moves"] > 50


def test_pages_lie_as_wanted(moving: Found, layout: str | None) -> None:
    lie = "apart" if layout else "side by side"
    assert f"its layers lie {lie}" in moving["log"]


def test_the_budget_is_held(moving: Found) -> None:
    assert moving["budget"] <= BUDGET
    assert BUDGET // 2 < moving["most_mapped"] <= moving["budget"]
    assert moving["most_resident"] <= moving["most_mapped"]


def test_resident_memory_follows_what_is_mapped(moving: Found) -> None:
    for phase in moving["phases"]:
        resident = phase["resident_kv"] + phase["resident_state"]
        assert 0.75 * phase["mapped"] < resident <= phase["mapped"]


def test_answers_are_those_of_vllm_alone(
    moving: Found, expected: list[list[list[int]]]
) -> None:
    assert answers(moving) == expected


def test_the_log_tells_of_large_moves(moving: Found) -> None:
    assert moving["log"].count("Cache memory moved between the pools") >= 2


@pytest.mark.skipif(ON_GPU and torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_ranks_move_alike(model: Path, expected: list[list[list[int]]]) -> None:
    """Tensor parallel: each rank replays the same commands on memory of its own."""
    found = serve(model, ELASTIC, ranks=2, count=2)
    assert "Cache memory moved between the pools" in found["log"]
    assert answers(found) == expected[:2]
