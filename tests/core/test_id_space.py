# SPDX-License-Identifier: Apache-2.0
"""Ids by granule, against a model that recounts everything."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from hybrid_plugin.core.memory.id_space import RESERVED_ID, IdSpace
from hybrid_plugin.core.memory.pools import PagePool, SlotPool
from tests.core.profiles import machine_settings


def mapped_space(granules: int, per_granule: int, mapped: int) -> IdSpace:
    space = IdSpace(granules * per_granule, per_granule)
    for granule in range(1, mapped):
        space.map(granule)
    return space


def test_one_granule_by_default() -> None:
    space = IdSpace(5)
    assert (space.granules, space.mapped, space.free) == (1, 1, 4)
    assert space.allocate(4).tolist() == [1, 2, 3, 4]


def test_only_mapped_ids_are_handed_out_lowest_first() -> None:
    space = IdSpace(12, 3)
    assert (space.granules, space.mapped, space.free) == (4, 1, 2)
    assert space.allocate(2).tolist() == [1, 2]
    with pytest.raises(ValueError, match="1 ids asked for, 0 free"):
        space.allocate(1)
    space.map(2)
    space.map(1)
    assert space.allocate(4).tolist() == [3, 4, 5, 6]
    assert space.lowest_hole() == 3
    space.map(3)
    assert space.lowest_hole() is None


def test_an_idle_granule_can_lose_its_memory() -> None:
    space = mapped_space(4, 3, mapped=4)
    ids = space.allocate(6)
    assert (space.idle, space.highest_idle()) == (1, 3)
    space.to_cached(ids[2:5])
    space.free_live(ids[5:])
    assert space.highest_idle() == 3
    space.free_cached(ids[2:5])
    assert space.idle == 3, "granule 0 has the reserved id and two live ones"
    space.unmap(2)
    assert space.free_ids() == [3, 4, 5, 9, 10, 11]
    assert space.allocate(6).tolist() == [3, 4, 5, 9, 10, 11]


@pytest.mark.parametrize("granule", [0, 1, 2], ids=["reserved", "in use", "hole"])
def test_what_is_not_idle_keeps_its_memory(granule: int) -> None:
    space = mapped_space(3, 2, mapped=2)
    space.allocate(2)
    with pytest.raises(ValueError, match="in use or has no memory"):
        space.unmap(granule)


def test_memory_comes_once() -> None:
    with pytest.raises(ValueError, match="granule 0 is mapped already"):
        IdSpace(4, 2).map(0)


def test_granules_of_one_id() -> None:
    space = IdSpace(4, 1)
    assert (space.free, space.idle) == (0, 0), "the reserved granule is never idle"
    space.map(2)
    assert (space.free, space.highest_idle()) == (1, 2)
    assert space.allocate(1).tolist() == [2]
    assert space.pinned_granules == 2


def test_the_emptiest_granule_has_no_live_ids() -> None:
    space = mapped_space(5, 4, mapped=5)
    ids = space.allocate(19)
    space.to_cached(ids)
    assert space.emptiest() == 4, "of equals the highest; 0 is pinned"
    space.free_cached([5, 6, 9, 10, 11])
    assert space.emptiest() == 2
    space.to_live([8])
    assert space.emptiest() == 1
    assert (space.newly_pinned([8, 9]), space.newly_pinned([4, 12, 13])) == (0, 2)


def test_ids_outside_a_granule() -> None:
    space = mapped_space(3, 2, mapped=3)
    taken = space.allocate(5)
    space.to_cached(taken)
    space.free_cached([3, 4])
    assert space.allocate_outside(1, 1).tolist() == [4]
    assert space.free_ids() == [3]
    with pytest.raises(ValueError, match="no 1 free ids outside 1"):
        space.allocate_outside(1, 1)
    assert space.allocate(1).tolist() == [3]


def test_capacity_is_a_whole_number_of_granules() -> None:
    with pytest.raises(ValueError, match="no whole number of granules"):
        IdSpace(5, 2)


def test_cached_pages_move() -> None:
    pool = PagePool(12, 4)
    pool.ids.map(1)
    pages = pool.allocate(7)
    pool.adopt(pages)
    pool.release(pages)
    pool.adopt([6])
    pool.drop([1, 2, 5, 7])
    assert pool.move(1) == {4: 1, 6: 2}
    assert pool.references(2) == (0, 2) and pool.references(6) == (0, 0)
    assert pool.ids.highest_idle() == 1


def test_snapshots_move() -> None:
    pool = SlotPool(6, 2)
    pool.ids.map(1)
    assert pool.allocate_running() == 1
    assert [pool.allocate_snapshot(), pool.allocate_snapshot()] == [2, 3]
    pool.free_running(1)
    with pytest.raises(ValueError, match="no 2 free ids outside 1"):
        pool.move(1)
    pool.free_snapshot(3)
    assert pool.move(1) == {2: 1}
    assert (pool.snapshots, pool.ids.highest_idle()) == (1, 1)
    pool.take_over(1)
    assert (pool.running, pool.free) == (1, 2)


FREE, LIVE, CACHED, HOLE = "free", "live", "cached", "hole"


class SpaceMachine(RuleBasedStateMachine):
    """An id space beside a list that says what each id is."""

    @initialize(granules=st.integers(1, 5), per_granule=st.sampled_from([1, 2, 3, 60]))
    def start(self, granules: int, per_granule: int) -> None:
        granules += per_granule == 1 and granules == 1
        self.space = IdSpace(granules * per_granule, per_granule)
        self.what = [HOLE] * self.space.capacity
        self._fill(0, FREE)
        self.what[RESERVED_ID] = LIVE

    def _ids(self, granule: int) -> range:
        per = self.space.per_granule
        return range(granule * per, (granule + 1) * per)

    def _fill(self, granule: int, what: str) -> None:
        for i in self._ids(granule):
            self.what[i] = what

    def _all(self, what: str) -> list[int]:
        found = [i for i, kind in enumerate(self.what) if kind == what]
        return [i for i in found if i != RESERVED_ID]

    def _granules(self, *kinds: str) -> list[int]:
        return [
            g
            for g in range(self.space.granules)
            if all(self.what[i] in kinds for i in self._ids(g))
        ]

    def _turn(self, ids: list[int], what: str) -> None:
        for i in ids:
            self.what[i] = what

    @rule(count=st.integers(0, 6) | st.integers(40, 130))
    def allocate(self, count: int) -> None:
        free = self._all(FREE)
        if count > len(free):
            with pytest.raises(ValueError, match="ids asked for"):
                self.space.allocate(count)
            return
        assert self.space.allocate(count).tolist() == free[:count]
        self._turn(free[:count], LIVE)

    @rule(data=st.data(), to_free=st.booleans())
    def let_go(self, data: st.DataObject, to_free: bool) -> None:
        ids = self._some(data, LIVE)
        (self.space.free_live if to_free else self.space.to_cached)(ids)
        self._turn(ids, FREE if to_free else CACHED)

    @rule(data=st.data(), to_free=st.booleans())
    def change_cached(self, data: st.DataObject, to_free: bool) -> None:
        ids = self._some(data, CACHED)
        (self.space.free_cached if to_free else self.space.to_live)(ids)
        self._turn(ids, FREE if to_free else LIVE)

    @rule(data=st.data())
    def pinned_by(self, data: st.DataObject) -> None:
        ids = self._some(data, LIVE)
        others = {RESERVED_ID, *self._all(LIVE)} - set(ids)
        pinning = {i // self.space.per_granule for i in ids}
        pinning -= {i // self.space.per_granule for i in others}
        assert self.space.pinned_by(ids) == len(pinning)

    def _some(self, data: st.DataObject, what: str) -> list[int]:
        ids = self._all(what)
        return data.draw(st.lists(st.sampled_from(ids), unique=True)) if ids else []

    @precondition(lambda self: self._granules(HOLE))
    @rule(data=st.data())
    def map(self, data: st.DataObject) -> None:
        granule = data.draw(st.sampled_from(self._granules(HOLE)))
        self.space.map(granule)
        self._fill(granule, FREE)

    @precondition(lambda self: self._granules(FREE))
    @rule(data=st.data())
    def unmap(self, data: st.DataObject) -> None:
        granule = data.draw(st.sampled_from(self._granules(FREE)))
        self.space.unmap(granule)
        self._fill(granule, HOLE)

    @rule(data=st.data(), count=st.integers(0, 3))
    def allocate_outside(self, data: st.DataObject, count: int) -> None:
        granule = data.draw(st.integers(0, self.space.granules - 1))
        free = [i for i in self._all(FREE) if i not in self._ids(granule)]
        if count <= len(free):
            assert self.space.allocate_outside(granule, count).tolist() == free[:count]
            self._turn(free[:count], CACHED)

    @invariant()
    def counts_agree(self) -> None:
        space = self.space
        free, live, cached = (self._all(what) for what in (FREE, LIVE, CACHED))
        assert space.free_ids() == free
        assert (space.free, space.live, space.cached) == (
            len(free),
            len(live),
            len(cached),
        )
        holes, idle = self._granules(HOLE), self._granules(FREE)
        assert space.mapped == space.granules - len(holes)
        assert space.mapped_granules() == [
            g for g in range(space.granules) if g not in holes
        ]
        assert (space.lowest_hole(), space.highest_idle(), space.idle) == (
            min(holes, default=None),
            max(idle, default=None),
            len(idle),
        )
        unpinned = self._granules(FREE, CACHED, HOLE)
        assert space.pinned_granules == space.granules - len(unpinned)
        for granule in range(space.granules):
            assert space.free_in(granule) == len(set(free) & set(self._ids(granule)))
            ids = [i for i in self._ids(granule) if i != RESERVED_ID]
            assert space.newly_pinned(ids) == (granule in unpinned)
        emptiest = space.emptiest()
        held = {
            g: len(set(cached) & set(self._ids(g)))
            for g in unpinned
            if set(cached) & set(self._ids(g))
        }
        assert emptiest in held if held else emptiest is None
        assert emptiest is None or held[emptiest] == min(held.values())


TestSpace = SpaceMachine.TestCase
TestSpace.settings = machine_settings()
