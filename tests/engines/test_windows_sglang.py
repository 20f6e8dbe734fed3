# SPDX-License-Identifier: Apache-2.0
"""Full attention and windows on a real SGLang: answers, hits, and pages that are freed.

The pools are observed from within the scheduler's process, so this cannot be written
against a server; see `window_phases_sglang`.  The model is a Laguna without experts:
of those that SGLang gives a window pool, it runs on a CPU as it is.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.engines import slow_decay
from tests.engines.conftest import StartServer
from tests.engines.greedy import gaps
from tests.engines.messages import Ask
from tests.engines.phases import Finding, run_phases
from tests.engines.window_phases import (
    ANSWER,
    LONG,
    LONG_ANSWER,
    PAGE,
    SHARED,
    STEP,
    TURNS,
    workload,
)
from tests.engines.window_phases_sglang import BUDGET, RATIO

pytest.importorskip("sglang")

from tests.engines.drivers.sglang import IMPORTS

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="in float32, on the CPU platform"
    ),
]

PHASES = ("alone", "first", "second", "shared 2", "crowd", "crowd again")
NOTHING = 1e-5
"""Nats by which another token may be likelier: rounding."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the model."""
    return tmp_path_factory.mktemp("laguna")


@pytest.fixture(scope="module")
def model(folder: Path, finding: Finding) -> Path:
    """The model that the phases wrote."""
    return folder


@pytest.fixture(scope="module")
def finding(folder: Path) -> Finding:
    """What was answered and seen, phase by phase."""
    return run_phases("window_phases_sglang", (str(folder),), IMPORTS)


def test_it_is_served_by_the_plugin(finding: Finding) -> None:
    assert "hybrid-plugin is active" in finding.log
    assert finding.log.count("hybrid-plugin pool of a sliding window of") == 1
    assert finding.log.count("elastic pools do not hold SGLang's window pools") == 1


def test_the_budget_is_held_and_divided_by_the_ratio(finding: Finding) -> None:
    pages = finding.found["pages"]
    small = slow_decay.SMALL
    token_bytes = 2 * 2 * small["num_key_value_heads"] * small["head_dim"] * 4
    """Keys and values in float32, of two layers of either kind."""
    taken = sum(pages.values()) * PAGE * token_bytes
    assert 0.95 * BUDGET < taken <= BUDGET
    assert pages["window0"] - 1 == int((pages["kv"] - 1) * PAGE * RATIO) // PAGE


@pytest.mark.parametrize("phase", PHASES)
def test_answers_are_those_of_transformers(finding: Finding, phase: str) -> None:
    found = finding.found
    assert max(found["gaps"][phase]) < NOTHING
    answers = found["tokens"][phase]
    assert len({tuple(answer) for answer in answers}) == len(answers)


def test_answers_depend_on_what_they_follow(finding: Finding) -> None:
    assert len(set(finding.found["tokens"]["alone"][0])) > 20


def test_second_turns_hit_the_whole_first_turn(finding: Finding) -> None:
    # The last token of an answer is sampled, not computed.
    expected = [length + ANSWER - 1 for length in TURNS]
    assert finding.found["cached"]["second"] == expected


def test_shared_beginnings_are_hit_at_their_last_page(finding: Finding) -> None:
    assert finding.found["cached"]["shared 2"] == [SHARED // PAGE * PAGE]


def test_pages_leave_their_windows_in_prefill_and_in_decode(finding: Finding) -> None:
    levels = finding.found["levels"]["alone"]
    assert len(levels) >= -(-LONG // STEP) + LONG_ANSWER - 1
    assert levels[-1]["kv"] >= (LONG + LONG_ANSWER) // PAGE, "full attention keeps all"
    # SGLang says by how many tokens to look back, and leaves it to us to add one.
    held = -(-(slow_decay.WINDOW + 1) // PAGE) + 1
    held += -(-slow_decay.WINDOW // PAGE)  # the snapshot of its body keeps them
    assert 0 < max(level["window0"] for level in levels) <= held


def test_what_a_crowd_left_in_the_cache_is_hit(finding: Finding) -> None:
    stats = finding.found["stats"]
    assert stats["pages_evicted"] > 0 and stats["snapshots_evicted"] > 0
    assert stats["refusals"] > 0 and stats["preemptions"] > 0
    assert stats["resumed_hit_tokens"] > 0
    assert sum(finding.found["cached"]["crowd again"]) > 0


def test_a_map_that_lacks_what_is_resumed_is_noticed(finding: Finding) -> None:
    """Negative control: the comparison notices a wrong window."""
    found = finding.found
    assert found["cached"]["broken"] == found["cached"]["second"]
    assert max(found["gaps"]["broken"]) > 1000 * NOTHING


def test_a_server_reports_its_windows(start_server: StartServer, model: Path) -> None:
    """Over the API, with the scheduler in a process of its own."""
    prompts = workload()
    turn, more = prompts["first"][1], prompts["more"][1]
    with start_server("windows", model=model, dtype="float32") as server:
        first = server.ask(turn, ANSWER)
        again = [*turn, *first.tokens, *more]
        second = server.ask(again, ANSWER)
        levels = server.metrics()
    asks = [Ask(tuple(prompt), ANSWER) for prompt in (turn, again)]
    assert max(gaps(model, asks, [first, second])) < NOTHING
    assert second.cached_tokens == len(turn) + ANSWER - 1
    assert levels["window0{cached}"] > 0
