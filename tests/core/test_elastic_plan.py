# SPDX-License-Identifier: Apache-2.0
"""Granules of the published models' shapes, and what a budget holds in them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hybrid_plugin.core.commands import Pool
from hybrid_plugin.core.memory.attention_windows import SlidingWindow
from hybrid_plugin.core.memory.elastic_plan import ElasticPlan, plan_elastic
from hybrid_plugin.core.memory.layout import (
    AttentionGroup,
    CacheLayout,
    StateGroup,
    TooLittleMemoryError,
)

KIB, MIB = 1 << 10, 1 << 20
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
    kv, state = made.pools[Pool.KV], made.pools[Pool.STATE]
    assert (kv.per_granule, kv.granule_bytes) == (pages, page_granule)
    assert (state.per_granule, state.granule_bytes) == (slots, slot_granule)
    for group in of.attention:
        assert pages * group.page_bytes % BLOCK == 0
    assert slot_granule % BLOCK == 0
    assert made.layout.slot_bytes % of.slot_alignment == 0
    assert made.layout.slot_bytes - of.slot_bytes <= of.slot_bytes / 31


FALCON_H1 = layout(44, 16 * 2 * 2 * 128 * 2, 24 * MIB)
JAMBA = layout(4, 16 * 2 * 8 * 128 * 2, 24 * MIB)


@pytest.mark.parametrize(
    ("of", "block", "pages", "granule", "padding", "apart"),
    [
        (FALCON_H1, 2 * MIB, 32, 22 * MIB, 0, 88 * MIB),
        (FALCON_H1, 16 * MIB, 256, 176 * MIB, 0, 704 * MIB),
        (QWEN3_NEXT, 2 * MIB, 16, 6 * MIB, 0, 24 * MIB),
        (QWEN3_NEXT, 16 * MIB, 128, 48 * MIB, 0, 192 * MIB),
        (JAMBA, 2 * MIB, 8, 2 * MIB, 0, 8 * MIB),
        # 7 layers of 18 KiB a page would fill 63 blocks exactly.
        (KIMI_LINEAR, 2 * MIB, 16, 2 * MIB, 2 * KIB, 126 * MIB),
    ],
    ids=["Falcon-H1", "Falcon-H1, 16", "Qwen3-Next", "Qwen3-Next, 16", "Jamba", "Kimi"],
)
def test_packed_pages_move_in_smaller_granules(
    of: CacheLayout, block: int, pages: int, granule: int, padding: int, apart: int
) -> None:
    wanted = {"block_bytes": block, "max_model_len": 8192, "max_sequences": 64}
    made = plan_elastic(replace(of, packed=True), 10 << 30, **wanted)
    kv = made.pools[Pool.KV]
    assert (kv.per_granule, kv.granule_bytes) == (pages, granule)
    assert granule % block == 0 and pages * made.layout.page_bytes == granule
    assert made.layout.page_bytes == of.page_bytes + padding
    assert made.layout.page_padding == (padding,)
    assert made.sizes.pages == (10 << 30) // granule * pages
    assert plan_elastic(of, 10 << 30, **wanted).pools[Pool.KV].granule_bytes == apart


def test_packed_windows_are_padded_each_for_itself() -> None:
    """Gemma-like: pages of full attention and of windows fill their own granules."""
    of = CacheLayout(
        page_size=16,
        attention=(
            AttentionGroup(tuple("abcde"), 32 * KIB),
            AttentionGroup(tuple("fghijklmn"), 32 * KIB, SlidingWindow(1024)),
            AttentionGroup(("wide",), 64 * KIB, SlidingWindow(1024)),
            AttentionGroup(("far",), 32 * KIB - 512, SlidingWindow(4096)),
        ),
        states=(),
        packed=True,
    )
    made = plan(of)
    assert of.window_page_bytes == (11 * 32 * KIB, 32 * KIB - 512)
    assert made.layout.page_bytes == 5 * 32 * KIB
    assert made.layout.window_page_bytes == (11 * 32 * KIB, 32 * KIB)
    assert made.layout.page_padding == (0, 0, 512)
    granules = {name: pool.granule_bytes // MIB for name, pool in made.pools.items()}
    assert granules == {Pool.KV: 10, Pool.window(0): 22, Pool.window(1): 2}
    for name, pool in made.pools.items():
        assert pool.per_granule * made.layout.row_bytes[name] == pool.granule_bytes
        assert made.layout.row_bytes[name] % (16 * 128) == 0, "tokens stay aligned"


def test_tokens_of_packed_pages_are_aligned_whatever_they_take() -> None:
    of = replace(layout(3, 48 * 40, 2 * MIB, page_size=48), packed=True)
    made = plan(of, max_model_len=1024)
    assert made.layout.page_bytes % (48 * 128) == 0
    assert made.pools[Pool.KV].granule_bytes % BLOCK == 0
    assert made.layout.page_bytes >= of.page_bytes


def test_packed_pages_start_and_stay_with_less() -> None:
    apart, packed = (
        plan(replace(FALCON_H1, packed=kind), budget=820 * MIB, max_sequences=8)
        for kind in (False, True)
    )
    assert apart.pools[Pool.KV].floor == packed.pools[Pool.KV].floor == 1
    assert start_of(apart)[0] * apart.pools[Pool.KV].granule_bytes == 88 * MIB
    assert start_of(packed)[0] * packed.pools[Pool.KV].granule_bytes == 22 * MIB
    assert (apart.sequences(8192), packed.sequences(8192)) == (1, 2)


def test_a_small_budget_has_small_granules_though_they_are_padded() -> None:
    of = layout(2, 8 << 10, 421 << 10)
    small, large = (
        plan(of, budget, max_model_len=1024) for budget in (16 * MIB, 8 << 30)
    )
    state = small.pools[Pool.STATE]
    assert (state.per_granule, state.granule_bytes) == (4, 2 * MIB)
    assert large.pools[Pool.STATE].per_granule > 4
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
    assert made.pools[Pool.KV].per_granule == 256
    assert made.pools[Pool.KV].granule_bytes == 2 * 8 * MIB + 6 * MIB


def test_each_pool_has_ids_for_the_whole_budget() -> None:
    made = plan(QWEN3_NEXT, budget=1000 * MIB)
    assert made.sizes.pages == 1000 // 24 * 64
    assert made.sizes.slots == 1000 // 38


def test_warm_up_has_memory_from_the_start() -> None:
    made = plan(QWEN3_NEXT)
    assert start_of(made) == (1, 53), "a quarter of the budget, not 65 slots"
    assert made.usable_at_start == 53
    small = plan(LFM2, max_sequences=8)
    assert start_of(small) == (1, 1) and small.usable_at_start == 64


def test_warm_up_of_one_sequence_has_memory_whatever_it_costs() -> None:
    tight = plan(QWEN3_NEXT, budget=512 * MIB)
    assert tight.usable_at_start == 3, "a quarter of the budget"
    assert plan(QWEN3_NEXT, budget=512 * MIB, warm_up_ids=8).usable_at_start == 9


def start_of(made: ElasticPlan) -> tuple[int, ...]:
    """Granules of each pool that have memory from the start."""
    return tuple(pool.start for pool in made.pools.values())


def test_pools_are_built_as_planned() -> None:
    made = plan(QWEN3_NEXT, max_sequences=64)
    assert start_of(made) == (1, 53)
    pools = made.build()
    assert (pools.pages.ids.mapped, pools.slots.ids.mapped) == start_of(made)
    assert (pools.pages.usable, pools.slots.usable) == (64 - 1, 52)
    for pool, ids in ((Pool.KV, pools.pages.ids), (Pool.STATE, pools.slots.ids)):
        assert pools.broker._budgets[pool].granule_bytes % BLOCK == 0
        assert ids.capacity % ids.per_granule == 0


def test_a_third_page_group_is_one_more_entry() -> None:
    window = AttentionGroup(("w0", "w1"), 16 << 10, SlidingWindow(1024))
    of = replace(QWEN3_NEXT, attention=(*QWEN3_NEXT.attention, window))
    made = plan(of, max_sequences=8)
    assert list(made.pools) == [Pool.KV, Pool.window(0), Pool.STATE]
    third = made.pools[Pool.window(0)]
    assert (third.per_granule, third.granule_bytes) == (128, 4 * MIB)
    pools = made.build()
    assert [group.window for group in pools.windows] == [SlidingWindow(1024)]
    assert made.sizes.windows == ((8 << 30) // (4 * MIB) * 128,)
    each = made.layout.slot_bytes + 65 * 32 * KIB + 64 * made.layout.page_bytes
    assert made.layout.sequence_bytes(1024) == each - 32 * KIB


def test_a_model_without_states_has_no_pool_of_slots() -> None:
    of = CacheLayout(
        page_size=16,
        attention=(
            AttentionGroup(("a",), 32 << 10),
            AttentionGroup(("w",), 32 << 10, SlidingWindow(64)),
        ),
        states=(),
    )
    made = plan(of)
    assert list(made.pools) == [Pool.KV, Pool.window(0)]
    assert not made.build().slots.needed


def test_the_longest_sequence_must_fit() -> None:
    longest = (8192 // 16 + 1) // 64 + 1
    least = longest * 24 * MIB + 2 * 38 * MIB
    assert start_of(plan(QWEN3_NEXT, budget=least)) == (1, 2)
    with pytest.raises(TooLittleMemoryError, match=f"which takes {least}"):
        plan(QWEN3_NEXT, budget=least - 1)


def test_how_many_sequences_fit() -> None:
    made = plan(QWEN3_NEXT, budget=1000 * MIB)
    each = 64 * made.layout.page_bytes + 38 * MIB
    assert made.sequences(1024) == (1000 - 24 - 38) * MIB // each
