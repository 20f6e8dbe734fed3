# SPDX-License-Identifier: Apache-2.0
"""Qwen4-Exp on a real SGLang: states, compressed keys, rings, and what n-grams left.

Compressed keys are kept in sixteen bits, whatever the model computes in.  All else is
in float32 here, and answers are the greedy ones of transformers without a cache.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.engines.compressed_phases_sglang import ANSWER, PAGE, SHARED, TURNS
from tests.engines.phases import run_phases

pytest.importorskip("sglang")

from tests.engines.drivers.sglang import IMPORTS

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="in float32, on the CPU platform"
    ),
]

NEAR = 1e-3
"""Nats: near ties in float32."""
TOKENS = 4
"""Of a compressed key."""
WHOLE = [length + ANSWER - 1 for length in TURNS]
"""What first turns computed: the last token of an answer is sampled only."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What all phases found."""
    folder = tmp_path_factory.mktemp("qwen4_exp")
    return run_phases("compressed_phases_sglang", (str(folder),), IMPORTS).found


def test_hits_end_anywhere(found: dict[str, Any]) -> None:
    assert found["cached"]["second"] == WHOLE
    assert found["cached"]["shared 2"] == [SHARED // PAGE * PAGE]
    assert not any(found["cached"]["empty"])


@pytest.mark.parametrize("phase", ["first", "second", "shared 1", "shared 2", "empty"])
def test_answers_are_those_without_a_cache(found: dict[str, Any], phase: str) -> None:
    assert max(found["gaps"][phase]) < NEAR, found["gaps"][phase]


def test_answers_on_hits_are_those_on_an_empty_cache(found: dict[str, Any]) -> None:
    assert found["answers"]["second"] == found["answers"]["empty"]
    assert not any(found["wrong keys"]["second"]), found["wrong keys"]["second"]


@pytest.mark.parametrize(
    "damage", ["zeroed snapshots", "zeroed keys", "zeroed n-grams"]
)
def test_each_part_matters(found: dict[str, Any], damage: str) -> None:
    assert found["cached"][damage] == WHOLE
    assert max(found["gaps"][damage]) > 20 * NEAR
    pairs = zip(found["answers"][damage], found["answers"]["empty"], strict=True)
    assert sum(one != other for one, other in pairs) > len(TURNS) // 2


def test_rings_matter_where_a_hit_ends_between_the_tokens_of_a_key(
    found: dict[str, Any],
) -> None:
    damage = "zeroed rings"
    assert found["cached"][damage] == WHOLE
    for wrong, hit in zip(found["wrong keys"][damage], WHOLE, strict=True):
        assert (hit // TOKENS in wrong) == (hit % TOKENS > 0), (wrong, hit)
