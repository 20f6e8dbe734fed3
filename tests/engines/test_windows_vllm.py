# SPDX-License-Identifier: Apache-2.0
"""Models with windows on a real vLLM: equal answers, hits, and pages that are freed.

The pools are observed from within the engine's process, so most of this cannot be
written against a server; see `window_phases`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engines import slow_decay
from tests.engines.conftest import StartServer
from tests.engines.drivers import Driver
from tests.engines.findings import found_by
from tests.engines.window_phases import (
    ANSWER,
    LONG,
    LONG_ANSWER,
    PAGE,
    SHARED,
    STEP,
    TURNS,
    options,
    workload,
)

pytest.importorskip("vllm")

from tests.engines.drivers.vllm import IMPORTS

pytestmark = pytest.mark.engine

KINDS = ("gemma3", "llama4", "nemotron_h_window")
"""Windows and full attention, chunks and full attention, windows and states."""
Found = dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the models."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def all_found(folder: Path) -> dict[str, dict[str, Found]]:
    """What each engine answered for each kind, and the levels of its pools."""
    result: dict[str, dict[str, Found]]
    result, _ = found_by(
        "tests.engines.window_phases", str(folder), *KINDS, imports=IMPORTS
    )
    return result


@pytest.fixture(params=KINDS)
def found(
    request: pytest.FixtureRequest, all_found: dict[str, dict[str, Found]]
) -> dict[str, Found]:
    """Of one kind, by engine."""
    return all_found[request.param]


def test_answers_are_those_of_vllm_without_a_cache(found: dict[str, Found]) -> None:
    answers = found["stock"]["tokens"]
    assert found["plugin"]["tokens"] == answers
    # They must depend on what they follow.
    assert len(set(answers["alone"][0])) > 20
    assert len({tuple(answer) for answer in answers["second"]}) == len(TURNS)


def test_second_turns_hit_the_whole_first_turn(found: dict[str, Found]) -> None:
    # The last token of an answer is sampled, not computed.
    expected = [length + ANSWER - 1 for length in TURNS]
    assert found["plugin"]["cached"]["second"] == expected


def test_shared_beginnings_are_hit_at_their_last_page(found: dict[str, Found]) -> None:
    cached = found["plugin"]["cached"]
    assert cached["shared 2"] == [SHARED // PAGE * PAGE]


def test_pages_leave_their_windows_in_prefill_and_in_decode(
    found: dict[str, Found],
) -> None:
    levels = found["plugin"]["levels"]["alone"]
    assert len(levels) >= -(-LONG // STEP) + LONG_ANSWER - 1
    assert levels[-1]["kv"] >= (LONG + LONG_ANSWER) // PAGE, "full attention keeps all"
    held = slow_decay.WINDOW // PAGE + 1
    assert 0 < max(level["window0"] for level in levels) <= held


def test_what_a_crowd_left_in_the_cache_is_hit(found: dict[str, Found]) -> None:
    stats = found["plugin"]["stats"]
    assert stats["pages_evicted"] > 0 and stats["snapshots_evicted"] > 0
    assert sum(found["plugin"]["cached"]["crowd again"]) > 0


def test_pools_share_memory_where_there_is_full_attention(
    all_found: dict[str, dict[str, Found]],
) -> None:
    stats = {kind: all_found[kind]["plugin"]["stats"] for kind in KINDS}
    for kind in ("gemma3", "llama4"):
        assert stats[kind]["moves"] > 0 and stats[kind]["preemptions"] > 0
    assert stats["nemotron_h_window"]["moves"] == 0


def test_a_dropped_copy_of_a_window_page_is_noticed(
    all_found: dict[str, dict[str, Found]],
) -> None:
    """Negative control: the comparison notices a wrong window."""
    runs = all_found[KINDS[0]]
    assert runs["broken"]["cached"]["second"] == runs["plugin"]["cached"]["second"]
    assert runs["broken"]["tokens"]["second"] != runs["stock"]["tokens"]["second"]


def test_a_server_reports_its_windows(
    start_server: StartServer,
    driver: Driver,
    folder: Path,
    all_found: dict[str, dict[str, Found]],
) -> None:
    """Over the API, with the engine and its worker in processes of their own."""
    expected = all_found["gemma3"]["stock"]["tokens"]
    prompts = workload()
    turn, more = prompts["first"][1], prompts["more"][1]
    with start_server(
        "windows", model=folder / "gemma3", dtype="float32", options=options("gemma3")
    ) as server:
        first = server.ask(turn, ANSWER)
        second = server.ask([*turn, *first.tokens, *more], ANSWER)
        text = driver.metrics(server.url)
    assert [list(first.tokens), list(second.tokens)] == [
        expected["first"][1],
        expected["second"][1],
    ]
    assert second.cached_tokens == len(turn) + ANSWER - 1
    cached = [
        line
        for line in text.splitlines()
        if line.startswith("hybrid_cache_pages{")
        and 'pool="window0"' in line
        and 'kind="cached"' in line
    ]
    assert len(cached) == 1 and float(cached[0].split()[-1]) > 0
