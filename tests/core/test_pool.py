# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from hybrid_plugin.core.memory.pools import RESERVED_ID, PagePool, SlotPool


def counts(pool: PagePool) -> tuple[int, int, int]:
    """(in use, reclaimable, free), which must add up."""
    assert pool.in_use + pool.reclaimable + pool.free == pool.usable
    return pool.in_use, pool.reclaimable, pool.free


class TestPages:
    def test_the_reserved_page_is_never_handed_out(self) -> None:
        pool = PagePool(4)
        assert pool.usable == 3
        assert RESERVED_ID not in pool.allocate(3)
        assert pool.free == 0

    def test_lowest_free_id_first(self) -> None:
        pool = PagePool(7)
        assert list(pool.allocate(4)) == [1, 2, 3, 4]
        pool.release([3, 1])
        assert list(pool.allocate(3)) == [1, 3, 5]

    def test_a_shared_page_is_free_after_the_last_release(self) -> None:
        pool = PagePool(4)
        pages = pool.allocate(2)
        pool.share(pages)
        assert pool.references(1) == (2, 0)
        pool.release(pages)
        assert counts(pool) == (2, 0, 1)
        pool.release(pages)
        assert counts(pool) == (0, 0, 3)

    def test_an_adopted_page_outlives_its_sequence(self) -> None:
        pool = PagePool(4)
        pages = pool.allocate(2)
        pool.adopt([1])
        pool.release(pages)
        assert counts(pool) == (0, 1, 2)
        assert pool.references(1) == (0, 1)
        pool.share([1])
        assert counts(pool) == (1, 0, 2)
        pool.drop([1])
        assert counts(pool) == (1, 0, 2)
        pool.release([1])
        assert counts(pool) == (0, 0, 3)

    def test_a_page_in_several_nodes_is_free_after_the_last_drop(self) -> None:
        pool = PagePool(3)
        pool.adopt(pool.allocate(1))
        pool.adopt([1])
        pool.release([1])
        pool.drop([1])
        assert counts(pool) == (0, 1, 1)
        pool.drop([1])
        assert counts(pool) == (0, 0, 2)

    def test_too_many_pages_asked_for(self) -> None:
        pool = PagePool(3)
        with pytest.raises(ValueError, match="3 pages asked for, 2 free"):
            pool.allocate(3)
        assert counts(pool) == (0, 0, 2)

    def test_none_asked_for(self) -> None:
        assert list(PagePool(2).allocate(0)) == []

    @pytest.mark.parametrize("gain", ["share", "adopt"])
    def test_a_free_page_gains_no_reference(self, gain: str) -> None:
        pool = PagePool(3)
        with pytest.raises(ValueError, match="page 2 is free"):
            getattr(pool, gain)([2])

    @pytest.mark.parametrize(
        ("lose", "of"), [("release", "sequence"), ("drop", "tree")]
    )
    def test_no_reference_to_lose(self, lose: str, of: str) -> None:
        pool = PagePool(3)
        with pytest.raises(ValueError, match=f"page 1 has no {of} reference"):
            getattr(pool, lose)([1])

    @pytest.mark.parametrize("capacity", [-1, 0, 1])
    def test_too_small(self, capacity: int) -> None:
        with pytest.raises(ValueError, match="at least 2 pages"):
            PagePool(capacity)


class TestSlots:
    def test_lowest_free_id_first_for_both_owners(self) -> None:
        pool = SlotPool(6)
        assert pool.allocate_running() == 1
        assert pool.allocate_snapshot() == 2
        assert pool.allocate_running() == 3
        pool.free_running(1)
        assert pool.allocate_snapshot() == 1
        pool.free_snapshot(2)
        assert pool.allocate_running() == 2
        assert (pool.running, pool.snapshots, pool.free) == (2, 1, 2)
        assert pool.usable == 5

    def test_donate_and_take_over_move_a_slot(self) -> None:
        pool = SlotPool(3)
        slot = pool.allocate_running()
        pool.donate(slot)
        assert (pool.running, pool.snapshots, pool.free) == (0, 1, 1)
        pool.take_over(slot)
        assert (pool.running, pool.snapshots, pool.free) == (1, 0, 1)

    def test_a_draft_slot_is_promoted_or_given_back(self) -> None:
        pool = SlotPool(6)
        assert pool.allocate_running() == 1
        assert [pool.allocate_draft() for _ in range(3)] == [2, 3, 4]
        pool.promote(3)
        assert pool.draft_ids() == [2, 4]
        assert (pool.running, pool.drafts, pool.snapshots, pool.free) == (1, 2, 1, 1)
        assert (pool.ids.live, pool.ids.cached) == (3, 1)
        pool.free_drafts([4, 2])
        assert (pool.running, pool.drafts, pool.snapshots, pool.free) == (1, 0, 1, 3)
        pool.free_drafts([])

    @pytest.mark.parametrize("move", ["promote", "free_drafts"])
    def test_only_a_draft_slot(self, move: str) -> None:
        pool = SlotPool(3)
        slot = pool.allocate_running()
        with pytest.raises(KeyError):
            getattr(pool, move)([slot] if move == "free_drafts" else slot)

    @pytest.mark.parametrize("move", ["donate", "free_running"])
    def test_only_a_running_slot(self, move: str) -> None:
        pool = SlotPool(3)
        slot = pool.allocate_snapshot()
        with pytest.raises(KeyError):
            getattr(pool, move)(slot)

    @pytest.mark.parametrize("move", ["take_over", "free_snapshot"])
    def test_only_a_snapshot(self, move: str) -> None:
        pool = SlotPool(3)
        slot = pool.allocate_running()
        with pytest.raises(KeyError):
            getattr(pool, move)(slot)

    @pytest.mark.parametrize("allocate", ["allocate_running", "allocate_snapshot"])
    def test_none_free(self, allocate: str) -> None:
        pool = SlotPool(2)
        pool.allocate_running()
        with pytest.raises(ValueError, match="no state slot is free"):
            getattr(pool, allocate)()

    @pytest.mark.parametrize("capacity", [-1, 0, 1])
    def test_too_small(self, capacity: int) -> None:
        with pytest.raises(ValueError, match="at least 2 slots"):
            SlotPool(capacity)
