# SPDX-License-Identifier: Apache-2.0
"""What one engine has saved, another one resumes.

HYBRID_OTHER_PYTHON names the interpreter of an environment with the other engine.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.engines.bundle_files import zero_states
from tests.engines.conftest import StartServer
from tests.engines.disk_fill import CHATS, FILES, MODEL, first_turns, setup
from tests.engines.greedy import gaps
from tests.engines.messages import Answer, Ask
from tests.engines.sessions import names, order
from tests.engines.traffic import next_turns
from tests.engines.warm_start import ROOT

OTHER = os.environ.get("HYBRID_OTHER_PYTHON")
NOTHING = 1e-5
"""Nats by which another token may be likelier: rounding."""

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not OTHER, reason="no other engine is named"),
]


@dataclass(frozen=True)
class Filled:
    """What the other engine left."""

    folder: Path
    """With a model, and files."""
    second: list[Ask]
    """Turns behind those that were saved."""
    sessions: dict[str, int]
    """Tokens of each session, by its name."""


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Filled:
    """Of a server of the other engine that was ended."""
    folder = tmp_path_factory.mktemp("across")
    run = subprocess.run(
        [str(OTHER), "-W", "ignore", "-m", "tests.engines.disk_fill", str(folder)],
        cwd=ROOT,
        env=os.environ | {"SGLANG_PLATFORM": "", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-6000:]
    tokens, sessions = json.loads(run.stdout.splitlines()[-1])
    said = [Answer(tuple(one)) for one in tokens]
    return Filled(folder, next_turns(first_turns(), said, seed=2), sessions)


def come_back(
    start: StartServer, filled: Filled, files: str
) -> tuple[list[Answer], Mapping[str, float]]:
    """Load sessions, and ask second turns of this engine."""
    asks = [replace(one, logprobs=5) for one in filled.second]
    with start("across", **setup(filled.folder, files)) as server:
        assert names(server.url) == sorted(filled.sessions)
        for name, tokens in filled.sessions.items():
            found = order(server.url, name, "load")
            assert found["tokens"] == found["saved"] == tokens
        answers = server.ask_all(asks, 2)
        levels = server.metrics()
    print(levels)
    assert [answer.error for answer in answers if answer.error] == []
    saved = [filled.sessions[f"chat {number}"] for number in range(CHATS)]
    assert [answer.cached_tokens for answer in answers] == saved
    assert levels["disk_loads"] == CHATS
    assert levels["disk_hit_tokens"] > 0.75 * sum(one.prompt_tokens for one in answers)
    assert sum(count for name, count in levels.items() if "_failures{" in name) == 0
    return answers, levels


def test_chats_go_on_in_another_engine(
    start_server: StartServer, filled: Filled
) -> None:
    folder = filled.folder
    shutil.copytree(folder / FILES, folder / "as they are")
    answers, _ = come_back(start_server, filled, "as they are")
    assert max(gaps(folder / MODEL, filled.second, answers)) < NOTHING


def test_answers_change_when_the_states_of_another_engine_are_zeroed(
    start_server: StartServer, filled: Filled
) -> None:
    """Negative control: the comparison does see a wrong state."""
    folder = filled.folder
    shutil.copytree(folder / FILES, folder / "zeroed")
    assert zero_states(folder / "zeroed") >= CHATS
    answers, _ = come_back(start_server, filled, "zeroed")
    assert max(gaps(folder / MODEL, filled.second, answers)) > NOTHING
