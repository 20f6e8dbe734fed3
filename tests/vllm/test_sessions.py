# SPDX-License-Identifier: Apache-2.0
"""Streaming-input sessions: requests whose prompt goes on after each answer."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.sampling_params import SamplingParams
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.request import Request, StreamingUpdate

from hybrid_plugin.config import ConfigError
from hybrid_plugin.vllm import patches
from hybrid_plugin.vllm.activation import SCHEDULER
from hybrid_plugin.vllm.scheduler import HybridScheduler
from tests.vllm.fakes import PAGE, admit, compute, ids, manager, nothing_kept, request


def session(prompt: list[int], *chunks: list[int]) -> Any:
    """A session with answers of two tokens, whose later chunks wait already."""
    parameters = SamplingParams(max_tokens=2)
    one = Request("one", list(prompt), parameters, None, resumable=True)
    one.streaming_queue = deque(
        StreamingUpdate(
            mm_features=None,
            prompt_token_ids=chunk,
            max_tokens=2,
            arrival_time=0.0,
            sampling_params=parameters,
        )
        for chunk in chunks
    )
    return one


def plain(name: str, tokens: list[int]) -> Any:
    """An ordinary request."""
    one = request(name, 0)
    one.all_token_ids.extend(tokens)
    return one


def synchronous_scheduler() -> Any:
    """Ours without vLLM's construction, as far as a session's turn needs it."""
    made: Any = HybridScheduler.__new__(HybridScheduler)
    made.kv_cache_manager = manager(pages=40)
    made.hash_block_size = PAGE
    made.log_stats = False
    made.num_waiting_for_streaming_input = 0
    made.kv_holding_waiting = SimpleNamespace(add_request=lambda one: None)
    return made


def test_a_turn_goes_on_from_the_state_that_the_session_holds() -> None:
    """Without steps ahead the state is that of the tokens that vLLM keeps."""
    scheduler = synchronous_scheduler()
    of = scheduler.kv_cache_manager
    one = session(list(range(40)), list(range(500, 520)))
    _, (slot,) = ids(admit(of, one, 40))
    compute(of, one, 32)
    compute(of, one, 40)
    one.append_output_token_ids(900)
    assert of.allocate_slots(one, 1) is not None
    compute(of, one, 41)
    one.append_output_token_ids(901)
    of.drain_commands()

    assert not scheduler._handle_stopped_request(one)
    tokens = [*range(40), 900, *range(500, 520)]
    assert list(one.all_token_ids) == tokens
    assert one.num_computed_tokens == 41
    assert of.allocate_slots(one, 20) is not None
    assert of.get_block_ids("one")[1] == [slot]
    compute(of, one, 61)
    assert of.drain_commands() == [], "the running state is neither copied nor zeroed"

    of.free(one)
    assert nothing_kept(of)
    assert of.get_computed_blocks(plain("two", [*tokens, 1]))[1] == 61
    dropped = [*range(40), 900, 901, 902]
    assert of.get_computed_blocks(plain("three", dropped))[1] == 32


def processor(*, active: bool, asynchronous: bool, drafts: bool = False) -> Any:
    """vLLM's own, without its construction, in such an engine."""
    made: Any = InputProcessor.__new__(InputProcessor)
    made.vllm_config = SimpleNamespace(
        scheduler_config=SimpleNamespace(
            scheduler_cls=SCHEDULER if active else None,
            async_scheduling=asynchronous,
        ),
        speculative_config=object() if drafts else None,
    )
    return made


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the requests that got through to vLLM's own method."""
    names: list[str] = []
    monkeypatch.setattr(
        InputProcessor,
        "process_inputs",
        lambda self, request_id, **more: names.append(request_id),
    )
    patches.patch_sessions()
    return names


def test_sessions_are_refused_where_steps_are_scheduled_ahead(taken: list[str]) -> None:
    """The step in flight at a turn's end has taken the state one token further."""
    with pytest.raises(ConfigError, match="start the server with --no-async-sched"):
        processor(active=True, asynchronous=True).process_inputs("a", resumable=True)
    assert taken == []


def test_sessions_are_refused_where_drafts_are_verified(taken: list[str]) -> None:
    """vLLM would go on from column 0, whatever was accepted at the turn's end."""
    one = processor(active=True, asynchronous=False, drafts=True)
    with pytest.raises(ConfigError, match="only without drafts"):
        one.process_inputs("a", resumable=True)
    assert taken == []


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize(
    ("active", "asynchronous", "resumable"),
    [(True, False, True), (False, True, True), (True, True, False)],
)
def test_all_else_is_taken(
    taken: list[str], active: bool, asynchronous: bool, resumable: bool, drafts: bool
) -> None:
    drafts &= not (active and resumable)
    one = processor(active=active, asynchronous=asynchronous, drafts=drafts)
    one.process_inputs("a", resumable=resumable)
    assert taken == ["a"]
