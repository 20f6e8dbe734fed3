# SPDX-License-Identifier: Apache-2.0
"""The manager on fake requests: which ids it hands out, and what it keeps."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request

from hybrid_plugin.core.commands import Copy, Pool, Zero
from hybrid_plugin.engine.bundle_identity import AdapterNames
from hybrid_plugin.vllm import activation, patches
from hybrid_plugin.vllm.adapters import Adapters
from hybrid_plugin.vllm.hit_checks import HitChecking
from hybrid_plugin.vllm.manager import HybridKVCacheManager
from hybrid_plugin.vllm.requests import VllmRequest
from tests.vllm.fakes import (
    PAGE,
    Tokens,
    admit,
    compute,
    ids,
    image,
    look_up_of,
    manager,
    nothing_kept,
    request,
)

# ----------------------------------------------------------------- adapters


POET = LoRARequest("poet", 7, "/adapters/poet")
IN_PLACE = LoRARequest("poet", 7, "/adapters/poet", load_inplace=True)


@pytest.mark.parametrize("outer", [False, True], ids=["loaded", "lasting names"])
def test_weights_that_are_loaded_in_place_leave_nothing_under_the_old_name(
    outer: bool, tmp_path: Path
) -> None:
    """Who runs goes on with them."""
    (tmp_path / "adapter_model.safetensors").write_bytes(b"weights")
    (tmp_path / "adapter_config.json").write_text("{}")
    of = manager(pages=33)
    of._adapters = Adapters(AdapterNames() if outer else None)
    first, again = (LoRARequest("poet", n, str(tmp_path)) for n in (7, 8))
    old, other = request("old", 65, lora_request=first), request("other", 65, 5000)
    for one in (old, other):
        of.get_computed_blocks(one)
        assert admit(of, one, 65) is not None
        compute(of, one, 65)
    of.adapter_changed(7, in_place=True)
    for one in (old, other):
        one.all_token_ids.extend(range(900, 948))
        assert of.cache.grow(one.request_id, 113) is not None
        compute(of, one, 112)
        of.free(one)
    assert found(of, "b", old.all_token_ids, again) <= 65
    assert found(of, "c", old.all_token_ids, first) == 0
    assert found(of, "d", other.all_token_ids, None) == 112


def found(
    of: HybridKVCacheManager, name: str, tokens: Any, adapter: LoRARequest | None
) -> int:
    """Tokens that a request with these and one more would restore."""
    one = request(name, 1, lora_request=adapter)
    one.all_token_ids = Tokens([*tokens, 7])
    one.num_prompt_tokens = len(one.all_token_ids)
    return of.get_computed_blocks(one)[1]


def core_of(of: HybridKVCacheManager, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What is called of an engine core that has loaded the plugin."""
    monkeypatch.setattr(EngineCore, "add_lora", EngineCore.add_lora)
    monkeypatch.setattr(EngineCore, "remove_lora", EngineCore.remove_lora)
    patches._patch_adapters()
    monkeypatch.setattr(activation, "is_active", lambda config: config == "ours")
    return SimpleNamespace(
        vllm_config="ours",
        scheduler=SimpleNamespace(kv_cache_manager=of),
        model_executor=SimpleNamespace(
            add_lora=lambda adapter: True, remove_lora=lambda number: True
        ),
    )


def serve_poet(of: HybridKVCacheManager) -> None:
    one = request("one", 3 * PAGE, lora_request=POET)
    admit(of, one, 3 * PAGE)
    compute(of, one, 3 * PAGE)
    of.free(one)


def poets_hit(of: HybridKVCacheManager, adapter: LoRARequest = POET) -> int:
    two = request("two", 3 * PAGE + 5, lora_request=adapter)
    return of.get_computed_blocks(two)[1]


def test_an_adapter_never_resumes_from_what_was_under_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of = manager()
    core = core_of(of, monkeypatch)
    serve_poet(of)
    assert poets_hit(of) == 3 * PAGE
    assert poets_hit(of, LoRARequest("poet", 7, "/elsewhere")) == 0
    assert poets_hit(of, LoRARequest("poet", 8, "/adapters/poet")) == 0
    assert EngineCore.add_lora(core, POET), "it is there already"
    assert poets_hit(of) == 3 * PAGE
    assert EngineCore.add_lora(core, IN_PLACE)
    assert poets_hit(of, IN_PLACE) == poets_hit(of) == 0
    serve_poet(of)
    assert poets_hit(of) == 3 * PAGE
    assert EngineCore.remove_lora(core, 7)
    assert poets_hit(of) == 0
    core.vllm_config = "stock"
    serve_poet(of)
    assert EngineCore.add_lora(core, IN_PLACE)
    assert poets_hit(of) == 3 * PAGE


def test_who_waits_is_looked_up_anew_when_its_adapter_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of = manager()
    core = core_of(of, monkeypatch)
    serve_poet(of)
    two = request("two", 3 * PAGE + 5, lora_request=IN_PLACE)
    # Its request was named before: that of the in-place load was the first one.
    shared, hit, _ = of.get_computed_blocks(two)
    assert hit == 3 * PAGE
    EngineCore.add_lora(core, IN_PLACE)
    assert of.allocate_slots(two, 5, hit, shared) is None, "it comes again"
    assert of.get_computed_blocks(two)[1] == 0


# ------------------------------------------------------------ admit and grow


def test_a_cold_request_gets_pages_and_a_zeroed_slot() -> None:
    of = manager()
    one = request("one", 40)
    assert ids(admit(of, one, 40)) == ([1, 2, 3], [1])
    assert of.drain_commands() == [Zero(Pool.STATE, 1)]
    assert of.drain_commands() == []


def test_blocks_of_a_request() -> None:
    of = manager()
    one = request("one", 40)
    assert of.get_blocks("one") is of.empty_kv_cache_blocks
    admit(of, one, 40)
    assert of.get_block_ids("one") == ([1, 2, 3], [1])
    assert of.get_block_ids_for_computed_tokens("one", 0) == ([], [1])
    assert of.get_block_ids_for_computed_tokens("one", 17) == ([1, 2], [1])


def test_growing_hands_out_new_pages_only() -> None:
    of = manager()
    one = request("one", 40)
    admit(of, one, 20)
    compute(of, one, 20)
    assert of.allocate_slots(one, 12) is of.empty_kv_cache_blocks
    assert ids(of.allocate_slots(one, 20)) == ([3], [])
    assert of.get_block_ids("one") == ([1, 2, 3], [1])


def test_growing_beyond_the_pool_is_refused_and_changes_nothing() -> None:
    of = manager(pages=4)
    one = request("one", 200)
    admit(of, one, 48)
    compute(of, one, 48)
    assert of.allocate_slots(one, 1) is None
    assert of.get_block_ids("one") == ([1, 2, 3], [1])


def test_no_room_for_a_second_request() -> None:
    of = manager(pages=5)
    assert admit(of, request("one", 48), 48) is not None
    assert admit(of, request("two", 48, first=1000), 48) is None
    assert not of.cache.is_live("two")


def test_the_whole_sequence_must_fit_where_the_scheduler_says_so() -> None:
    of = manager(pages=5)
    assert admit(of, request("one", 80), 16, full_sequence_must_fit=True) is None
    assert admit(of, request("two", 80), 16) is not None


def test_the_watermark_counts_beside_scheduled_requests_only() -> None:
    of = manager(pages=8, watermark=0.5)
    one = request("one", 64)
    assert admit(of, one, 64, has_scheduled_reqs=True) is None
    assert admit(of, one, 64) is not None


# -------------------------------------------------------------- hits


def test_the_same_prompt_again_restores_its_snapshot() -> None:
    of = manager(pages=12)
    one = request("one", 40)
    admit(of, one, 40)
    compute(of, one, 32)
    assert of.drain_commands() == [Zero(Pool.STATE, 1), Copy(Pool.STATE, 1, 2)]
    compute(of, one, 40)
    of.free(one)
    two = request("two", 41)
    blocks, hit, boundary = of.get_computed_blocks(two)
    assert (ids(blocks), hit, boundary) == (([1, 2], []), 40, 0)
    # The page in the middle of which the hit ends is copied, like the state.
    assert ids(of.allocate_slots(two, 1, hit, blocks)) == ([4], [3])
    assert of.drain_commands() == [Copy(Pool.KV, 3, 4), Copy(Pool.STATE, 1, 3)]


def test_a_stale_look_up_is_repeated() -> None:
    of = manager(pages=12)
    one = request("one", 40)
    blocks, hit, _ = of.get_computed_blocks(one)
    other = request("other", 40, first=1000)
    admit(of, other, 40)
    compute(of, other, 40)
    of.free(other)
    assert not of.cache.is_current(look_up_of(of, "one"))
    assert of.allocate_slots(one, 40, hit, blocks) is not None


def test_a_stale_look_up_with_another_hit_waits_a_step() -> None:
    of = manager(pages=12)
    first = request("first", 40)
    admit(of, first, 40)
    compute(of, first, 40)
    of.free(first)
    again = request("again", 48)
    blocks, hit, _ = of.get_computed_blocks(again)
    assert hit == 40
    assert of.cache.flush()  # what it found is gone
    assert of.allocate_slots(again, 8, hit, blocks) is None
    assert ids(admit(of, again, 48)) == ([1, 2, 3], [1])


def test_usage_counts_the_fuller_pool_and_nothing_cached() -> None:
    of = manager(pages=9, slots=5)
    one = request("one", 64)
    admit(of, one, 64)
    assert of.usage == 4 / 8
    of.free(one)
    assert of.usage == 0


def test_hits_are_counted_for_vllm() -> None:
    of = manager()
    of.record_prefix_cache_stats(request("one", 40), 16)
    stats = of.make_prefix_cache_stats()
    assert stats is not None
    assert (stats.requests, stats.queries, stats.hits) == (1, 40, 16)
    again = of.make_prefix_cache_stats()
    assert again is not None and again.requests == 0


def test_checks_of_hits_are_not_counted_for_vllm() -> None:
    of = manager()
    of.hit_checking = HitChecking(1.0, of.cache.stats)
    client = Request("client", [*range(40)], SamplingParams(max_tokens=1), None)
    of.hit_checking.admitted(client, 32)
    for run in of.hit_checking.begin():
        of.record_prefix_cache_stats(run, 32)
    stats = of.make_prefix_cache_stats()
    assert stats is not None and stats.requests == 0


# ------------------------------------------------- what bypasses the cache


def test_a_request_that_must_not_read_still_writes() -> None:
    of = manager(pages=12)
    one = request("one", 40, skip_reading_prefix_cache=True)
    assert of.get_computed_blocks(one)[1] == 0
    admit(of, one, 40)
    compute(of, one, 40)
    of.free(one)
    assert of.get_computed_blocks(request("two", 41))[1] == 40


def test_a_bypass_keeps_tokens_by_content_like_everything_else() -> None:
    of = manager()
    one = request(
        "one", 40, skip_reading_prefix_cache=True, mm_features=[image("cat", 4, 8)]
    )
    of.get_computed_blocks(one)
    kept = list(look_up_of(of, "one").tokens)
    assert kept == list(VllmRequest(one).tokens())
    assert min(kept) < 0


# ------------------------------------------------- the way of the tokens


def test_tokens_are_read_once_until_they_are_computed() -> None:
    of = manager(pages=5)
    filler = request("filler", 64, first=1000)
    admit(of, filler, 64)
    one = request("one", 60)
    for _ in range(5):  # it waits, and is looked up in each step
        of.plan_in_batch_sharing([one])
        assert admit(of, one, 60) is None
    of.free(filler)
    assert admit(of, one, 60) is not None
    for computed in (16, 32, 48):
        compute(of, one, computed)
    assert one.all_token_ids.whole_reads == 1
    compute(of, one, 60)
    assert not of.cache.sequence("one").prompt


def test_tokens_that_grew_before_a_retry_are_read_again() -> None:
    of = manager(pages=12)
    one = request("one", 40)
    admit(of, one, 40)
    compute(of, one, 40)
    one.all_token_ids = Tokens([*range(40), 7, 8])
    of.free(one)
    one.num_preemptions, one.num_computed_tokens = 1, 0
    of.get_computed_blocks(one)
    assert len(look_up_of(of, "one").tokens) == 42


# ------------------------------------ every way by which vLLM drops a request


def test_abort_while_it_waits() -> None:
    of = manager(pages=4)
    one, two = request("one", 40), request("two", 40)
    of.plan_in_batch_sharing([one, two])
    of.get_computed_blocks(one)
    assert of.front_door.waiting == 2
    of.free(one)
    of.free(two)
    of.plan_in_batch_sharing([])
    assert nothing_kept(of)


def test_abort_between_the_chunks_of_a_prefill() -> None:
    of = manager(pages=12)
    one = request("one", 100)
    admit(of, one, 32)
    compute(of, one, 32)
    of.free(one)
    assert nothing_kept(of)
    # What was computed serves the next one.
    assert of.get_computed_blocks(request("two", 100))[1] == 32


def test_abort_of_a_request_that_others_wait_for() -> None:
    of = manager(pages=40, in_batch_prefix_min_tokens=32)
    leader, follower = request("leader", 200), request("follower", 200)
    of.plan_in_batch_sharing([leader, follower])
    assert of.must_wait(follower) and not of.must_wait(leader)
    of.free(leader)
    of.plan_in_batch_sharing([follower])
    assert not of.must_wait(follower)
    of.free(follower)
    of.plan_in_batch_sharing([])
    assert nothing_kept(of)


def test_preemption_and_resumption() -> None:
    of = manager(pages=12)
    one = request("one", 40)
    admit(of, one, 40)
    compute(of, one, 40)
    of.free(one)  # as `_preempt_request` does, before it resets the count
    one.num_computed_tokens, one.num_preemptions = 0, 1
    one.all_token_ids.append(7)
    assert nothing_kept(of)
    blocks, hit, _ = of.get_computed_blocks(one)
    assert hit == 40
    assert of.allocate_slots(one, 1, hit, blocks) is not None
    of.free(one)
    assert nothing_kept(of)


def promised(of: HybridKVCacheManager) -> list[int]:
    """Positions whose use is promised now."""
    return sorted(
        node.end
        for node in of.cache.tree.nodes()
        if node.snapshot is not None and node.snapshot.promise
    )


def test_a_ttl_by_the_time_of_the_scheduler() -> None:
    now = [1000.0]
    of = manager(pages=12, clock=lambda: now[0])
    one = request("one", 40, extra_args={"hybrid_ttl": 60})
    admit(of, one, 40)
    compute(of, one, 40)
    now[0] = 1100.0
    of.free(one)
    assert promised(of) == [40]
    now[0] = 1160.0
    of.free(request("unknown", 40))
    assert promised(of) == [40], "the time passes with those that are live"
    two = request("two", 8, first=900)
    admit(of, two, 8)
    assert promised(of) == []
    of.free(two)


def test_a_turn_that_nobody_continues() -> None:
    of = manager(pages=12)
    extra = {"hybrid_ttl": 0}
    one = request("one", 40, extra_args=extra, over=False)
    admit(of, one, 40)
    compute(of, one, 40)
    of.free(one)  # preempted
    one.num_computed_tokens, one.num_preemptions, one.over = 0, 1, True
    one.all_token_ids.append(7)
    assert of.get_computed_blocks(one)[1] == 40
    of.free(one)
    two = request("two", 40, first=500, extra_args=extra)
    admit(of, two, 40)
    compute(of, two, 40)
    snapshots = of.cache.slots.snapshots
    of.free(two)
    assert of.cache.slots.snapshots == snapshots
    assert nothing_kept(of)


def test_stop_while_a_step_is_in_flight() -> None:
    """The state has consumed a token that nobody has seen: it is not kept."""
    of = manager(pages=12)
    one = request("one", 40)
    admit(of, one, 40)
    compute(of, one, 40)
    compute(of, one, 41)
    taken = of.cache.slots.snapshots
    of.free(one)
    assert nothing_kept(of)
    assert of.cache.slots.snapshots == taken


def test_reset_with_running_requests_is_refused_until_they_are_preempted() -> None:
    of = manager(pages=12)
    one, waiting = request("one", 40), request("waiting", 40, first=500)
    admit(of, one, 40)
    compute(of, one, 40)
    of.get_computed_blocks(waiting)
    assert not of.reset_prefix_cache()
    of.free(one)
    assert of.reset_prefix_cache()
    assert of.front_door.waiting == 0
    assert of.get_computed_blocks(request("two", 40))[1] == 0
    of.free(waiting)
    of.free(request("two", 40))
    levels = of.cache.levels()
    assert (levels["kv"].cached, levels["state"].cached) == (0, 0)
    assert nothing_kept(of)


def test_freeing_a_request_that_was_never_looked_up() -> None:
    of = manager()
    of.free(request("unknown", 40))
    assert nothing_kept(of)


# ------------------------------------------------- nothing a client sends raises


ANYTHING: list[Any] = [
    None,
    True,
    0,
    -1,
    1.5,
    1e308,
    10**30,
    "",
    "text",
    [],
    [0],
    [10**30],
    [-1],
    [None, {}],
    [[1]],
    {},
    {"a": [1]},
    list(range(240_000)),
]


@pytest.mark.parametrize("value", ANYTHING, ids=range(len(ANYTHING)))
def test_hints_of_any_type(value: Any) -> None:
    keep, ttl = {"hybrid_keep": value}, {"hybrid_ttl": value}
    for extra in (value, keep, {"hybrid_keep": {"x": value}}, ttl, keep | ttl):
        of = manager(pages=12)
        one = request("one", 40, extra_args=extra, cache_salt="salt")
        assert admit(of, one, 40) is not None
        assert all(
            p % PAGE == 0 and p < 40 for p in of.front_door.snapshot_positions("one")
        )
        compute(of, one, 40)
        of.free(one)
        assert nothing_kept(of)


@pytest.mark.parametrize("salt", ANYTHING, ids=range(len(ANYTHING)))
def test_salts_of_any_type(salt: Any) -> None:
    of = manager(pages=12)
    one = request("one", 40, cache_salt=salt)
    of.plan_in_batch_sharing([one, request("two", 40, cache_salt=salt)])
    assert admit(of, one, 40) is not None
    compute(of, one, 40)
    of.free(one)
    assert of.get_computed_blocks(request("three", 41, cache_salt=salt))[1] == 40


def test_a_request_without_sampling_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    of = manager()
    one = request("one", 40)
    monkeypatch.setattr(type(one), "sampling_params", None)
    assert admit(of, one, 40) is not None


@pytest.mark.parametrize("lookahead", [0, 1, 3, 20])
def test_no_page_lies_beyond_the_longest_sequence(lookahead: int) -> None:
    """Workers have a row for as many; and a pool for one of these admits it."""
    longest = 4 * PAGE
    of = manager(pages=5, max_model_len=longest)
    one = request("one", longest - 2)
    blocks, hit, _ = of.get_computed_blocks(one)
    fresh = of.allocate_slots(
        one, longest - 2, hit, blocks, num_lookahead_tokens=lookahead
    )
    assert fresh is not None
    compute(of, one, longest - 2)
    one.all_token_ids.append(1)
    assert of.allocate_slots(one, 1, num_lookahead_tokens=lookahead) is not None
    assert len(of.get_block_ids("one")[0]) == 4
    output = SimpleNamespace(
        num_scheduled_tokens={"one": 1}, scheduled_spec_decode_tokens={}
    )
    cache: Any = SimpleNamespace(foresee_drafts=lambda wanted, growth: growth["one"])
    of.draft_steps._cache = cache
    worth = of.draft_steps.worth_proposing(output, {"one": one}, 3, lookahead)
    assert worth == longest, "as many tokens as there may be, and no more"
