# SPDX-License-Identifier: Apache-2.0
"""What one sequence leaves behind and the next one gets: ids and commands."""

from __future__ import annotations

import pytest

from hybrid_plugin.core.cache import HybridCache
from hybrid_plugin.core.stats import PoolLevel
from tests.core.audit import audit
from tests.core.support import (
    admission,
    grow,
    make_cache,
    page,
    prefill,
    serve,
    span,
    start,
    state,
    zero,
)


class TestColdSequence:
    def test_gets_the_lowest_ids_and_a_cleared_slot(self) -> None:
        cache = make_cache()
        assert start(cache, "a", span(0, 10)) == admission((1, 2, 3), 1, 0)
        assert cache.drain_commands() == [zero(1)]
        assert cache.drain_commands() == []
        assert cache.is_live("a")
        assert cache.live == 1

    def test_covers_a_first_chunk_and_grows(self) -> None:
        cache = make_cache()
        assert list(start(cache, "a", span(0, 30), num_tokens=8).pages) == [1, 2]
        assert grow(cache, "a", 8) == []
        assert grow(cache, "a", 3) == []
        assert grow(cache, "a", 9) == [3]
        assert grow(cache, "a", 17) == [4, 5]
        assert list(cache.sequence("a").pages) == [1, 2, 3, 4, 5]

    def test_prefilling_ends_with_the_prompt(self) -> None:
        cache = make_cache()
        start(cache, "a", span(0, 10))
        cache.advance("a", 6)
        assert cache.is_prefilling("a")
        assert cache.sequence("a").in_tree == 0
        cache.advance("a", 10)
        assert not cache.is_prefilling("a")
        assert cache.sequence("a").in_tree == 10
        cache.advance("a", 11)
        assert cache.look_up(span(0, 10)).match.kv_length == 8


class TestTurnEnd:
    @pytest.mark.parametrize("length", range(1, 14))
    @pytest.mark.parametrize("page_size", [1, 4, 16])
    def test_donates_at_any_length(self, page_size: int, length: int) -> None:
        cache = make_cache(page_size=page_size)
        serve(cache, "a", span(0, length))
        audit(cache)
        match = cache.look_up(span(0, length + 1)).match
        assert match.length == length
        assert tuple(match.pages) == span(1, length // page_size + 1)
        assert (match.tail_page is None) == (length % page_size == 0)
        assert cache.stats.snapshots_taken == 1

    def test_the_next_turn_recomputes_one_token_at_most(self) -> None:
        cache = make_cache()
        serve(cache, "turn 1", span(0, 9), answer=span(50, 54))
        history = span(0, 9) + span(50, 54)
        got = start(cache, "turn 2", history + span(60, 65))
        # 12 of 13 tokens: nobody computed the state behind the last one.
        assert got == admission((1, 2, 3, 4, 5), 2, 12)
        assert cache.drain_commands()[-1] == state(1, 2)

    def test_a_hit_inside_a_page_copies_the_page_before_the_state(self) -> None:
        cache = make_cache()
        serve(cache, "a", span(0, 10))
        cache.drain_commands()
        got = start(cache, "b", span(0, 17))
        assert got == admission((1, 2, 4, 5, 6), 2, 10)
        assert cache.drain_commands() == [page(3, 4), state(1, 2)]

    def test_a_tail_before_the_first_whole_page(self) -> None:
        cache = make_cache()
        serve(cache, "a", span(0, 3))
        cache.drain_commands()
        assert start(cache, "b", span(0, 6)) == admission((2, 3), 2, 3)
        assert cache.drain_commands() == [page(1, 2), state(1, 2)]
        audit(cache)

    def test_a_hit_at_a_page_end_copies_no_page(self) -> None:
        cache = make_cache()
        serve(cache, "a", span(0, 8))
        cache.drain_commands()
        assert start(cache, "b", span(0, 12)) == admission((1, 2, 3), 2, 8)
        assert cache.drain_commands() == [state(1, 2)]

    def test_never_restores_all_tokens(self) -> None:
        cache = make_cache()
        serve(cache, "a", span(0, 8))
        assert cache.look_up(span(0, 8)).match.length == 0
        assert cache.look_up(span(0, 9)).match.length == 8
        assert cache.look_up(span(0, 9), limit=7).match.length == 0

    def test_an_equal_end_keeps_the_snapshot_that_is_there(self) -> None:
        cache = make_cache()
        serve(cache, "a", span(0, 3))
        serve(cache, "b", span(0, 3))
        audit(cache)
        assert cache.levels() == {
            "kv": PoolLevel(0, 1, 31),
            "state": PoolLevel(0, 1, 7),
        }

    def test_pages_that_the_tree_has_already_are_given_back(self) -> None:
        cache = make_cache()
        for seq_id in "ab":
            start(cache, seq_id, span(0, 9))
        for seq_id in "ab":
            prefill(cache, seq_id, span(0, 9))
            cache.finish(seq_id, span(0, 9), 9)
        assert list(cache.look_up(span(0, 10)).match.pages) == [1, 2]
        assert (cache.pages.reclaimable, cache.pages.free) == (3, 29)
        audit(cache)


class TestEarlyEnd:
    def test_abort_in_mid_prefill_donates_what_is_computed(self) -> None:
        cache = make_cache()
        start(cache, "a", span(0, 30), num_tokens=16)
        cache.advance("a", 10)
        cache.finish("a", span(0, 30), 10)
        audit(cache)
        assert cache.look_up(span(0, 30)).match.length == 10

    def test_abort_before_the_first_step_leaves_nothing(self) -> None:
        cache = make_cache()
        start(cache, "a", span(0, 9), "salt")
        cache.finish("a", span(0, 9), 0)
        audit(cache)
        assert cache.pages.free == cache.pages.usable
        assert cache.slots.free == cache.slots.usable

    def test_abort_of_a_hit_before_its_first_step(self) -> None:
        cache = make_cache()
        serve(cache, "a", span(0, 10))
        start(cache, "b", span(0, 17))
        cache.finish("b", span(0, 17), 10)
        audit(cache)
        assert (cache.slots.snapshots, cache.slots.running) == (1, 0)
        assert cache.pages.reclaimable == 3

    def test_a_step_in_flight_with_an_unseen_token_spoils_the_state(self) -> None:
        cache = make_cache()
        start(cache, "a", span(0, 10))
        prefill(cache, "a", span(0, 10))
        cache.grow("a", 11)
        cache.finish("a", span(0, 10), 11)
        audit(cache)
        match = cache.look_up(span(0, 12)).match
        assert (match.length, match.kv_length) == (0, 8)
        assert cache.slots.free == cache.slots.usable
        assert (cache.pages.reclaimable, cache.pages.in_use) == (2, 0)

    def test_that_leaves_no_empty_namespace(self) -> None:
        cache = make_cache()
        start(cache, "a", span(0, 2), "salt")
        prefill(cache, "a", span(0, 2))
        cache.finish("a", span(0, 2), 3)
        audit(cache)
        assert list(cache.tree.nodes()) == []

    def test_known_but_not_computed_tokens_do_not_count(self) -> None:
        cache = make_cache()
        serve(cache, "a", span(0, 5), answer=span(5, 9))
        assert cache.look_up(span(0, 20)).match.length == 8

    def test_preempted_sequence_resumes_from_its_own_snapshot(self) -> None:
        cache = make_cache()
        start(cache, "a", span(0, 10))
        prefill(cache, "a", span(0, 10))
        cache.grow("a", 13)
        cache.finish("a", span(0, 14), 13)
        cache.drain_commands()
        got = start(cache, "a", span(0, 14), resumed=True)
        assert got == admission((1, 2, 3, 5), 2, 13)
        assert cache.drain_commands() == [page(4, 5), state(1, 2)]
        assert cache.stats.queried_tokens == 10
        assert cache.stats.hit_tokens == 0
        assert cache.stats.resumed_queried_tokens == 14
        assert cache.stats.resumed_hit_tokens == 13


class TestKeptOut:
    def test_an_uncacheable_sequence_leaves_no_trace(self) -> None:
        cache = make_cache(prompt_end=1)
        found = cache.bypass(span(0, 9))
        assert found.snapshot_positions == ()
        assert cache.admit("a", found, num_tokens=9, cacheable=False) is not None
        prefill(cache, "a", span(0, 9))
        assert not cache.is_prefilling("a")
        audit(cache)
        assert list(cache.tree.nodes()) == []
        cache.finish("a", span(0, 9), 9)
        audit(cache)
        assert list(cache.tree.nodes()) == []
        assert cache.pages.free == cache.pages.usable

    def test_an_uncacheable_sequence_takes_no_snapshot(self) -> None:
        cache = make_cache(prompt_end=1)
        start(cache, "a", span(0, 9), cacheable=False)
        assert prefill(cache, "a", span(0, 9)) == [(8, [zero(1)]), (9, [])]
        assert cache.slots.snapshots == 0

    def test_bypass_reads_nothing_but_may_be_read(self) -> None:
        cache = make_cache()
        serve(cache, "a", span(0, 9), namespace="salt")
        found = cache.bypass(span(0, 12), "salt")
        got = cache.admit("b", found, num_tokens=12)
        assert got == admission((4, 5, 6), 2, 0)
        prefill(cache, "b", span(0, 12))
        cache.finish("b", span(0, 12), 12)
        audit(cache)
        assert cache.look_up(span(0, 13)).match.length == 0
        assert cache.look_up(span(0, 13), "salt").match.length == 12

    def test_namespaces_share_nothing(self) -> None:
        cache = make_cache()
        serve(cache, "a", span(0, 9), namespace="adapter")
        assert cache.look_up(span(0, 10)).match.kv_length == 0
        assert cache.look_up(span(0, 10), "adapter").match.length == 9


class TestFlush:
    def test_refused_while_a_sequence_lives(self) -> None:
        cache = make_cache()
        serve(cache, "a", span(0, 9))
        start(cache, "b", span(0, 12))
        assert cache.flush() is False
        assert cache.look_up(span(0, 12)).match.length == 9

    def test_forgets_everything(self) -> None:
        cache: HybridCache = make_cache()
        serve(cache, "a", span(0, 9))
        serve(cache, "b", span(0, 5) + span(40, 49), namespace="salt")
        assert cache.flush() is True
        audit(cache)
        assert cache.pages.free == cache.pages.usable
        assert cache.slots.free == cache.slots.usable
        assert cache.look_up(span(0, 9)).match.kv_length == 0
