# SPDX-License-Identifier: Apache-2.0
"""GLM-5.3-Flash on a real SGLang: states, latents, index keys, and rings of tokens.

Index keys are kept in eight bits, whatever the model computes in: another order of the
same sums rounds some otherwise, and a query then reads other tokens.  So answers may
leave stock's where two tokens are nearly equally likely; the index keys of each prompt
are compared as well, which shows more than answers do.  With drafts queries read all
tokens, and answers and index keys are stock's, which has neither drafts nor a cache.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engines.index_phases_sglang import (
    ALGORITHMS,
    ANSWER,
    PAGE,
    SHARED,
    TOKENS,
    TURNS,
)
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
    for served in stock.values():
        assert not any(any(hits) for hits in served["cached"].values())


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
    wrong_keys = zip(found["wrong keys"][phase], WHOLE, strict=True)
    assert all(set(range(hit // TOKENS)) <= set(wrong) for wrong, hit in wrong_keys)
    expected = stock["chosen"]["answers"]["second"]
    answers = zip(found["answers"][phase], expected, strict=True)
    assert sum(one != other for one, other in answers) > len(TURNS) // 2


def test_rings_matter_where_a_hit_ends_between_the_tokens_of_a_key(
    found: dict[str, Any],
) -> None:
    phase = "zeroed rings"
    assert found["cached"][phase] == WHOLE
    for wrong, hit in zip(found["wrong keys"][phase], WHOLE, strict=True):
        assert (hit // TOKENS in wrong) == (hit % TOKENS > 0), (wrong, hit)


DRAFTED = ("first", "second", "crowd", "behind aborts")
LIKE = {"crowd": "first", "behind aborts": "second"}
"""Stock's phases with the same prompts, where their names differ."""


@pytest.fixture(scope="module")
def drafted(folder: Path, stock: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What is found with drafts of the oracle, and with those of the model's head."""
    arguments = json.dumps(stock)
    return {
        mode: run_phases(MODULE, (str(folder), mode, arguments), IMPORTS).found
        for mode in ALGORITHMS
    }


@pytest.mark.parametrize("mode", ALGORITHMS)
def test_answers_with_drafts_are_those_without(
    drafted: dict[str, dict[str, Any]], stock: dict[str, Any], mode: str
) -> None:
    """Behind hits, retractions and aborts; and so are all index keys."""
    found = drafted[mode]
    for phase in DRAFTED:
        expected = stock["all"]["answers"][LIKE.get(phase, phase)]
        assert found["answers"][phase] == expected, phase
        assert not any(found["wrong keys"][phase]), found["wrong keys"][phase]


def test_drafts_were_accepted_and_rejected(drafted: dict[str, dict[str, Any]]) -> None:
    steps = drafted["oracle"]["steps"]
    assert steps["verified"] // 2 < steps["accepted"] < 4 * steps["verified"], steps
    assert drafted["head"]["steps"]["verified"] > 0


@pytest.mark.parametrize("mode", ALGORITHMS)
def test_second_turns_resume_where_first_ones_end(
    drafted: dict[str, dict[str, Any]], mode: str
) -> None:
    """At most a token further, where the last one is an accepted draft."""
    found = drafted[mode]
    for phase in ("second", "behind aborts"):
        ends = zip(found["cached"][phase], WHOLE, strict=True)
        more = [hit - whole for hit, whole in ends]
        assert set(more) <= {0, 1}, more
        assert mode == "oracle" or not any(more)
    assert found["stats"]["turn_ends_missed"] == 0


@pytest.mark.parametrize("mode", ALGORITHMS)
def test_what_is_retracted_or_aborted_leaves_nothing_behind(
    drafted: dict[str, dict[str, Any]], mode: str
) -> None:
    found = drafted[mode]
    assert found["stats"]["preemptions"] > 0
    lengths = found["lengths with aborts"]
    assert set(lengths[::2]) == {2 * ANSWER} and max(lengths[1::2]) < 2 * ANSWER
    assert not any(found["used"].values()), found["used"]


def test_rings_without_room_for_drafts_are_seen(
    drafted: dict[str, dict[str, Any]],
) -> None:
    """Negative control: rejected drafts overwrite tokens that wait for a key."""
    for phase in ("first, narrow rings", "narrow rings"):
        wrong = drafted["oracle"]["wrong keys"][phase]
        assert sum(map(bool, wrong)) > len(TURNS) // 2, wrong


def test_hits_restore_the_index_keys_and_rings_of_the_head(
    drafted: dict[str, dict[str, Any]],
) -> None:
    """So its drafts are as good as without a cache; with zeroed rings they are not."""
    wrong = drafted["head"]["wrong keys of the head"]
    assert not any(wrong["second"]) and not any(wrong["behind aborts"]), wrong
    for keys, hit in zip(wrong["zeroed rings of the head"], WHOLE, strict=True):
        assert (hit // TOKENS in keys) == (hit % TOKENS > 0), (keys, hit)
