# SPDX-License-Identifier: Apache-2.0
"""Rows in which drafts are verified: held for every batch that may come, then given.

`test_drafts_traffic` has them under random traffic, on a device that knows its holes.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_plugin.core.cache import HybridCache
from hybrid_plugin.core.commands import Map, Pool, Take, Unmap
from hybrid_plugin.core.memory.elastic import ElasticBroker, PoolBudget
from hybrid_plugin.core.memory.elastic_plan import ElasticPlan, plan_elastic
from hybrid_plugin.core.memory.layout import (
    AttentionGroup,
    CacheLayout,
    StateGroup,
    TooLittleMemoryError,
)
from hybrid_plugin.core.memory.pools import PagePool, SlotPool
from hybrid_plugin.core.memory.scratch import ScratchLayout, ScratchRows
from hybrid_plugin.core.policy.snapshot_positions import SnapshotPolicy
from tests.core.support import NO_SNAPSHOTS, ByMinimum, admit, prefill, span, start

MIB = 1 << 20


@pytest.mark.parametrize(
    ("sequences", "rows"), [(0, 0), (1, 1), (2, 2), (3, 4), (4, 4), (5, 9), (9, 9)]
)
def test_graphs_pad_batches_to_their_sizes(sequences: int, rows: int) -> None:
    layout = ScratchLayout(rows=9, together=1, batches=(1, 2, 4, 16))
    assert layout.padded(sequences) == rows


def test_batches_larger_than_all_graphs_are_not_padded() -> None:
    assert ScratchLayout(rows=9, together=1, batches=(1, 2)).padded(5) == 5


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 20)),
    st.integers(1, 5),
    st.sampled_from(((), (4,), (1, 8, 64))),
)
def test_rows_are_dense_and_those_of_a_batch(
    wanted: list[int], per_granule: int, batches: tuple[int, ...]
) -> None:
    layout = ScratchLayout(rows=20, together=1, batches=batches)
    rows = ScratchRows(layout, per_granule)
    for granule in range(1, rows.ids.granules):
        rows.ids.map(granule)
    for sequences in wanted:
        rows.hold(rows.missing(sequences))
        rows.keep(sequences)
        assert rows.held == max(layout.padded(sequences), 1)
        taken = set(range(1, rows.ids.capacity)) - set(rows.ids.free_ids())
        assert taken == set(range(1, rows.held))


def test_a_batch_without_rows_is_refused() -> None:
    rows = ScratchRows(ScratchLayout(rows=4, together=1), 1)
    with pytest.raises(ValueError, match="2 sequences are verified in 1 rows"):
        rows.keep(2)


# -------------------------------------------------------------------------- a cache


def shared(budget: int = 40, rows: int = 4, **layout: Any) -> HybridCache:
    """Pages of one byte, slots of three and rows of five, over one budget."""
    scratch = ScratchLayout(rows=rows, together=5, **layout)
    budgets = {
        Pool.KV: PoolBudget(1),
        Pool.STATE: PoolBudget(3),
        Pool.SCRATCH: PoolBudget(5),
    }
    return HybridCache(
        PagePool(budget, 1),
        SlotPool(budget // 3, 1),
        4,
        SnapshotPolicy(4, NO_SNAPSHOTS),
        eviction=ByMinimum(),
        broker=ElasticBroker(budget, budgets),
        scratch=ScratchRows(scratch, 1),
    )


def moved(cache: HybridCache, kind: type[Map | Unmap]) -> list[int]:
    """Rows that the queued commands map, or unmap."""
    return [
        granule
        for command in cache.drain_commands()
        if isinstance(command, kind) and command.pool == Pool.SCRATCH
        for granule in command.granules
    ]


def run(cache: HybridCache, seq_id: str, first: int) -> None:
    """Admit a prompt of 8 tokens and compute it."""
    start(cache, seq_id, span(first, first + 8))
    prefill(cache, seq_id, span(first, first + 8))
    assert cache.grow(seq_id, 12) is not None


def verify(cache: HybridCache, seq_ids: str, known: int = 8) -> None:
    """A step of sequences in the rows 0, 1, ..."""
    cache.drain_commands()
    for row, seq_id in enumerate(seq_ids):
        begun = cache.is_verifying(seq_id)
        cache.verify(seq_id, None if begun else known, 2, row=row)


def test_each_admission_holds_a_row_more() -> None:
    cache = shared()
    run(cache, "a", 0)
    assert cache.levels()[Pool.SCRATCH].used == 0  # row 0 is always there
    run(cache, "b", 100)
    run(cache, "c", 200)
    assert cache.levels()[Pool.SCRATCH].used == 2
    assert cache.broker.mapped_bytes()[Pool.SCRATCH] == 15
    cache.finish("b", span(100, 108), 8)
    assert cache.levels()[Pool.SCRATCH].used == 2  # a step may be planned with it
    cache.trim_scratch()
    assert cache.levels()[Pool.SCRATCH].used == 1
    cache.finish("a", span(0, 8), 8)
    cache.finish("c", span(200, 208), 8)
    cache.trim_scratch()
    assert cache.levels()[Pool.SCRATCH].used == 0


def test_rows_of_graphs_are_held_as_well() -> None:
    cache = shared(batches=(1, 4))
    run(cache, "a", 0)
    assert cache.levels()[Pool.SCRATCH].used == 0
    run(cache, "b", 100)
    assert cache.levels()[Pool.SCRATCH].used == 3


def test_no_more_sequences_are_admitted_than_there_are_rows() -> None:
    cache = shared(budget=90, rows=2)
    run(cache, "a", 0)
    run(cache, "b", 100)
    assert admit(cache, "c", span(200, 208)) is None
    assert cache.levels()[Pool.SCRATCH].used == 1


def test_idle_rows_go_to_the_other_pools_before_anything_is_evicted() -> None:
    cache = shared(budget=57)
    for name in "abcd":
        run(cache, name, 100 * ord(name))
    for name in "abcd":
        first = 100 * ord(name)
        cache.finish(name, span(first, first + 8), 8)
    cache.trim_scratch()
    cache.drain_commands()
    cached = cache.levels()[Pool.STATE].cached
    assert cached == 4 and cache.broker.mapped_bytes()[Pool.SCRATCH] == 20
    start(cache, "long", span(0, 60))
    assert cache.levels()[Pool.STATE].cached == cached
    assert cache.stats.pages_evicted == 0
    assert moved(cache, Unmap) and cache.broker.mapped_bytes()[Pool.SCRATCH] < 20


def test_cached_content_makes_way_for_rows() -> None:
    cache = shared(budget=41)
    for number in range(12):
        run(cache, "a", 100 * number)
        cache.finish("a", span(100 * number, 100 * number + 8), 8)
    cache.trim_scratch()
    before = cache.levels()[Pool.STATE].cached
    run(cache, "b", 5000)
    run(cache, "c", 6000)
    run(cache, "d", 7000)
    assert cache.broker.mapped_bytes()[Pool.SCRATCH] == 15
    assert cache.levels()[Pool.STATE].cached < before


def test_a_row_is_held_until_its_state_was_taken() -> None:
    """The first ends while the second is verified behind it, then a prefill runs."""
    cache = shared()
    run(cache, "a", 0)
    run(cache, "b", 100)
    cache.trim_scratch(2)
    verify(cache, "ab")
    cache.accept("a", 0)
    cache.finish("a", span(0, 10))
    cache.trim_scratch()
    assert cache.levels()[Pool.SCRATCH].used == 1, "row 1 may be taken from"
    cache.drain_commands()
    cache.accept("b", 2)
    cache.finish("b", span(100, 110))  # the first accepted draft was a stop
    assert Take(Pool.STATE, 1, 1, 2) in cache._commands
    cache.trim_scratch()
    assert cache.levels()[Pool.SCRATCH].used == 0


def test_a_row_that_another_step_wrote_is_not_held() -> None:
    cache = shared()
    run(cache, "a", 0)
    run(cache, "b", 100)
    run(cache, "c", 200)
    cache.trim_scratch(3)
    verify(cache, "abc")
    for name in "abc":
        cache.accept(name, 0)
    cache.finish("a", span(0, 9))
    cache.finish("b", span(100, 109))
    cache.trim_scratch(1)
    verify(cache, "c")
    cache.trim_scratch(1)
    assert cache.levels()[Pool.SCRATCH].used == 0


def test_sequences_that_ended_since_a_step_was_planned_keep_their_rows() -> None:
    cache = shared()
    run(cache, "a", 0)
    run(cache, "b", 100)
    cache.finish("a", span(0, 8), 8)
    cache.finish("b", span(100, 108), 8)
    cache.trim_scratch(2)
    assert cache.levels()[Pool.SCRATCH].used == 1
    cache.trim_scratch(0)
    assert cache.levels()[Pool.SCRATCH].used == 0
    with pytest.raises(ValueError, match="verified in 1 rows"):
        cache.trim_scratch(2)


# --------------------------------------------------------------------------- the plan


def plan(scratch: ScratchLayout, budget: int = 8 << 30, block: int = 2) -> ElasticPlan:
    layout = CacheLayout(
        page_size=16,
        attention=(AttentionGroup(tuple(f"a{i}" for i in range(12)), 32 << 10),),
        states=(StateGroup(("s",), int(37.69 * MIB)),),
        scratch=scratch,
    )
    return plan_elastic(
        layout, budget, block_bytes=block * MIB, max_model_len=8192, max_sequences=64
    )


@pytest.mark.parametrize("block", [2, 16])
@pytest.mark.parametrize("drafts", [1, 3, 4, 5, 8])
@pytest.mark.parametrize("state", [1 * MIB, 2 * MIB])
def test_granules_of_rows_are_whole_blocks_in_every_tensor(
    drafts: int, block: int, state: int
) -> None:
    layers, windows = 36, 36 * 8192 * (drafts + 2) * 2
    made = plan(
        ScratchLayout(rows=4, apart=(drafts * state,) * layers, together=windows),
        64 << 30,
        block,
    )
    pool, scratch = made.pools[Pool.SCRATCH], made.layout.scratch
    assert scratch is not None and scratch.rows == 4
    for size in {*scratch.apart, scratch.together}:
        assert pool.per_granule * size % (block * MIB) == 0
    assert windows <= scratch.together < windows + block * MIB
    assert pool.per_granule <= math.lcm(drafts * state, block * MIB) // (drafts * state)
    assert made.ids(Pool.SCRATCH) % pool.per_granule == 0
    assert made.ids(Pool.SCRATCH) >= 4


def test_rows_side_by_side_alone_lose_little_to_padding() -> None:
    made = plan(ScratchLayout(rows=64, together=1_700_000))
    scratch = made.layout.scratch
    assert scratch is not None
    assert 1_700_000 <= scratch.together <= 1.1 * 1_700_000


def test_there_are_no_more_rows_than_can_ever_be_used() -> None:
    scratch = ScratchLayout(
        rows=2048, apart=(8 * MIB,) * 36, together=4 * MIB, warm_up_rows=2048
    )
    made = plan(scratch)
    found = made.layout.scratch
    assert found is not None and 20 <= found.rows <= 8192 // (292 + 38)
    pools = made.build()
    assert sum(p.start * p.granule_bytes for p in made.pools.values()) <= made.budget
    assert pools.scratch is not None
    start = made.pools[Pool.SCRATCH].start
    assert pools.scratch.ids.mapped == start == found.rows
    assert made.sequences(16) <= found.rows


def test_a_row_that_does_not_fit_is_refused() -> None:
    with pytest.raises(TooLittleMemoryError, match="for scratch"):
        plan(ScratchLayout(rows=4, apart=(512 * MIB,) * 36))
