# SPDX-License-Identifier: Apache-2.0
"""KV of 8 bits on a real vLLM: turns go on from it as if it had been kept all along."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
import torch

from tests.engines.kv_type_phases_vllm import PROMPTS
from tests.engines.model_workload import ANSWER
from tests.engines.phases import run_phases

pytest.importorskip("vllm")

from tests.engines.drivers.vllm import IMPORTS, ON_GPU

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(ON_GPU, reason="a GPU's attention takes no float32"),
]

CASES = (
    "nemotron_h:auto",
    "nemotron_h:fp8",
    "nemotron_h:fp8_e5m2",
    "gigachat35:fp8",
)
"""The last one has latent attention."""
SERVED = torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()
needs_avx_512 = pytest.mark.skipif(
    not SERVED, reason="vLLM keeps KV of 8 bits on CPUs with AVX-512 or AMX only"
)
EVERY = [CASES[0], *(pytest.param(case, marks=needs_avx_512) for case in CASES[1:])]
Found = dict[str, Any]


@pytest.fixture(scope="module")
def all_found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Found]]:
    """What was answered, by case and by engine."""
    folder = tmp_path_factory.mktemp("models")
    cases = CASES if SERVED else CASES[:1]
    return run_phases("kv_type_phases_vllm", (str(folder), *cases), IMPORTS).found


@pytest.mark.parametrize("case", EVERY)
def test_answers_are_those_of_vllm_without_a_cache(
    all_found: dict[str, dict[str, Found]], case: str
) -> None:
    found, stock = all_found[case]["plugin"], all_found[case]["stock"]
    assert found["first"] == stock["first"]
    assert found["second"] == stock["second"]
    assert found["zeroed"] != stock["third"], "without their states they would differ"


@pytest.mark.parametrize("case", EVERY)
def test_first_turns_are_restored(
    all_found: dict[str, dict[str, Found]], case: str
) -> None:
    # The last token of an answer is sampled, not computed.
    expected = [length + ANSWER - 1 for length in PROMPTS]
    assert all_found[case]["plugin"]["second, cached"] == expected


@needs_avx_512
@pytest.mark.parametrize("case", CASES[1:3])
def test_the_type_counts(all_found: dict[str, dict[str, Found]], case: str) -> None:
    """Rounding to 8 bits moves some answers, and most of their tokens are the same."""
    found, exact = (all_found[one]["stock"] for one in (case, CASES[0]))
    assert found != exact
    tokens, others = (chain.from_iterable(one["first"]) for one in (found, exact))
    same = sum(one == other for one, other in zip(tokens, others, strict=True))
    assert same > len(PROMPTS) * ANSWER // 2
