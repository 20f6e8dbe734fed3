# SPDX-License-Identifier: Apache-2.0
"""Short of pages or slots: what is evicted, taken over and refused."""

from __future__ import annotations

import pytest

from hybrid_plugin.core.stats import PoolLevel
from tests.core.audit import audit, full_state
from tests.core.support import (
    admission,
    admit,
    grow,
    make_cache,
    page,
    prefill,
    serve,
    span,
    start,
    state,
)


class TestEviction:
    def test_oldest_pages_make_room_for_an_admission(self) -> None:
        cache = make_cache(pages=7)
        serve(cache, "a", span(10, 18))
        serve(cache, "b", span(20, 28))
        assert list(start(cache, "c", span(30, 42)).pages) == [1, 2, 5]
        assert cache.look_up(span(10, 20)).match.kv_length == 0
        assert cache.look_up(span(20, 30)).match.length == 8
        assert cache.stats.pages_evicted == 2
        assert cache.stats.snapshots_evicted == 1
        audit(cache)

    def test_oldest_pages_make_room_for_growth(self) -> None:
        cache = make_cache(pages=5)
        serve(cache, "a", span(10, 18))
        start(cache, "b", span(20, 28))
        assert grow(cache, "b", 9) == [1]
        assert grow(cache, "b", 16) == [2]
        audit(cache)

    def test_pages_of_a_hit_are_kept(self) -> None:
        cache = make_cache(pages=6)
        serve(cache, "a", span(0, 8))
        serve(cache, "b", span(20, 28))
        assert start(cache, "c", span(0, 17)) == admission((1, 2, 3, 4, 5), 2, 8)
        assert cache.look_up(span(20, 30)).match.kv_length == 0
        audit(cache)

    def test_a_state_makes_room_and_leaves_its_pages(self) -> None:
        cache = make_cache(slots=3)
        serve(cache, "a", span(10, 18))
        serve(cache, "b", span(20, 28))
        cache.drain_commands()
        assert start(cache, "c", span(30, 33)).slot == 1
        match = cache.look_up(span(10, 20)).match
        assert (match.length, match.kv_length) == (0, 8)
        assert cache.look_up(span(20, 30)).match.length == 8
        assert cache.stats.snapshots_evicted == 1
        assert cache.stats.pages_evicted == 0

    def test_a_hit_makes_a_snapshot_recent(self) -> None:
        cache = make_cache(slots=4)
        serve(cache, "a", span(10, 18))
        serve(cache, "b", span(20, 28))
        start(cache, "c", span(10, 20))
        start(cache, "d", span(30, 33))
        assert cache.look_up(span(10, 20)).match.length == 8
        assert cache.look_up(span(20, 30)).match.length == 0

    def test_snapshots_never_keep_a_sequence_out(self) -> None:
        cache = make_cache(slots=4)
        for number in range(8):
            serve(cache, f"old {number}", span(20 * number, 20 * number + 8))
        for number in range(3):
            start(cache, f"new {number}", span(500 + 20 * number, 510 + 20 * number))
        assert cache.slots.running == cache.slots.usable
        audit(cache)


class TestLiveSequence:
    """What a live sequence put into the tree is locked like what it hit."""

    def test_its_prefix_is_not_evicted(self) -> None:
        cache = make_cache(pages=8, prompt_end=1)
        tokens = span(0, 9)
        start(cache, "live", tokens)
        prefill(cache, "live", tokens)
        serve(cache, "old", span(20, 28))
        assert list(start(cache, "new", span(40, 56)).pages) == [4, 5, 6, 7]
        assert cache.look_up(tokens).match.length == 8
        assert cache.look_up(span(20, 30)).match.kv_length == 0
        audit(cache)

    def test_its_prefix_is_evicted_once_it_ended(self) -> None:
        cache = make_cache(pages=8)
        serve(cache, "a", span(0, 8))
        serve(cache, "b", span(20, 28))
        assert list(start(cache, "c", span(40, 60)).pages) == [1, 2, 5, 6, 7]
        assert cache.look_up(span(0, 10)).match.kv_length == 0

    def test_pages_of_another_sequence_are_not_locked_in_its_place(self) -> None:
        """They are not in use: whoever put them there may end first."""
        cache = make_cache(pages=7)
        tokens = span(0, 8)
        for seq_id in ("first", "second"):
            start(cache, seq_id, tokens)
        for seq_id in ("first", "second"):
            prefill(cache, seq_id, tokens)
        cache.finish("first", tokens, 8)
        audit(cache)
        assert cache.pages.reclaimable == 2
        assert grow(cache, "second", 24) == [1, 2, 5, 6]
        audit(cache)

    def test_the_lock_moves_on_from_the_hit(self) -> None:
        cache = make_cache(prompt_end=1)
        serve(cache, "first", span(0, 6))
        tokens = span(0, 4) + span(30, 40)
        start(cache, "live", tokens)
        ends = []
        for computed in (10, 12, 14):
            locked = cache.sequence("live").locked
            ends.append(locked.end if locked is not None else 0)
            cache.advance("live", computed)
            audit(cache)
        assert ends == [4, 4, 12]
        cache.finish("live", tokens, 14)
        audit(cache)


class TestTakeOver:
    """The matched snapshot itself is the last resort."""

    def test_slot_of_a_segment(self) -> None:
        cache = make_cache(slots=2)
        serve(cache, "a", span(0, 8))
        cache.drain_commands()
        assert start(cache, "b", span(0, 12)) == admission((1, 2, 3), 1, 8)
        assert cache.drain_commands() == []
        match = cache.look_up(span(0, 12)).match
        assert (match.length, match.kv_length) == (0, 8)
        audit(cache)

    def test_slot_and_page_of_a_tail(self) -> None:
        cache = make_cache(slots=2)
        serve(cache, "a", span(0, 10))
        cache.drain_commands()
        assert start(cache, "b", span(0, 14)) == admission((1, 2, 3, 4), 1, 10)
        assert cache.drain_commands() == []
        assert cache.pages.references(3) == (1, 0)
        audit(cache)
        prefill(cache, "b", span(0, 14))
        cache.finish("b", span(0, 14), 14)
        assert cache.look_up(span(0, 15)).match.length == 14
        audit(cache)

    def test_a_tail_below_the_root(self) -> None:
        cache = make_cache(slots=2)
        serve(cache, "a", span(0, 3), namespace="salt")
        cache.drain_commands()
        assert start(cache, "b", span(0, 6), "salt") == admission((1, 2), 1, 3)
        audit(cache)
        assert list(cache.tree.nodes()) == []
        cache.finish("b", span(0, 6), 6)
        assert cache.look_up(span(0, 7), "salt").match.length == 6
        audit(cache)

    def test_where_only_the_tail_page_is_left(self) -> None:
        """The tail page cannot be evicted while it is the source of a copy."""
        cache = make_cache(pages=4)
        serve(cache, "a", span(0, 6))
        cache.drain_commands()
        assert start(cache, "b", span(0, 12)) == admission((1, 2, 3), 1, 6)
        assert cache.drain_commands() == []
        assert cache.slots.snapshots == 0
        audit(cache)

    def test_another_snapshot_goes_first(self) -> None:
        cache = make_cache(slots=3)
        serve(cache, "a", span(0, 10))
        serve(cache, "b", span(20, 25))
        cache.drain_commands()
        assert start(cache, "c", span(0, 14)) == admission((1, 2, 5, 6), 2, 10)
        assert cache.drain_commands() == [page(3, 5), state(1, 2)]
        assert cache.look_up(span(0, 14)).match.length == 10

    def test_other_pages_go_first(self) -> None:
        cache = make_cache(pages=5)
        serve(cache, "a", span(0, 6))
        serve(cache, "b", span(20, 23))
        cache.drain_commands()
        assert start(cache, "c", span(0, 12)) == admission((1, 3, 4), 2, 6)
        assert cache.drain_commands() == [page(2, 3), state(1, 2)]
        assert cache.look_up(span(20, 30)).match.length == 0
        assert cache.look_up(span(0, 12)).match.length == 6


class TestRefusal:
    @pytest.mark.parametrize(
        ("length", "options"),
        [
            (21, {}),
            (9, {"reserve_tokens": 21}),
            (17, {"watermark_pages": 1}),
        ],
        ids=["too long", "too long later", "too long with spare pages"],
    )
    def test_for_want_of_pages(self, length: int, options: dict[str, int]) -> None:
        cache = make_cache(pages=9)
        serve(cache, "old", span(0, 6))
        start(cache, "live", span(50, 60))
        before = full_state(cache)
        assert admit(cache, "new", span(0, length), **options) is None
        assert full_state(cache) == before
        assert cache.stats.refusals == 1
        assert not cache.is_live("new")

    @pytest.mark.parametrize(
        ("length", "options"),
        [(20, {}), (9, {"reserve_tokens": 20}), (16, {"watermark_pages": 1})],
        ids=["in all", "later", "with spare pages"],
    )
    def test_not_where_the_last_page_does(
        self, length: int, options: dict[str, int]
    ) -> None:
        cache = make_cache(pages=9)
        serve(cache, "old", span(0, 6))
        start(cache, "live", span(50, 60))
        assert admit(cache, "new", span(0, length), **options) is not None
        audit(cache)

    @pytest.mark.parametrize("tokens", [span(0, 9), span(20, 29)], ids=["hit", "cold"])
    def test_for_want_of_a_slot(self, tokens: tuple[int, ...]) -> None:
        cache = make_cache(slots=2)
        serve(cache, "old", span(0, 8))
        start(cache, "live", span(50, 60))
        before = full_state(cache)
        assert admit(cache, "new", tokens) is None
        assert full_state(cache) == before

    def test_keeps_the_order_of_eviction(self) -> None:
        """Asking again and again must not make a prefix look used."""
        cache = make_cache(pages=9)
        serve(cache, "a", span(0, 8))
        serve(cache, "b", span(20, 28))
        start(cache, "live", span(50, 60))
        assert admit(cache, "new", span(0, 30)) is None
        assert grow(cache, "live", 17) == [1, 2]
        assert cache.look_up(span(0, 9)).match.kv_length == 0
        assert cache.look_up(span(20, 29)).match.length == 8

    def test_of_growth(self) -> None:
        cache = make_cache(pages=5)
        start(cache, "a", span(0, 8))
        start(cache, "b", span(20, 28))
        before = full_state(cache)
        assert cache.grow("a", 9) is None
        assert full_state(cache) == before
        assert cache.stats.refusals == 1
        cache.finish("b", span(20, 28), 0)
        assert grow(cache, "a", 9) == [3]

    def test_shared_pages_of_a_hit_do_not_count_as_room(self) -> None:
        cache = make_cache(pages=6)
        serve(cache, "a", span(0, 16))
        start(cache, "live", span(50, 53))
        assert admit(cache, "new", span(0, 17)) is None
        cache.finish("live", span(50, 53), 0)
        assert list(start(cache, "new", span(0, 17)).pages) == [1, 2, 3, 4, 5]


def test_stats_of_a_first_and_a_second_turn() -> None:
    cache = make_cache()
    serve(cache, "a", span(0, 9), answer=span(9, 12))
    serve(cache, "b", span(0, 20))
    assert cache.stats.as_dict() == {
        "queried_tokens": 29,
        "hit_tokens": 11,
        "computed_tokens": 18,
        "resumed_queried_tokens": 0,
        "resumed_hit_tokens": 0,
        "snapshots_taken": 2,
        "interior_snapshots": 0,
        "graph_passes": 0,
        "snapshots_evicted": 0,
        "pages_evicted": 0,
        "refusals": 0,
        "pools_emptied": 0,
        "preemptions": 0,
        "in_batch_prefix_waits": 0,
        "promised_hits": 0,
        "promises_broken": 0,
        "promises_evicted": 0,
        "drafts_lent": 0,
        "drafts_refused": 0,
        "turn_ends_exact": 2,
        "turn_ends_missed": 0,
        "hit_checks": 0,
        "hit_checks_failed": 0,
    }


def test_levels_while_running() -> None:
    cache = make_cache(pages=9, slots=4)
    serve(cache, "a", span(0, 10))
    start(cache, "b", span(0, 14))
    assert cache.levels() == {
        "kv": PoolLevel(4, 1, 3),
        "state": PoolLevel(1, 1, 1),
    }
    assert cache.drain_commands() == [page(3, 4), state(1, 2)]
