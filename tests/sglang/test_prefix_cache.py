# SPDX-License-Identifier: Apache-2.0
"""SGLang's prefix cache interface: each call on requests, without a model."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("sglang")

from sglang.srt.managers.schedule_batch import release_req
from sglang.srt.mem_cache.common import release_kv_cache
from sglang.srt.runtime_context import get_context

from tests.sglang.fakes import PAGE, Bench, pausing, request

JSON = (
    *("a string", "", 7, -1, 10**30, 0.5, True, False, None, [], [1, 2], ["a"], {}),
    {"hybrid_keep": "x"},
    {"hybrid_keep": 3},
    {"hybrid_keep": {"a": []}},
    {"hybrid_keep": [[1]]},
    {"hybrid_keep": [None, 8]},
    {"hybrid_keep": [-4, 10**30]},
    {"nested": {"hybrid_keep": [8]}},
    [{"hybrid_keep": [8]}],
)


@pytest.fixture(autouse=True)
def configured() -> Iterator[None]:
    with get_context().override_server_args():
        yield


def serve(bench: Bench, rid: str, tokens: list[int], **fields: Any) -> int:
    """Run one request from its admission to its end; returns its hit."""
    req = request(rid, tokens, **fields)
    bench.queue(req)
    assert bench.step() == [rid]
    hit = int(req.prefix_len)
    while req.extend_end < len(tokens):
        assert bench.step() == [rid]
    bench.finish(req)
    return hit


def test_a_request_leaves_what_the_next_one_resumes() -> None:
    bench = Bench()
    assert serve(bench, "a", list(range(10))) == 0
    assert serve(bench, "b", [*range(10), 50, 51]) == 10
    bench.step()
    bench.assert_idle()


def test_a_look_up_changes_nothing() -> None:
    bench = Bench()
    req = request("a", range(10))
    req.init_next_round_input(bench.cache)
    assert not bench.cache.is_live(req)
    bench.assert_idle()


def test_a_stale_look_up_is_made_again() -> None:
    bench = Bench()
    late = request("late", [*range(10), 60, 61])
    late.init_next_round_input(bench.cache)
    assert late.prefix_len == 0
    serve(bench, "other", [90, 91, 92, 93, 94])  # the tree has changed, its hit has not
    assert bench.cache.admit(late, 12)
    assert bench.cache.sequence(late).hit == 0


def test_a_stale_look_up_with_another_hit_waits_for_the_next_step() -> None:
    bench = Bench()
    serve(bench, "first", list(range(10)))
    late = request("late", [*range(10), 60, 61])
    late.init_next_round_input(bench.cache)
    assert late.prefix_len == 10
    bench.cache.reset()
    assert not bench.cache.admit(late, 12)
    bench.queue(late)
    assert bench.step() == ["late"]
    assert late.prefix_len == 0


def test_an_admission_that_is_not_used_gives_all_back() -> None:
    bench = Bench()
    req = request("a", range(10))
    req.init_next_round_input(bench.cache)
    assert bench.cache.admit(req, 10)
    assert bench.core.pages.in_use == 3
    bench.cache.withdraw(req)
    bench.cache.withdraw(req)  # of one that is not live: nothing to do
    bench.assert_idle()


def test_a_prompt_pauses_for_a_snapshot_that_others_resume() -> None:
    bench = Bench()
    first = pausing("first", range(14), at=8)
    bench.queue(first)
    assert bench.step() == ["first"]
    assert first.extend_end == 8
    assert bench.step() == ["first"]
    assert (first.prefix_len, first.extend_end) == (8, 14)
    assert serve(bench, "second", [*range(8), 70, 71, 72]) == 8
    bench.finish(first)
    bench.step()
    bench.assert_idle()


def test_a_retracted_request_begins_anew() -> None:
    bench = Bench()
    req = pausing("a", range(10), at=8)
    bench.queue(req)
    bench.step()
    bench.step()
    release_req(
        req=req,
        remaing_req_count=0,
        req_to_token_pool=bench.rows,
        token_to_kv_pool_allocator=bench.allocator,
        tree_cache=bench.cache,
        hisparse_coordinator=None,
    )
    bench.scheduler.last_batch = None
    bench.assert_idle()
    bench.queue(req)
    assert bench.step() == ["a"]
    assert req.prefix_len == 8  # what it computed was cached


def test_a_request_that_must_not_be_cached_leaves_nothing() -> None:
    bench = Bench()
    serve(bench, "a", list(range(10)), input_embeds=[[0.0]] * 10)
    assert bench.core.pages.reclaimable == 0
    assert serve(bench, "b", list(range(10))) == 0


def test_replaced_embeddings_are_not_cached() -> None:
    # The token ids of such a request say nothing of what it computed.
    bench = Bench()
    req = request("a", range(10))
    req.positional_embed_overrides = object()
    bench.queue(req)
    req.init_next_round_input(bench.cache)
    assert bench.cache.admit(req, 10)
    req.kv.kv_committed_len = 10
    bench.cache.on_release(req, checkpointed=True)
    assert bench.core.pages.reclaimable == 0


def test_two_requests_of_one_id_are_two_sequences() -> None:
    # A client may send an id again while the request that had it is being aborted.
    bench = Bench()
    first, second = request("same", range(10)), request("same", range(40, 52))
    bench.queue(first)
    assert bench.step() == ["same"]
    assert not bench.cache.is_live(second)
    bench.queue(second)
    assert bench.step() == ["same"]
    pages = [set(bench.cache.sequence(req).pages) for req in (first, second)]
    assert not pages[0] & pages[1]
    bench.assert_conserved()
    release_kv_cache(first, bench.cache, checkpoint=False)
    assert bench.cache.is_live(second)


def test_a_flush_with_a_live_request_is_an_error() -> None:
    bench = Bench()
    bench.park(pausing("parked", range(14), at=8))
    with pytest.raises(RuntimeError, match="while parked"):
        bench.cache.reset()


def test_a_flush_forgets() -> None:
    bench = Bench()
    serve(bench, "a", list(range(10)))
    bench.cache.reset()
    assert bench.core.pages.reclaimable == 0
    assert serve(bench, "b", list(range(10))) == 0


def test_a_request_dropped_before_its_admission_is_forgotten() -> None:
    bench = Bench()
    req = request("a", range(10))
    req.init_next_round_input(bench.cache)
    assert bench.cache.front_door.waiting == 1
    bench.scheduler._release_aborted_request(req)
    assert bench.cache.front_door.waiting == 0


@pytest.mark.parametrize("value", JSON, ids=repr)
@pytest.mark.parametrize("field", ["custom_params", "extra_key", "cache_salt", "rid"])
def test_no_value_that_a_client_sends_raises(field: str, value: Any) -> None:
    bench = Bench()
    req = request("a", range(10))
    if field == "custom_params":
        req.sampling_params.custom_params = value
    else:
        setattr(req, field, value)
    bench.queue(req)
    bench.cache.plan_waits(bench.scheduler.waiting_queue)
    bench.step()
    while req.extend_end < 10:
        bench.step()
    bench.finish(req)
    bench.step()
    bench.assert_idle()


def test_namespaces_of_other_types_stay_apart() -> None:
    bench = Bench()
    for number, key in enumerate(("1", 1, [1], "[1]", None)):
        assert serve(bench, str(number), list(range(10)), cache_salt=key) == 0


def test_requests_of_one_node_are_scheduled_side_by_side() -> None:
    bench = Bench()
    a, b = object(), object()
    assert bench.cache.dfs_weight_order([a, b, b, a, b]) == [1, 2, 4, 0, 3]


def test_sizes_add_up_whatever_happens() -> None:
    rng = random.Random(5)
    bench = Bench(pages=30, slots=6, rows=6)
    alive: list[Any] = []
    for number in range(300):
        if rng.random() < 0.5:
            tokens = [rng.randrange(3)] * PAGE + [
                rng.randrange(9) for _ in range(rng.randrange(2, 30))
            ]
            alive.append(pausing(str(number), tokens, at=rng.randrange(0, 30)))
            bench.queue(alive[-1])
        bench.step(chunk=rng.choice([8, 16, 64]))
        bench.assert_conserved()
        for req in [r for r in alive if bench.cache.is_live(r)]:
            whole = req.extend_end == len(req.origin_input_ids)
            if rng.random() < 0.3 and whole:
                bench.finish(req)
                alive.remove(req)
            elif rng.random() < 0.1 and bench.cache.is_parked(req):
                bench.scheduler.waiting_queue.remove(req)
                bench.scheduler._release_aborted_request(req)
                alive.remove(req)
            bench.assert_conserved()
    assert bench.core.stats.snapshots_taken > 20


def test_memory_is_given_back_when_nothing_is_cached() -> None:
    """Commands that a flush leaves behind wait until it is there again."""
    bench = Bench()
    serve(bench, "a", list(range(10)))
    bench.cache.release_memory()
    assert bench.allocator.executor.done[-1:] == ["release"]
    bench.cache.reset()  # SGLang does, behind us
    bench.cache.restore_memory()
    assert bench.allocator.executor.done[-1:] == ["restore"]
    assert serve(bench, "b", list(range(10))) == 0
    bench.step()
    bench.assert_idle()


def test_memory_of_a_live_request_is_not_given_back() -> None:
    bench = Bench()
    bench.queue(request("a", range(10)))
    bench.step()
    with pytest.raises(RuntimeError, match="still hold pages"):
        bench.cache.release_memory()
    assert "release" not in bench.allocator.executor.done
