# SPDX-License-Identifier: Apache-2.0
"""Requests that stream their input, on a real vLLM: turns go on from the last.

vLLM takes them from Python only, so they are served in a process of their own; see
`session_phases_vllm`.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.engines.phases import run_phases

pytest.importorskip("vllm")

from tests.engines.drivers.vllm import IMPORTS

pytestmark = pytest.mark.engine

PACES = ("in turns", "at once")
ENGINES = ("plugin", "preempting")
Found = dict[str, Any]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Found]:
    """What each engine answered."""
    folder = tmp_path_factory.mktemp("model") / "nemotron-h"
    return run_phases("session_phases_vllm", (str(folder),), IMPORTS).found


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("pace", PACES)
def test_turns_are_answered_as_whole_prompts_without_a_cache(
    found: dict[str, Found], engine: str, pace: str
) -> None:
    expected = found["stock"]["sessions"]
    assert found[engine][pace] == expected
    answers = [tuple(answer) for turns in expected for answer in turns]
    assert len(set(answers)) == len(answers), "they depend on what was said before"


@pytest.mark.parametrize("engine", ENGINES)
def test_others_are_answered_as_without_sessions(
    found: dict[str, Found], engine: str
) -> None:
    for pace in PACES:
        assert found[engine][f"crowd, {pace}"] == found["stock"]["crowd"]


@pytest.mark.parametrize("engine", ENGINES)
def test_all_that_a_session_had_is_found_by_who_goes_on(
    found: dict[str, Found], engine: str
) -> None:
    assert all(cached == known for known, cached in found[engine]["after"])


def test_sessions_were_preempted(found: dict[str, Found]) -> None:
    assert found["plugin"]["preemptions"] == 0 < found["preempting"]["preemptions"]
