# SPDX-License-Identifier: Apache-2.0
"""What a real vLLM had cached is on disk when it is started again.

One process fills files with the first turns of chats; another one serves the second
turns on copies of them.  See `disk_phases`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engines.phases import run_phases

pytest.importorskip("vllm")

from tests.engines.disk_phases import FEW, RETURNS
from tests.engines.drivers.vllm import IMPORTS
from tests.engines.host_phases import CHATS

pytestmark = pytest.mark.engine

ON_GPU = torch.cuda.is_available()
Found = dict[str, Any]
TWO_RANKS, WINDOWS = "two ranks", "windows"
ALONE = tuple(name for name in RETURNS if name not in (TWO_RANKS, WINDOWS))
MOST = 0.75
"""Share of second turns that comes from disk at least."""


def run(folder: Path, *names: str) -> Found:
    """What a process saw."""
    imports = () if ON_GPU else IMPORTS
    found: Found = run_phases("disk_phases", (str(folder), *names), imports).found
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("disk")


@pytest.fixture(scope="module")
def filled(folder: Path) -> Found:
    """Of the process that fills the files."""
    return run(folder, "fill nemotron_h")


@pytest.fixture(scope="module")
def returned(folder: Path, filled: Found) -> Found:
    """Of the process that is started on the files, by what was done to them."""
    return run(folder, *ALONE)


def expected(filled: Found) -> Any:
    """Second turns by stock vLLM without a cache."""
    return filled["stock"]["second"]["tokens"]


def is_free(found: Found) -> bool:
    """Whether nothing is in use that no request uses."""
    return all(used == 0 for used, _, _ in found["levels"].values())


def check_return(found: Found, answers: Any) -> None:
    """Second turns came from disk, and say what they say without a cache."""
    assert found["tokens"] == answers
    assert sum(found["cached"]) > MOST * sum(found["prompts"])
    stats = found["stats"]
    assert stats["disk_hit_tokens"] == stats["hit_tokens"] == sum(found["cached"])
    assert stats["disk_loads"] > CHATS / 2
    assert stats["disk_load_failures"] == stats["disk_store_failures"] == 0
    assert is_free(found)


def test_what_is_cached_is_written(filled: Found) -> None:
    found, stats = filled["filled"], filled["filled"]["stats"]
    assert found["tokens"] == filled["stock"]["first"]["tokens"]
    assert stats["disk_stores"] == len(found["sizes"]) >= CHATS
    assert stats["disk_store_failures"] == 0
    assert sum(found["sizes"]) == found["used"]
    assert is_free(found)


@pytest.mark.parametrize("name", ["elastic", "fixed"])
def test_an_engine_that_was_started_again_resumes_from_disk(
    filled: Found, returned: Found, name: str
) -> None:
    check_return(returned[name], expected(filled))


def test_second_turns_are_kept_as_well(filled: Found, returned: Found) -> None:
    stats = returned["elastic"]["stats"]
    assert stats["disk_stores"] >= CHATS / 2
    files = len(filled["filled"]["sizes"]) + stats["disk_stores"]
    assert len(returned["elastic"]["sizes"]) == files


def test_files_with_a_flipped_bit_are_computed_anew(
    filled: Found, returned: Found
) -> None:
    found, stats = returned["flipped"], returned["flipped"]["stats"]
    assert found["tokens"] == expected(filled)
    assert stats["disk_load_failures"] > CHATS / 2
    assert stats["disk_hit_tokens"] == stats["disk_loads"] == 0
    assert sum(found["cached"]) == 0 and is_free(found)


def test_states_that_are_zeroed_on_disk_change_answers(
    filled: Found, returned: Found
) -> None:
    """Negative control: the comparison does see a wrong state that was fetched."""
    zeroed = returned["zeroed"]
    assert sum(zeroed["cached"]) == sum(returned["elastic"]["cached"])
    pairs = zip(zeroed["tokens"], expected(filled), strict=True)
    assert sum(one != other for one, other in pairs) > CHATS / 2


def test_a_disk_for_a_few_bundles_keeps_to_its_size(
    filled: Found, returned: Found
) -> None:
    found = returned["few"]
    assert found["tokens"] == expected(filled)
    assert 0 < sum(found["sizes"]) == found["used"]
    assert sum(found["sizes"]) <= FEW * max(filled["filled"]["sizes"])
    assert found["stats"]["disk_stores"] > 0


def test_nothing_is_found_of_another_model(filled: Found, returned: Found) -> None:
    found, stats = returned["other model"], returned["other model"]["stats"]
    assert stats["disk_hit_tokens"] == stats["disk_loads"] == 0
    assert stats["disk_load_failures"] == sum(found["cached"]) == 0
    assert len(found["sizes"]) == len(filled["filled"]["sizes"]) + stats["disk_stores"]


def test_a_flush_removes_the_files_of_the_model(filled: Found, returned: Found) -> None:
    assert all(returned[name]["flushed"] for name in ALONE)
    assert returned["elastic"]["after the flush"] == 0
    others = len(filled["filled"]["sizes"])
    assert returned["other model"]["after the flush"] == others


@pytest.mark.skipif(ON_GPU and torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_ranks_have_a_part_each(tmp_path: Path) -> None:
    """Each reads its own files, and they go on when all have them: or none has.

    A session is one for both of them, too.
    """
    filled = run(tmp_path, f"fill {TWO_RANKS}")
    found = run(tmp_path, TWO_RANKS)[TWO_RANKS]
    saved, loaded = filled["filled"]["saved"], found["loaded"]
    assert saved["status"] == loaded["status"] == 200, (saved, loaded)
    assert loaded["tokens"] == saved["tokens"] == saved["given"] - 1
    assert len(list((tmp_path / "files").rglob("*.session"))) == 2
    stats = filled["filled"]["stats"]
    assert len(filled["filled"]["sizes"]) == 2 * stats["disk_stores"] >= 2 * CHATS
    check_return(found, expected(filled))


def test_windows_come_back_from_disk(tmp_path: Path) -> None:
    filled = run(tmp_path, f"fill {WINDOWS}")
    check_return(run(tmp_path, WINDOWS)[WINDOWS], expected(filled))
