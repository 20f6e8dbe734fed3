# SPDX-License-Identifier: Apache-2.0
"""What the device of a real vLLM evicts comes back from host memory, unnoticed.

The cache is looked at from within the engine's process, so this cannot be written
against a server; see `host_phases`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engines.phases import run_phases

pytest.importorskip("vllm")

from tests.engines.drivers.vllm import IMPORTS
from tests.engines.host_phases import CHATS, DROPPED, SERVED

pytestmark = pytest.mark.engine

ON_GPU = torch.cuda.is_available()
Found = dict[str, Any]


ALONE = ("windows", "elastic", "fixed", "zeroed", "without", "our kernels", "drafts")
"""With drafts last: where vLLM searched n-grams, no other engine starts any more."""
TWO_RANKS = "two ranks"
MOST = 0.75
"""Share of second turns that is restored at least.  What is on its way to the device
makes way for requests that run and grow, so one or two may be computed again."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Found]:
    """All that was seen of every engine of one rank."""
    return serve(tmp_path_factory.mktemp("model"), *ALONE)


def serve(folder: Path, *names: str) -> dict[str, Found]:
    """Serve the engines of these names in a process of their own."""
    imports = () if ON_GPU else IMPORTS
    finding = run_phases("host_phases", (str(folder), *names), imports)
    with_host = sum("host_memory" in SERVED[name].options for name in names)
    assert finding.log.count("of host memory on each rank") == with_host
    found: dict[str, Found] = finding.found
    return found


@pytest.fixture(params=["elastic", "fixed"])
def hosted(request: pytest.FixtureRequest, served: dict[str, Found]) -> Found:
    """Of an engine with host memory, by the kind of its pools."""
    return served[request.param]


@pytest.mark.parametrize("phase", ["first", "second", "crowd"])
def test_answers_are_those_without_a_cache(
    hosted: Found, served: dict[str, Found], phase: str
) -> None:
    assert hosted[phase]["tokens"] == served["nemotron_h"][phase]["tokens"]


def test_second_turns_resume_where_the_first_ones_ended(hosted: Found) -> None:
    cached, prompts = hosted["second"]["cached"], hosted["second"]["prompts"]
    assert sum(cached) > MOST * sum(prompts)
    ends = [
        0 < length - hit < 40
        for hit, length in zip(cached, prompts, strict=True)
        if hit > 0
    ]
    assert all(ends)
    stats = hosted["stats"]
    assert 0.5 * stats["hit_tokens"] < stats["host_hit_tokens"] <= stats["hit_tokens"]
    assert stats["host_loads"] > CHATS / 2
    assert stats["snapshots_evicted"] > CHATS / 2


@pytest.mark.parametrize("name", ["our kernels", "drafts", "windows"])
def test_other_engines_restore_the_same(name: str, served: dict[str, Found]) -> None:
    check_chats(served[name], served[SERVED[name].kind])


@pytest.mark.skipif(ON_GPU and torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_ranks_restore_alike(tmp_path: Path) -> None:
    """Tensor parallel: each rank replays the same commands on memory of its own."""
    found = serve(tmp_path, TWO_RANKS)
    check_chats(found[TWO_RANKS], found[SERVED[TWO_RANKS].kind])


def check_chats(found: Found, expected: Found) -> None:
    """Answers are those without a cache, and second turns came from the host."""
    for phase in ("first", "second"):
        assert found[phase]["tokens"] == expected[phase]["tokens"]
    second, stats = found["second"], found["stats"]
    assert sum(second["cached"]) > MOST * sum(second["prompts"])
    assert stats["host_hit_tokens"] > 0.5 * stats["hit_tokens"]
    assert all(used == 0 for used, _, _ in found["levels"].values())


def test_without_host_memory_the_device_has_forgotten(served: dict[str, Found]) -> None:
    without = served["without"]
    assert sum(without["second"]["cached"]) < 0.2 * sum(without["second"]["prompts"])
    assert without["second"]["tokens"] == served["nemotron_h"]["second"]["tokens"]


def test_states_that_are_zeroed_change_answers(served: dict[str, Found]) -> None:
    """Negative control: the comparison does see a wrong state that was restored."""
    zeroed, stock = served["zeroed"]["second"], served["nemotron_h"]["second"]
    assert sum(zeroed["cached"]) > MOST * sum(zeroed["prompts"])
    pairs = zip(zeroed["tokens"], stock["tokens"], strict=True)
    assert sum(one != other for one, other in pairs) > CHATS / 2


@pytest.mark.skipif(ON_GPU, reason="a GPU's granules have room for the crowd")
def test_preempted_requests_resume(served: dict[str, Found]) -> None:
    stats = served["elastic"]["stats"]
    assert stats["preemptions"] > 0
    assert stats["resumed_hit_tokens"] > 0.9 * stats["resumed_queried_tokens"]


def test_requests_that_wait_for_a_restore_can_be_dropped(hosted: Found) -> None:
    assert hosted["dropped"] == [{"waits": True, "restoring": True}] * 2
    assert hosted["flushed early"] is False
    for levels in (hosted["levels"], hosted["dropped levels"]):
        assert all(used == 0 for used, _, _ in levels.values()), levels


def test_a_flush_forgets_what_is_on_the_host(
    hosted: Found, served: dict[str, Found]
) -> None:
    assert hosted["flushed"]
    assert all(cached == 0 for _, cached, _ in hosted["flushed levels"].values())
    assert hosted["last"]["cached"] == [0, 0]
    expected = served["nemotron_h"]["second"]["tokens"][DROPPED]
    assert hosted["last"]["tokens"] == expected
