# SPDX-License-Identifier: Apache-2.0
"""Snapshots taken while a prompt is computed: where, when and from what."""

from __future__ import annotations

import pytest

from hybrid_plugin.core.cache import HybridCache
from hybrid_plugin.core.commands import SaveInPass
from hybrid_plugin.core.memory.pools import NoSlots, PagePool
from hybrid_plugin.core.policy.snapshot_positions import SnapshotPolicy
from tests.core.audit import audit
from tests.core.elastic import ElasticSetup
from tests.core.support import (
    NO_SNAPSHOTS,
    Economical,
    admission,
    admit,
    make_cache,
    prefill,
    save,
    serve,
    span,
    start,
    state,
    zero,
)

SYSTEM = span(0, 10)


@pytest.mark.parametrize(
    ("start_at", "end", "expected"),
    [(0, 8, 8), (0, 9, 8), (8, 9, 9), (8, 40, 32), (32, 40, 40), (0, 4, 4)],
)
def test_split_at_ends_a_chunk_at_the_next_stop(
    start_at: int, end: int, expected: int
) -> None:
    assert make_cache().chunk_end((8, 32), start_at, end, length=end) == expected


def test_the_second_request_reveals_the_branch_and_the_third_hits_it() -> None:
    cache = make_cache()
    serve(cache, "first", SYSTEM + span(20, 26))
    found = cache.look_up(SYSTEM + span(30, 36))
    assert (found.match.length, found.match.kv_length) == (0, 8)
    assert found.snapshot_positions == (8,)
    serve(cache, "second", SYSTEM + span(30, 36))
    cache.drain_commands()
    got = start(cache, "third", SYSTEM + span(40, 46))
    assert got == admission((1, 2, 5, 6), 4, 8)
    assert cache.drain_commands() == [state(3, 4)]
    audit(cache)


def test_the_copy_runs_behind_the_step_that_reached_the_stop() -> None:
    cache = make_cache()
    serve(cache, "first", SYSTEM + span(20, 26))
    cache.drain_commands()
    tokens = SYSTEM + span(30, 36)
    start(cache, "second", tokens)
    steps = prefill(cache, "second", tokens)
    assert steps == [(8, [zero(2)]), (16, [state(2, 3)])]
    assert cache.snapshot_positions_of("second") == ()


def test_a_pass_keeps_states_at_the_boundaries_inside_it() -> None:
    cache = make_cache(branch=99, prompt_end=99, grid=8)
    serve(cache, "first", span(0, 20) + span(30, 36))
    cache.drain_commands()
    tokens = span(0, 20) + span(40, 56)
    found = cache.look_up(tokens)
    assert (found.match.length, found.match.kv_length) == (16, 20)
    assert found.snapshot_positions == (24, 32)
    start(cache, "second", tokens)
    # One pass, and states at the first and second multiple of 8 behind token 16.
    kept = [state(2, 4), save(4, 0, 5), save(4, 1, 6)]
    assert prefill(cache, "second", tokens) == [(36, kept)]
    assert cache.look_up((*tokens[:33], 99, 99)).match.length == 32
    audit(cache)


def test_a_boundary_is_counted_from_the_start_of_its_pass() -> None:
    cache = make_cache(branch=99, prompt_end=99, grid=8)
    tokens = span(0, 44)
    start(cache, "a", tokens)
    assert cache.look_up(tokens).snapshot_positions == (32, 40)
    assert prefill(cache, "a", tokens, budget=20) == [
        (16, [zero(1)]),
        (32, []),  # at the end of a pass the state is copied, before the next one
        (44, [state(1, 2), save(1, 0, 3)]),
    ]


def test_a_snapshot_evicted_before_its_pass_is_not_written() -> None:
    """Two sequences in one pass, and a single slot beside theirs."""
    cache = make_cache(slots=4, branch=99, prompt_end=99, grid=8)
    for name, first in (("short", 100), ("long", 200)):
        start(cache, name, span(first, first + (10 if name == "short" else 40)))
    cache.drain_commands()
    cache.cross("short", 10)
    assert cache.slots.free == 0
    cache.cross("long", 40)
    kept = cache.drain_commands()
    assert [command.slot for command in kept if isinstance(command, SaveInPass)] == [2]
    audit(cache)


def test_a_chunk_that_misses_the_stop_takes_no_snapshot() -> None:
    cache = make_cache(prompt_end=1)
    start(cache, "a", span(0, 9))
    cache.advance("a", 5)
    cache.advance("a", 9)
    assert cache.slots.snapshots == 0
    assert cache.look_up(span(0, 9)).match.kv_length == 8


def test_the_same_prompt_again_hits_its_prompt_end() -> None:
    cache = make_cache(prompt_end=1)
    serve(cache, "a", span(0, 11), answer=span(60, 65))
    cache.drain_commands()
    assert start(cache, "b", span(0, 11)) == admission((1, 2, 5), 3, 8)
    assert cache.drain_commands() == [state(2, 3)]


def test_a_snapshot_that_is_there_is_not_taken_twice() -> None:
    cache = make_cache(prompt_end=1)
    for seq_id in "ab":
        start(cache, seq_id, span(0, 9))
    assert prefill(cache, "a", span(0, 9))[-1] == (9, [state(1, 3)])
    assert prefill(cache, "b", span(0, 9)) == [(8, []), (9, [])]
    assert cache.stats.snapshots_taken == 1
    audit(cache)


def test_a_tombstone_is_matched_and_snapshotted_again() -> None:
    cache = make_cache(slots=3, prompt_end=1)
    tokens = span(0, 9)
    start(cache, "a", tokens)
    prefill(cache, "a", tokens)
    cache.finish("a", tokens, 10)  # a step in flight: the running state is lost
    serve(cache, "b", span(50, 53))
    assert admit(cache, "c", span(60, 63)) is not None  # costs the snapshot of a
    cache.finish("c", span(60, 63), 0)
    found = cache.look_up(tokens)
    assert (found.match.length, found.match.kv_length) == (0, 8)
    assert found.snapshot_positions == (8,)
    cache.drain_commands()
    got = cache.admit("d", found, num_tokens=9)
    assert got is not None
    prefill(cache, "d", tokens)
    assert cache.look_up(tokens).match.length == 8
    audit(cache)


def test_no_slot_for_a_snapshot_is_no_failure() -> None:
    cache = make_cache(slots=2, prompt_end=1)
    start(cache, "a", span(0, 9))
    assert prefill(cache, "a", span(0, 9)) == [(8, [zero(1)]), (9, [])]
    assert cache.stats.snapshots_taken == 0
    assert cache.look_up(span(0, 9)).match.kv_length == 8
    audit(cache)


def test_a_snapshot_replaces_the_least_recently_used_one() -> None:
    cache = make_cache(slots=4, prompt_end=1)
    serve(cache, "a", span(20, 23))
    serve(cache, "b", span(30, 33))
    tokens = span(0, 9)
    start(cache, "c", tokens)
    cache.drain_commands()
    assert prefill(cache, "c", tokens) == [(8, []), (9, [state(3, 1)])]
    assert cache.look_up(span(20, 24)).match.length == 0
    assert cache.look_up(span(30, 34)).match.length == 3


def test_a_queued_copy_precedes_the_reuse_of_its_source() -> None:
    """The running slot is freed and handed out again before the copy ran."""
    cache = make_cache(slots=3, prompt_end=1)
    tokens = span(0, 9)
    start(cache, "a", tokens)
    cache.drain_commands()
    cache.advance("a", 8)
    cache.finish("a", tokens[:8], 9)
    start(cache, "b", span(50, 55))
    assert cache.drain_commands() == [state(1, 2), zero(1)]


def test_a_look_up_goes_stale_where_its_node_is_split() -> None:
    """Without states a sequence is resumed from inside of a node."""
    cache = HybridCache(PagePool(65), NoSlots(), 4, SnapshotPolicy(4, NO_SNAPSHOTS))
    serve(cache, "a", span(0, 40))
    long = (*span(0, 32), *span(100, 110))
    short = (*span(0, 16), *span(200, 210))
    found, stale = cache.look_up(long), cache.look_up(short)
    cache.admit("b", found, num_tokens=len(long))
    assert not cache.is_current(stale)
    cache.admit("c", cache.look_up(short), num_tokens=len(short))
    audit(cache)


def test_a_look_up_goes_stale() -> None:
    cache = make_cache()
    found = cache.look_up(span(0, 9))
    assert cache.is_current(found)
    serve(cache, "a", span(0, 6))
    assert not cache.is_current(found)
    with pytest.raises(ValueError, match="older than the tree"):
        cache.admit("b", found, num_tokens=9)


def test_a_live_sequence_is_not_admitted_twice() -> None:
    cache = make_cache()
    start(cache, "a", span(0, 9))
    with pytest.raises(ValueError, match="'a' is live already"):
        admit(cache, "a", span(0, 9))


@pytest.mark.parametrize("page_size", [1, 4])
def test_equal_calls_give_equal_commands(page_size: int) -> None:
    def commands() -> list[object]:
        cache = make_cache(pages=9 + 32 // page_size, slots=4, page_size=page_size)
        steps: list[object] = []
        for number in range(6):
            tokens = span(0, 7) + span(20 * number, 20 * number + 5)
            start(cache, "a", tokens)
            steps += prefill(cache, "a", tokens)
            cache.finish("a", tokens, len(tokens))
        return steps

    assert commands() == commands()
    assert len(commands()) > 6


def test_chunk_ends_of_a_long_prompt_are_kept_and_hit() -> None:
    cache = make_cache(chunk_end=8)
    tokens = span(0, 31)
    start(cache, "long", tokens)
    steps = prefill(cache, "long", tokens, budget=9)
    assert [end for end, _ in steps] == [8, 16, 24, 31]
    assert cache.stats.snapshots_taken == 3
    assert cache.look_up(tokens[:20] + span(90, 99)).match.length == 16
    audit(cache)


def test_chunk_ends_before_a_prompt_s_last_one_go_first() -> None:
    cache = make_cache(chunk_end=8, slots=7)
    serve(cache, "older", span(500, 506))
    tokens = span(0, 31)
    start(cache, "long", tokens)
    prefill(cache, "long", tokens, budget=9)
    assert [node.end for node in cache.tree.snapshots()] == [8, 16, 6, 24]
    start(cache, "a", span(600, 605))
    start(cache, "b", span(700, 705))
    assert [node.end for node in cache.tree.snapshots()] == [16, 6, 24]
    audit(cache)


def test_pages_take_the_memory_of_such_chunk_ends_before_that_of_their_own() -> None:
    """Though they are the latest that were used."""
    cache = ElasticSetup(
        pages=60,
        slots=20,
        budget=48,
        slot_bytes=4,
        prompt_end_min=NO_SNAPSHOTS,
        chunk_end_min=8,
        economical=False,
    ).build()
    serve(cache, "older", span(500, 506))
    tokens = span(0, 57)
    start(cache, "long", tokens)
    prefill(cache, "long", tokens, budget=9)
    cache.finish("long", tokens, 57)
    assert [node.end for node in cache.tree.snapshots()] == [24, 32, 40, 6, 48, 57]
    assert cache.pages.free == 0
    start(cache, "next", span(700, 716))
    assert [node.end for node in cache.tree.snapshots()] == [40, 6, 48, 57]
    assert cache.stats.pages_evicted == 0
    audit(cache)


def test_a_chunk_end_that_another_resumed_from_stays() -> None:
    cache = make_cache(chunk_end=8)
    tokens = span(0, 31)
    start(cache, "long", tokens)
    cache.advance("long", 8)
    assert start(cache, "other", tokens[:8] + span(90, 95)).hit == 8
    cache.advance("long", 16)
    cache.advance("long", 24)
    assert [node.end for node in cache.tree.snapshots()] == [16, 8, 24]
    audit(cache)


def test_a_branch_that_another_found_at_a_chunk_end_stays() -> None:
    cache = make_cache(chunk_end=8)
    tokens, other = span(0, 31), span(0, 8) + span(90, 95)
    start(cache, "long", tokens)
    cache.advance("long", 8)
    assert cache.memory.evict_snapshot()
    start(cache, "other", other)
    prefill(cache, "other", other)
    assert [node.end for node in cache.tree.snapshots()] == [8]
    cache.advance("long", 16)
    cache.advance("long", 24)
    assert [node.end for node in cache.tree.snapshots()] == [16, 8, 24]
    audit(cache)


def test_short_lived_ends_do_not_drive_out_a_shared_prompt() -> None:
    """Five slots; the shared prompt is used now and then, the others never."""
    cache = make_cache(pages=200, slots=6, policy=Economical())
    for n in range(3):
        serve(cache, f"shared {n}", SYSTEM + span(20 + 10 * n, 26 + 10 * n))
    for n in range(20):
        serve(cache, f"lone {n}", span(1000 + 20 * n, 1010 + 20 * n))
    assert cache.look_up(SYSTEM + span(90, 96)).match.length == 8
    audit(cache)


def test_the_end_of_a_turn_goes_first_once_the_next_turn_ended() -> None:
    cache = make_cache()
    first, second = span(0, 10), span(0, 20)
    serve(cache, "other", span(500, 506))
    serve(cache, "turn 1", first)
    assert start(cache, "turn 2", second).hit == 10
    cache.finish("turn 2", second, len(second))
    assert [node.end for node in cache.tree.snapshots()] == [10, 6, 20]


def test_the_end_of_a_turn_that_two_went_on_from_stays() -> None:
    cache = make_cache()
    serve(cache, "turn 1", span(0, 10))
    for n in range(2):
        tokens = span(0, 10) + span(100 * n + 100, 100 * n + 110)
        assert start(cache, f"turn 2, {n}", tokens).hit == 10
    for n in range(2):
        tokens = span(0, 10) + span(100 * n + 100, 100 * n + 110)
        cache.finish(f"turn 2, {n}", tokens, len(tokens))
    assert [node.end for node in cache.tree.snapshots()] == [10, 20, 20]
    assert not any(n.snapshot and n.snapshot.is_superseded for n in cache.tree.nodes())


@pytest.mark.parametrize("evicted", [False, True])
def test_a_repeated_prompt_is_split_once_for_the_third_one(evicted: bool) -> None:
    """The second sending hits nothing and is cut where its KV is known to end.

    Whether its state was evicted or lies at its last token makes no difference.
    The third sending resumes there.
    """
    cache = make_cache(branch=8)
    prompt, answer = span(0, 14), span(90, 93)
    positions = []
    for name in ("first", "second", "third"):
        positions.append(cache.look_up(prompt).snapshot_positions)
        serve(cache, name, prompt, answer)
        if name == "first" and evicted:
            assert cache.memory.evict_snapshot()
    assert positions == [(), (12,), ()]
    assert cache.stats.hit_tokens == 12
    audit(cache)
