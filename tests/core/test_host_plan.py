# SPDX-License-Identifier: Apache-2.0
"""Host memory is cut into blocks that rows of every size fill well."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_plugin.core.commands import Pool
from hybrid_plugin.core.memory.attention_windows import SlidingWindow
from hybrid_plugin.core.memory.layout import (
    AttentionGroup,
    CacheLayout,
    StateGroup,
    TooLittleMemoryError,
)
from hybrid_plugin.core.memory.pools import NoSlots
from hybrid_plugin.core.tiers.host_plan import HostPlan, plan_host, rows_of

GIB = 1 << 30


def test_a_block_is_a_granule_of_each_pool() -> None:
    plan = HostPlan({Pool.KV: 100, Pool.STATE: 350}, block_bytes=400, blocks=5)
    assert plan.budget == 2000
    assert [plan.rows_per_block(pool) for pool in plan.row_bytes] == [4, 1]
    assert [plan.rows(pool) for pool in plan.row_bytes] == [20, 5]
    assert plan.bytes_of({Pool.KV: 3, Pool.STATE: 1}) == 650


def test_rows_that_divide_the_largest_waste_nothing() -> None:
    plan = plan_host({Pool.KV: 384 << 10, Pool.STATE: 36 << 20}, 64 * GIB)
    assert (plan.block_bytes, plan.rows_per_block(Pool.KV)) == (36 << 20, 96)


def test_a_block_grows_where_the_largest_row_would_waste_much() -> None:
    """Two of the largest in a block of three of the others, not one in two."""
    plan = plan_host({Pool.KV: 200, Pool.STATE: 300}, 100_000)
    assert plan.block_bytes == 600


def test_a_small_tier_has_small_blocks() -> None:
    """Of few blocks, one per pool that is not full is much."""
    assert plan_host({Pool.KV: 200, Pool.STATE: 300}, 1200).block_bytes == 300


@given(
    st.dictionaries(
        st.sampled_from([Pool.STATE, Pool.window(0), Pool.window(1)]),
        st.integers(1, 1 << 26),
    ),
    st.integers(1, 1 << 22),
    st.integers(1, 1 << 36),
)
def test_every_row_fits_and_little_is_wasted(
    others: dict[str, int], page: int, budget: int
) -> None:
    rows = {Pool.KV: page, **others}
    try:
        plan = plan_host(rows, budget)
    except TooLittleMemoryError:
        assert budget < (len(rows) + 1) * 8 * 2 * max(rows.values())
        return
    assert len(rows) < plan.blocks and plan.budget <= budget
    for pool, size in rows.items():
        used = plan.rows_per_block(pool) * size
        assert 0 < used <= plan.block_bytes
        assert plan.block_bytes - used < size


def test_too_little_memory_is_refused() -> None:
    with pytest.raises(TooLittleMemoryError, match="3 blocks of 10"):
        plan_host({Pool.KV: 10, Pool.STATE: 10, Pool.window(0): 10}, 39)


def test_rows_are_those_of_the_layout() -> None:
    layout = CacheLayout(
        page_size=16,
        attention=(
            AttentionGroup(("a", "b"), 1000),
            AttentionGroup(("c",), 300, SlidingWindow(32)),
        ),
        states=(StateGroup(("d", "e", "f"), 512),),
    )
    rows = rows_of(layout)
    assert rows == {Pool.KV: 2000, Pool.window(0): 300, Pool.STATE: 1536}
    pools = plan_host(rows, 1_000_000).build(layout.attention_windows)
    assert [group.window for group in pools.windows] == [SlidingWindow(32)]
    assert pools.slots.needed and pools.broker.slack >= 0


def test_a_model_without_states_has_no_slots() -> None:
    layout = CacheLayout(16, (AttentionGroup(("a",), 1000),), ())
    assert isinstance(plan_host(rows_of(layout), 100_000).build().slots, NoSlots)


def test_a_model_without_attention_is_refused() -> None:
    with pytest.raises(ValueError, match="no full attention"):
        rows_of(CacheLayout(16, (), (StateGroup(("a",), 512),)))


def test_a_block_has_several_rows_of_a_large_tier() -> None:
    """Where all rows are alike, a block of one row would waste as little."""
    rows = {Pool.KV: 576 << 10, Pool.window(0): 576 << 10}
    assert plan_host(rows, 64 * GIB).block_bytes == 16 * (576 << 10)
    assert plan_host(rows, 256 * (576 << 10)).block_bytes == 576 << 10
