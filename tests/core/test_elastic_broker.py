# SPDX-License-Identifier: Apache-2.0
"""Who gives memory to whom: the controller on pools whose content is a list."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from hybrid_plugin.core.commands import Command, Map, Pool, Unmap
from hybrid_plugin.core.memory.broker import FixedBroker
from hybrid_plugin.core.memory.elastic import (
    BATCHES_IN_POOL,
    MOVES_IN_BUDGET,
    STEPS_IN_BUDGET,
    ElasticBroker,
    PoolBudget,
)
from hybrid_plugin.core.memory.id_space import IdSpace
from hybrid_plugin.core.policy.costs import MOVE_TOKENS

KV, STATE = Pool.KV, Pool.STATE
SLOT_BYTES = 8
LIFETIME = 2.0
"""Admissions that content is kept."""
REPAID = MOVE_TOKENS / SLOT_BYTES / LIFETIME
"""Difference in worth that repays the move of a slot's memory, and no more."""


@dataclass(slots=True)
class Content:
    """Cached ids of a pool with their worth, in the order of eviction."""

    ids: IdSpace
    cached: list[tuple[int, float]] = field(default_factory=list)
    kept: int = 0
    """Free ids that somebody will take."""

    def fill(self, count: int, worth: float = 0) -> None:
        """Cache so many free ids."""
        taken = self.ids.allocate(count)
        self.ids.to_cached(taken)
        self.cached += [(i, worth) for i in taken]

    def worth(self) -> float | None:
        return self.cached[0][1] if self.cached else None

    def lifetime(self) -> float:
        return LIFETIME

    def evict(self, count: int) -> bool:
        same = [one for one in self.cached if one[1] == self.cached[0][1]]
        count = min(count, len(same))
        gone, self.cached = self.cached[:count], self.cached[count:]
        self.ids.free_cached([i for i, _ in gone])
        return bool(gone)

    def promised(self) -> int:
        return self.kept

    def migrate_granule(self, granule: int) -> None:
        per = self.ids.per_granule
        old = [i for i, _ in self.cached if i // per == granule]
        moved = dict(
            zip(old, self.ids.allocate_outside(granule, len(old)), strict=True)
        )
        self.ids.free_cached(old)
        self.cached = [(moved.get(i, i), worth) for i, worth in self.cached]


class Pools:
    """KV in granules of 4 pages of 1 byte, states in granules of a slot of 8 bytes."""

    def __init__(
        self, budget: int, floors: tuple[int, int] = (1, 1), compacts: bool = True
    ) -> None:
        budgets = {KV: PoolBudget(4, floors[0]), STATE: PoolBudget(8, floors[1])}
        self.controller = ElasticBroker(budget, budgets, compacts=compacts)
        self.commands: list[Command] = []
        self.controller.send_to(self.commands.append)
        self.kv = Content(IdSpace(budget // 4 * 4, 4))
        self.states = Content(IdSpace(budget // 8, 1))
        self.controller.register(KV, self.kv.ids, self.kv)
        self.controller.register(STATE, self.states.ids, self.states)

    def drain(self) -> list[Command]:
        taken = list(self.commands)
        self.commands.clear()
        return taken

    def provide(self, pages: int = 0, slots: int = 0) -> bool:
        """What an admission asks for."""
        return self.controller.provide({KV: pages, STATE: slots})

    @property
    def mapped(self) -> tuple[int, int]:
        """Granules of (KV, states)."""
        return self.kv.ids.mapped, self.states.ids.mapped


def full_pools(compacts: bool = True) -> Pools:
    """5 granules of KV, nothing in them yet, 2 slots, the budget all mapped."""
    pools = Pools(budget=36, compacts=compacts)
    assert pools.provide(slots=1)
    assert pools.provide(pages=19)
    assert pools.mapped == (5, 2) and pools.controller.slack == 0
    pools.drain()
    return pools


def fill(pools: Pools) -> None:
    """Cache pages until the budget is all mapped."""
    while pools.controller.slack >= 4:
        pools.kv.fill(pools.kv.ids.free, worth=0)
        assert pools.provide(pages=1)


# ------------------------------------------------------------- in which order


def test_what_is_free_needs_nothing() -> None:
    pools = Pools(budget=40)
    assert pools.provide(pages=3)
    assert pools.drain() == []


def test_first_what_the_budget_has_left() -> None:
    pools = Pools(budget=40)
    assert pools.controller.slack == 28
    assert pools.provide(pages=8, slots=1)
    assert pools.drain() == [Map(KV, (1, 2)), Map(STATE, (1,))]
    assert pools.controller.slack == 12
    assert pools.controller.mapped_bytes() == {KV: 12, STATE: 16}


def test_then_idle_granules_the_upper_ones() -> None:
    pools = full_pools()
    pools.states.fill(1)
    assert pools.provide(slots=1)
    assert pools.drain() == [Unmap(KV, (3, 4)), Map(STATE, (2,))]
    assert pools.states.ids.cached == 1, "nothing was evicted"


def test_a_pool_with_little_to_spare_keeps_it() -> None:
    pools = full_pools()
    pools.states.fill(1)
    pools.kv.ids.allocate(8)  # 11 pages stay free, and a granule's worth is spare
    assert pools.provide(slots=1)
    assert pools.drain() == []
    assert pools.states.ids.cached == 0


def test_unless_there_is_nothing_else() -> None:
    pools = full_pools()
    pools.states.ids.allocate(1)
    pools.kv.ids.allocate(8)
    assert pools.provide(slots=1)
    assert pools.drain() == [Unmap(KV, (3, 4)), Map(STATE, (2,))]


def test_what_is_promised_is_not_idle() -> None:
    pools = full_pools()
    pools.states.fill(1)
    pools.kv.kept = 8  # of 19 that are free, and 4 are spare
    assert pools.provide(slots=1)
    assert pools.drain() == []
    assert pools.states.ids.cached == 0
    pools.kv.kept = 7
    pools.states.fill(1)
    assert pools.provide(slots=1)
    assert pools.drain() == [Unmap(KV, (3, 4)), Map(STATE, (2,))]


def test_but_it_is_taken_where_there_is_nothing_else() -> None:
    pools = full_pools()
    pools.states.ids.allocate(1)
    pools.kv.kept = 19
    assert pools.provide(slots=1)
    assert pools.drain() == [Unmap(KV, (3, 4)), Map(STATE, (2,))]


@pytest.mark.parametrize("more", [0.0, 0.1], ids=["just", "more"])
def test_then_what_is_worth_so_much_less_that_it_repays_the_move(more: float) -> None:
    pools = full_pools(compacts=False)
    pools.states.fill(1, worth=10)
    pools.kv.fill(12, worth=10 - REPAID - more)
    pools.kv.fill(7, worth=99)
    assert pools.provide(slots=1)
    assert pools.states.ids.cached == (1 if more else 0)
    moved = [Unmap(KV, (1, 2)), Map(STATE, (2,))]
    assert pools.drain() == (moved if more else [])


def test_no_more_of_it_than_is_worth_less() -> None:
    pools = full_pools(compacts=False)
    pools.states.fill(1, worth=10)
    pools.kv.fill(3, worth=0)
    pools.kv.fill(16, worth=10)
    assert pools.provide(slots=1)
    assert pools.states.ids.cached == 0, "one granule of pages makes no slot"
    assert pools.kv.ids.cached == 16


def test_pools_of_about_equal_worth_stay_as_they_are() -> None:
    pools = full_pools()
    for number in range(200):
        pools.states.fill(pools.states.ids.free, number / 2)
        pools.kv.fill(pools.kv.ids.free, number / 2)
        assert pools.provide(pages=3, slots=1)
    assert pools.drain() == []


def test_without_content_of_its_own_a_pool_takes_young_content_too() -> None:
    pools = full_pools(compacts=False)
    pools.states.ids.allocate(1)
    pools.kv.fill(19, worth=9)
    assert pools.provide(slots=1)
    assert pools.mapped == (3, 3)
    assert pools.kv.ids.cached == 7, "no more than two granules were emptied"


def test_a_pool_with_nothing_cached_takes_what_another_needs_least() -> None:
    pools = full_pools()
    pools.states.fill(1, worth=99)
    pools.kv.ids.allocate(12)
    pools.kv.fill(7, worth=1)
    assert pools.provide(pages=8)
    assert pools.drain() == [Unmap(STATE, (1,)), Map(KV, (5,))]
    assert (pools.states.ids.cached, pools.kv.ids.cached) == (0, 0)


def test_a_pool_without_addresses_left_evicts_its_own() -> None:
    pools = Pools(budget=36)
    assert pools.provide(slots=3)
    assert pools.mapped == (1, 4)
    assert not pools.states.ids.lowest_hole()
    pools.states.fill(3, worth=99)
    pools.drain()
    assert pools.provide(slots=1)
    assert pools.drain() == []
    assert pools.states.ids.cached == 2


def test_a_snapshot_takes_what_is_worth_less() -> None:
    pools = full_pools()
    pools.states.fill(1, worth=5)
    pools.kv.ids.allocate(19)
    assert not pools.controller.offer({STATE: 1}, 5)
    assert pools.states.ids.cached == 1
    assert pools.controller.offer({STATE: 1}, 5.1)
    assert pools.states.ids.cached == 0


def test_it_takes_another_pool_s_memory_only_if_that_repays_the_move() -> None:
    pools = full_pools()
    pools.states.ids.allocate(1)
    pools.kv.fill(19, worth=5)
    assert not pools.controller.offer({STATE: 1}, 5 + REPAID)
    assert pools.drain() == [] and pools.kv.ids.cached == 19
    assert pools.controller.offer({STATE: 1}, 5.1 + REPAID)
    assert pools.mapped == (3, 3)


def test_free_bytes_of_any_pool_serve_all_pools() -> None:
    pools = full_pools()
    pools.states.ids.allocate(1)
    assert not pools.controller.must_evict({KV: 10, STATE: 1}), "19 pages are free"
    assert pools.controller.must_evict({KV: 12, STATE: 1})
    pools.kv.fill(19)
    assert pools.controller.must_evict({KV: 1})
    assert not pools.controller.must_evict({KV: 0})


# ---------------------------------------------------------------- what is kept


def test_a_demand_that_does_not_fit_changes_nothing() -> None:
    pools = full_pools()
    pools.states.ids.allocate(1)
    pools.kv.ids.allocate(12)
    pools.kv.fill(7, worth=1)
    assert not pools.controller.fits({STATE: 1})
    assert not pools.provide(slots=1)
    assert pools.drain() == [] and pools.mapped == (5, 2)
    assert pools.kv.ids.cached == 7


def test_both_demands_count_together() -> None:
    pools = full_pools()
    assert pools.controller.fits({KV: 19, STATE: 1})
    assert pools.controller.fits({KV: 11, STATE: 2})
    assert not pools.controller.fits({KV: 12, STATE: 2})
    assert pools.provide(pages=11, slots=2)
    assert (pools.kv.ids.free, pools.states.ids.free) == (11, 2)


def test_pinned_content_does_not_count_as_room() -> None:
    pools = full_pools()
    pools.states.fill(1, worth=1)
    pools.kv.fill(19, worth=1)
    assert pools.controller.fits({KV: 27})
    assert not pools.controller.fits({KV: 27}, {KV: [4]})
    assert pools.controller.fits({KV: 26}, {KV: [4]})
    assert not pools.controller.fits({KV: 27}, {STATE: [1]})
    assert pools.controller.fits({KV: 19}, {STATE: [1]})


def test_live_ids_pin_their_granule() -> None:
    pools = full_pools(compacts=False)
    taken = pools.kv.ids.allocate(19).tolist()
    pools.kv.ids.free_live([i for i in taken if i % 4])  # one page per granule stays
    pools.states.ids.allocate(1)
    assert not pools.controller.fits({STATE: 1})
    pools.kv.ids.free_live([4, 16])
    assert pools.provide(slots=1)
    assert pools.drain() == [Unmap(KV, (1, 4)), Map(STATE, (2,))]


def test_returned_ids_count_as_room_with_their_granules() -> None:
    pools = full_pools()
    pools.states.ids.allocate(1)
    pools.kv.ids.allocate(19)
    fits = pools.controller.fits
    assert not fits({STATE: 1})
    assert fits({STATE: 1}, returned={STATE: [1]})
    assert not fits({STATE: 2}, returned={STATE: [1]})
    assert fits({KV: 8}, returned={STATE: [1]}), "two granules of pages in its memory"
    assert not fits({KV: 9}, returned={STATE: [1]})
    assert not fits({STATE: 1}, returned={KV: [5, 6, 7, 8]}), "no granule as a whole"
    assert fits({STATE: 1}, returned={KV: [*range(4, 12)]})


@pytest.mark.parametrize("free", [0, 2])
def test_returned_ids_are_free_ones_where_nothing_moves(free: int) -> None:
    ids = IdSpace(6)
    broker = FixedBroker()
    broker.register(STATE, ids, Content(ids))
    ids.allocate(5 - free)
    assert broker.fits({STATE: free + 2}, returned={STATE: [1, 2]})
    assert not broker.fits({STATE: free + 3}, returned={STATE: [1, 2]})
    assert not broker.fits({STATE: free + 1}, returned={KV: [1, 2]})


def test_no_pool_goes_below_its_floor() -> None:
    pools = Pools(budget=40, floors=(4, 2))
    assert pools.drain() == [Map(KV, (1, 2, 3)), Map(STATE, (1,))]
    assert pools.provide(slots=2)
    pools.states.ids.allocate(2)
    assert pools.mapped == (4, 3)
    assert not pools.provide(slots=1)
    assert pools.mapped == (4, 3)


def test_floors_that_exceed_the_budget() -> None:
    with pytest.raises(ValueError, match="start with 20 bytes, but the budget is 16"):
        Pools(budget=16, floors=(3, 1))


# ------------------------------------------------------------------ compaction


def test_a_scattered_pool_is_moved_together() -> None:
    pools = full_pools()
    pools.states.ids.allocate(1)
    pools.kv.fill(19, worth=3)
    pools.kv.cached = [one for one in pools.kv.cached if one[0] % 4 == 1]
    pools.kv.ids.free_cached([i for i in range(1, 20) if i % 4 != 1])
    assert pools.kv.ids.idle == 0
    assert pools.provide(slots=1)
    assert pools.kv.ids.cached == 5, "nothing was evicted"
    assert pools.controller.stats.granules_emptied == 2
    assert pools.mapped == (3, 3)


def test_unless_that_is_not_allowed() -> None:
    pools = full_pools(compacts=False)
    pools.states.ids.allocate(1)
    pools.kv.fill(19, worth=3)
    pools.kv.cached = [one for one in pools.kv.cached if one[0] % 4 == 1]
    pools.kv.ids.free_cached([i for i in range(1, 20) if i % 4 != 1])
    assert pools.provide(slots=1)
    assert pools.kv.ids.cached < 5
    assert pools.controller.stats.granules_emptied == 0


# ------------------------------------------------------------------- in steps


def test_memory_moves_in_large_steps() -> None:
    budget = STEPS_IN_BUDGET * 40
    pools = Pools(budget)
    assert pools.provide(pages=4)
    most = budget // MOVES_IN_BUDGET // 4
    assert pools.drain() == [Map(KV, tuple(range(1, 1 + most)))]
    fill(pools)
    assert len(pools.drain()) == 11, "as many at once, then halves, then steps"
    pools.kv.fill(pools.kv.ids.free, worth=0)
    assert pools.provide(slots=1)
    moved = pools.drain()
    assert sum(len(c.granules) for c in moved if isinstance(c, Unmap)) == 10
    assert [c.granules for c in moved if isinstance(c, Map)] == [(1, 2, 3, 4, 5)]


def test_half_of_what_lies_idle_moves_at_once() -> None:
    budget = STEPS_IN_BUDGET * 40
    pools = Pools(budget)
    fill(pools)
    pools.kv.evict(len(pools.kv.cached))
    pools.drain()
    moved: list[list[Command]] = []
    while pools.kv.ids.idle > 1:
        pools.states.fill(pools.states.ids.free, worth=0)
        assert pools.provide(slots=1)
        moved.append(pools.drain())
    unmapped, mapped = moved[0]
    most = budget // MOVES_IN_BUDGET
    assert unmapped == Unmap(KV, tuple(range(1278 - most // 4, 1278)))
    assert mapped == Map(STATE, tuple(range(1, 1 + most // 8)))
    assert len(moved) == 13, "of 128 steps"
    kept = pools.mapped[1] - 1 - pools.states.ids.free
    assert len(pools.states.cached) == kept, "nothing was evicted"


def test_of_what_was_promised_a_step_moves() -> None:
    pools = Pools(STEPS_IN_BUDGET * 40)
    fill(pools)
    pools.kv.evict(len(pools.kv.cached))
    pools.kv.kept = pools.kv.ids.free
    pools.drain()
    assert pools.provide(slots=1)
    assert [len(c.granules) for c in pools.drain() if isinstance(c, Unmap)] == [10]


def test_a_change_of_balance_is_noticed_once() -> None:
    pools = full_pools()
    assert "kv 56% (0 MiB), state 44%" in str(pools.controller.notice())
    assert pools.controller.notice() is None
    pools.states.fill(1)
    assert pools.provide(slots=1)
    assert "kv 33% (0 MiB), state 67%" in str(pools.controller.notice())
    assert pools.controller.notice() is None


def test_commands_need_somewhere_to_go() -> None:
    controller = ElasticBroker(40, {KV: PoolBudget(4, 2)})
    ids = IdSpace(40, 4)
    with pytest.raises(RuntimeError, match="call send_to first"):
        controller.register(KV, ids, Content(ids))


# ---------------------------------------------------------------- what is left


def test_most_is_what_fits_and_no_id_more() -> None:
    pools = Pools(budget=88, floors=(2, 1))
    assert pools.provide(pages=17, slots=4)
    pools.kv.fill(9)
    pools.states.fill(1)
    pools.kv.ids.allocate(5)
    pools.states.ids.allocate(2)
    for pool in (KV, STATE):
        most = pools.controller.max_free(pool)
        assert pools.controller.fits({pool: most})
        assert not pools.controller.fits({pool: most + 1})
    assert pools.controller.max_free(KV) == 4 * 16 - 5 - 1


def test_a_large_pool_evicts_some_at_once() -> None:
    pools = Pools(budget=4 * BATCHES_IN_POOL)
    capacity = 4 * (BATCHES_IN_POOL - 2)  # the states keep the granule that they have
    assert pools.provide(pages=capacity - 1)
    pools.kv.fill(capacity - 1)
    assert pools.kv.ids.free == 0
    assert pools.provide(pages=1)
    assert pools.kv.ids.free == capacity // BATCHES_IN_POOL == 3


def test_what_is_free_fits_whatever_is_pinned() -> None:
    pools = full_pools()
    pools.kv.fill(18)
    everything = {KV: [i for i, _ in pools.kv.cached]}
    assert pools.controller.fits({KV: 1}, everything)
    assert pools.controller.fits({KV: 9}, everything), "with the memory of a slot"
    assert not pools.controller.fits({KV: 10}, everything)
