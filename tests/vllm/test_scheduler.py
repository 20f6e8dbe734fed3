# SPDX-License-Identifier: Apache-2.0
"""The scheduler mix-in over a scheduler that records what happens, and when."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.core.sched.scheduler import Scheduler

from hybrid_plugin.core.commands import Copy, Pool, Zero
from hybrid_plugin.core.policy.eviction import ExpectedSaving
from hybrid_plugin.vllm.scheduler import COMMANDS, HybridScheduler
from tests.vllm.fakes import admit, compute, manager, nothing_kept, request


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Ours without vLLM's construction, with one request that waits."""
    made = HybridScheduler.__new__(HybridScheduler)
    made.kv_cache_manager = manager(pages=40)
    made.waiting = []
    made.requests = {}
    made.num_spec_tokens = 0
    monkeypatch.setattr(
        Scheduler, "_is_blocked_waiting_status", staticmethod(lambda status: False)
    )
    return made


def waits(scheduler: Any, one: Any) -> Any:
    one.status = "waiting"
    scheduler.waiting.append(one)
    scheduler.requests[one.request_id] = one
    return one


def split(scheduler: Any, one: Any, new: int, hit: int = 0) -> int:
    found: int = scheduler._mamba_block_aligned_split(one, new, hit)
    return found


# ------------------------------------------------------------------- the split


def test_a_chunk_ends_at_the_snapshot_position_inside_it(scheduler: Any) -> None:
    one = request("one", 100)
    scheduler.kv_cache_manager.get_computed_blocks(one)
    assert scheduler.kv_cache_manager.front_door.snapshot_positions(one.request_id) == (
        96,
    )
    assert split(scheduler, one, 100) == 96
    assert split(scheduler, one, 96) == 96


def test_a_chunk_that_the_budget_ends_is_cut_to_whole_pages(scheduler: Any) -> None:
    one = request("one", 100)
    scheduler.kv_cache_manager.get_computed_blocks(one)
    assert split(scheduler, one, 50) == 48
    assert split(scheduler, one, 10) == 10, "less than a page is not cut to nothing"


def test_the_split_counts_from_what_is_computed_or_hit(scheduler: Any) -> None:
    one = request("one", 100)
    scheduler.kv_cache_manager.get_computed_blocks(one)
    assert split(scheduler, one, 68, hit=32) == 64
    admit(scheduler.kv_cache_manager, one, 96)
    compute(scheduler.kv_cache_manager, one, 96)
    assert split(scheduler, one, 4) == 4, "the end of a prompt is not cut short"


def test_a_decoding_request_is_not_split(scheduler: Any) -> None:
    one = request("one", 100)
    admit(scheduler.kv_cache_manager, one, 100)
    compute(scheduler.kv_cache_manager, one, 100)
    one.all_token_ids.append(1)
    assert split(scheduler, one, 1) == 1


# -------------------------------------------------------------- order of a step


def test_commands_of_a_step_are_drained_before_its_snapshots(
    scheduler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A snapshot taken by a step is a copy behind it: it travels with the next."""
    one = waits(scheduler, request("one", 100))
    of = scheduler.kv_cache_manager

    def schedule(self: Any) -> Any:
        if of.cache.is_live("one"):
            of.allocate_slots(one, 4)
            step = 4
        else:
            admit(of, one, split(self, one, 100))
            step = 96
        one.num_computed_tokens += step
        return SimpleNamespace(num_scheduled_tokens={"one": step})

    monkeypatch.setattr(Scheduler, "schedule", schedule)
    assert getattr(scheduler.schedule(), COMMANDS) == [Zero(Pool.STATE, 1)]
    assert getattr(scheduler.schedule(), COMMANDS) == [Copy(Pool.STATE, 1, 2)]
    of.free(one)
    assert nothing_kept(of)


def test_a_follower_waits_while_its_leader_computes(
    scheduler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler.kv_cache_manager = of = manager(pages=60, in_batch_prefix_min_tokens=32)
    leader = waits(scheduler, request("leader", 200))
    follower = waits(scheduler, request("follower", 200))
    monkeypatch.setattr(
        Scheduler, "_handle_blocked_waiting_request", lambda self, request: True
    )
    may: list[bool] = []

    def schedule(self: Any) -> Any:
        may.extend(
            self._handle_blocked_waiting_request(one) for one in (leader, follower)
        )
        return SimpleNamespace(num_scheduled_tokens={})

    monkeypatch.setattr(Scheduler, "schedule", schedule)
    scheduler.schedule()
    assert may == [True, False]
    assert of.cache.stats.in_batch_prefix_waits == 1


def test_what_vllm_blocks_stays_blocked(
    scheduler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        Scheduler, "_handle_blocked_waiting_request", lambda self, request: False
    )
    assert not scheduler._handle_blocked_waiting_request(request("one", 40))


def test_preemptions_are_counted(
    scheduler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    dropped: list[Any] = []
    monkeypatch.setattr(
        Scheduler, "_preempt_request", lambda self, one, at: dropped.append((one, at))
    )
    scheduler._preempt_request("one", 1.5)
    assert dropped == [("one", 1.5)]
    assert scheduler.kv_cache_manager.cache.stats.preemptions == 1


# --------------------------------------- where a prompt that hits nothing is cut


@pytest.mark.parametrize(
    ("length", "cuts", "hits"),
    [
        (600, [(), (592,), ()], [0, 0, 592]),
        (2000, [(1488,), (1984,), ()], [0, 1488, 1984]),
    ],
    ids=["short", "long"],
)
def test_a_repeated_prompt_is_cut_where_the_third_one_resumes(
    scheduler: Any, length: int, cuts: list[tuple[int, ...]], hits: list[int]
) -> None:
    """The second sending shows where prompts part, and leaves a snapshot there.

    The first is cut only if the guess where that will be repays the pass: a prompt of
    600 tokens leaves KV and no state inside it.
    """
    scheduler.kv_cache_manager = of = manager(pages=200)
    of.cache.tree.eviction = ExpectedSaving(token_bytes=1, slot_bytes=1)
    found = []
    for name in ("first", "second", "third"):
        one = request(name, length)
        _, hit, _ = of.get_computed_blocks(one)
        positions = of.front_door.snapshot_positions(one.request_id)
        found.append((positions, hit))
        admit(of, one, length - hit)
        for position in (*positions, length):
            compute(of, one, position)
        of.free(one)
    assert found == list(zip(cuts, hits, strict=True))
