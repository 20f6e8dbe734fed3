# SPDX-License-Identifier: Apache-2.0
"""GLM-5.3-Flash on a real SGLang: states, latents, index keys, and rings of tokens.

Latents are kept in sixteen bits and index keys in eight, whatever the model computes
in: another order of the same sums rounds some otherwise, and a query then reads other
tokens.  So answers may leave stock's where two tokens are nearly equally likely; the
index keys of each prompt are compared as well, which shows more than answers do.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engines.index_phases_sglang import ANSWER, PAGE, SHARED, TURNS
from tests.engines.phases import run_phases

pytest.importorskip("sglang")

from tests.engines.drivers.sglang import IMPORTS

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="in float32, on the CPU platform"
    ),
]

NEAR = 0.75
"""Nats, as wherever not all is in float32."""
TOKENS = 4
"""Of an index key."""
WHOLE = [length + ANSWER - 1 for length in TURNS]
"""What first turns computed: the last token of an answer is sampled only."""
HITS = ("second", "shared 0", "shared 1", "shared 2")
MODULE = "index_phases_sglang"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the model."""
    return tmp_path_factory.mktemp("glm5_next")


@pytest.fixture(scope="module")
def stock(folder: Path) -> dict[str, Any]:
    """What SGLang answers without a cache."""
    return run_phases(MODULE, (str(folder), "stock"), IMPORTS).found


@pytest.fixture(scope="module")
def found(folder: Path, stock: dict[str, Any]) -> dict[str, Any]:
    """What it answers with the plugin."""
    arguments = (str(folder), "plugin", json.dumps(stock))
    return run_phases(MODULE, arguments, IMPORTS).found


def test_hits_end_anywhere(found: dict[str, Any], stock: dict[str, Any]) -> None:
    assert found["cached"]["second"] == WHOLE
    assert found["cached"]["shared 2"] == [SHARED // PAGE * PAGE]
    assert not any(any(hits) for hits in stock["cached"].values())


@pytest.mark.parametrize("phase", HITS)
def test_index_keys_are_those_without_a_cache(
    found: dict[str, Any], phase: str
) -> None:
    """All of a prompt's: of what a hit restored, across its end, and behind it."""
    assert not any(found["wrong keys"][phase]), found["wrong keys"][phase]


@pytest.mark.parametrize("phase", HITS)
def test_answers_are_those_without_a_cache(found: dict[str, Any], phase: str) -> None:
    assert max(found["gaps"][phase]) < NEAR, found["gaps"][phase]


def test_states_matter(found: dict[str, Any]) -> None:
    assert found["cached"]["zeroed states"] == WHOLE
    assert max(found["gaps"]["zeroed states"]) > 2 * NEAR


def test_index_keys_matter(found: dict[str, Any], stock: dict[str, Any]) -> None:
    phase = "zeroed index keys"
    assert found["cached"][phase] == WHOLE
    pairs = zip(found["wrong keys"][phase], WHOLE, strict=True)
    assert all(set(range(hit // TOKENS)) <= set(wrong) for wrong, hit in pairs)
    answers = zip(found["answers"][phase], stock["answers"]["second"], strict=True)
    assert sum(one != other for one, other in answers) > len(TURNS) // 2


def test_rings_matter_where_a_hit_ends_between_the_tokens_of_a_key(
    found: dict[str, Any],
) -> None:
    phase = "zeroed rings"
    assert found["cached"][phase] == WHOLE
    for wrong, hit in zip(found["wrong keys"][phase], WHOLE, strict=True):
        assert (hit // TOKENS in wrong) == (hit % TOKENS > 0), (wrong, hit)
