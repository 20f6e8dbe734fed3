# SPDX-License-Identifier: Apache-2.0
"""Granules of the published models' shapes, and what a budget holds in them."""

from __future__ import annotations

import pytest

from hybrid_plugin.core.commands import Pool
from hybrid_plugin.core.memory.elastic_plan import ElasticPlan, plan_elastic
from hybrid_plugin.core.memory.layout import AttentionGroup, CacheLayout, StateGroup

MIB = 1 << 20
BLOCK = 2 * MIB


def layout(
    layers: int, page_bytes: int, state_bytes: int, page_size: int = 16
) -> CacheLayout:
    """Attention layers, and one state layer for all the states."""
    names = tuple(f"a{i}" for i in range(layers))
    return CacheLayout(
        page_size=page_size,
        attention=(AttentionGroup(names, page_bytes),),
        states=(StateGroup(("s",), state_bytes),),
    )


QWEN3_NEXT = layout(12, 16 * 2 * 2 * 256 * 2, int(37.69 * MIB))
KIMI_LINEAR = layout(7, 16 * 576 * 2, int(41.41 * MIB))
LFM2 = layout(6, 16 * 2 * 8 * 64 * 2, 80 << 10)


def plan(of: CacheLayout, budget: int = 8 << 30, **options: int) -> ElasticPlan:
    wanted = {"max_model_len": 8192, "max_sequences": 64} | options
    return plan_elastic(of, budget, block_bytes=BLOCK, **wanted)


@pytest.mark.parametrize(
    ("of", "pages", "page_granule", "slots", "slot_granule"),
    [
        (QWEN3_NEXT, 64, 24 * MIB, 1, 38 * MIB),
        (KIMI_LINEAR, 1024, 126 * MIB, 1, 42 * MIB),
        (LFM2, 64, 12 * MIB, 128, 10 * MIB),
    ],
    ids=["Qwen3-Next", "Kimi-Linear", "LFM2"],
)
def test_granules_are_whole_blocks_in_every_layer(
    of: CacheLayout, pages: int, page_granule: int, slots: int, slot_granule: int
) -> None:
    made = plan(of)
    assert made.pages_per_granule == pages
    assert made.page_granule_bytes == page_granule
    assert made.slots_per_granule == slots
    assert made.slot_granule_bytes == slot_granule
    for group in of.attention:
        assert pages * group.page_bytes % BLOCK == 0
    assert slot_granule % BLOCK == 0
    assert made.layout.slot_bytes % of.slot_alignment == 0
    assert made.layout.slot_bytes - of.slot_bytes <= of.slot_bytes / 31


def test_a_small_budget_has_small_granules_though_they_are_padded() -> None:
    of = layout(2, 8 << 10, 421 << 10)
    small, large = (
        plan(of, budget, max_model_len=1024) for budget in (16 * MIB, 8 << 30)
    )
    assert (small.slots_per_granule, small.slot_granule_bytes) == (4, 2 * MIB)
    assert large.slots_per_granule > 4
    assert large.layout.slot_bytes < small.layout.slot_bytes


def test_layers_with_pages_of_several_sizes_agree_on_a_granule() -> None:
    of = CacheLayout(
        page_size=16,
        attention=(
            AttentionGroup(("a", "b"), 32 << 10),
            AttentionGroup(("c",), 24 << 10),
        ),
        states=(StateGroup(("s",), MIB),),
    )
    made = plan(of)
    assert made.pages_per_granule == 256
    assert made.page_granule_bytes == 2 * 8 * MIB + 6 * MIB


def test_each_pool_has_ids_for_the_whole_budget() -> None:
    made = plan(QWEN3_NEXT, budget=1000 * MIB)
    assert made.sizes.pages == 1000 // 24 * 64
    assert made.sizes.slots == 1000 // 38


def test_warm_up_has_memory_from_the_start() -> None:
    made = plan(QWEN3_NEXT)
    assert made.start == (1, 53), "a quarter of the budget, not 65 slots"
    assert made.usable_at_start == 53
    small = plan(LFM2, max_sequences=8)
    assert small.start == (1, 1) and small.usable_at_start == 64


def test_pools_are_built_as_planned() -> None:
    made = plan(QWEN3_NEXT, pages_floor=1000, slots_floor=3)
    assert made.floors == (16, 4)
    assert made.start == (16, 53)
    pages, slots, controller = made.build()
    assert (pages.ids.mapped, slots.ids.mapped) == made.start
    assert (pages.usable, slots.usable) == (16 * 64 - 1, 52)
    for pool, ids in ((Pool.KV, pages.ids), (Pool.STATE, slots.ids)):
        assert controller._budgets[pool].granule_bytes % BLOCK == 0
        assert ids.capacity % ids.per_granule == 0


def test_the_longest_sequence_must_fit() -> None:
    longest = (8192 // 16 + 1) // 64 + 1
    least = longest * 24 * MIB + 2 * 38 * MIB
    assert plan(QWEN3_NEXT, budget=least).start == (1, 2)
    with pytest.raises(ValueError, match=f"which takes {least}"):
        plan(QWEN3_NEXT, budget=least - 1)
    with pytest.raises(ValueError, match="cannot hold one sequence of 8192 tokens"):
        plan(QWEN3_NEXT, budget=least, slots_floor=2)


def test_how_many_sequences_fit() -> None:
    made = plan(QWEN3_NEXT, budget=1000 * MIB)
    each = 64 * made.layout.page_bytes + 38 * MIB
    assert made.sequences(1024) == (1000 - 24 - 38) * MIB // each
