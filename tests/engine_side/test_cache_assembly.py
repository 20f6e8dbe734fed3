# SPDX-License-Identifier: Apache-2.0
"""The core cache on planned pools: fixed, elastic, with windows, without states."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from hybrid_plugin.config import ConfigError, HybridConfig
from hybrid_plugin.core.memory.attention_windows import SlidingWindow
from hybrid_plugin.core.memory.broker import FixedBroker
from hybrid_plugin.core.memory.elastic import ElasticBroker
from hybrid_plugin.core.memory.layout import (
    AttentionGroup,
    CacheLayout,
    PoolSizes,
    StateGroup,
)
from hybrid_plugin.core.memory.pools import NoSlots
from hybrid_plugin.core.policy.eviction import ExpectedSaving
from hybrid_plugin.engine.cache_assembly import build_cache
from hybrid_plugin.engine.sizing import CachePlan, EngineLimits, divide

LAYOUT = CacheLayout(
    page_size=16,
    attention=(
        AttentionGroup(("a", "b"), 4096),
        AttentionGroup(("w",), 1024, SlidingWindow(40)),
    ),
    states=(StateGroup(("s", "t"), 3000),),
    slot_alignment=1,
)
FIXED = CachePlan(LAYOUT, PoolSizes(64, 6, (40,)))


def test_fixed_pools() -> None:
    cache = build_cache(FIXED, HybridConfig())
    assert isinstance(cache.broker, FixedBroker)
    assert (cache.page_size, cache.pages.capacity, cache.slots.capacity) == (16, 64, 6)
    (group,) = cache.windows
    assert (group.window, group.pages.capacity) == (SlidingWindow(40), 40)


def test_a_model_without_states_has_no_slots() -> None:
    plan = replace(FIXED, layout=replace(LAYOUT, states=()))
    assert isinstance(build_cache(plan, HybridConfig()).slots, NoSlots)


def test_pools_that_share_memory() -> None:
    limits = EngineLimits(max_model_len=512, max_sequences=4, block_bytes=16 << 10)
    log = logging.getLogger(__name__)
    plan = divide(LAYOUT, 4 << 20, HybridConfig(elastic=True), limits, log)
    cache = build_cache(plan, HybridConfig())
    assert isinstance(cache.broker, ElasticBroker)
    assert cache.pages.capacity == plan.sizes.pages > cache.pages.usable + 1
    assert cache.slots.capacity == plan.sizes.slots
    assert [group.pages.capacity for group in cache.windows] == [*plan.sizes.windows]


def test_eviction_knows_what_content_holds() -> None:
    eviction = build_cache(FIXED, HybridConfig()).tree.eviction
    assert isinstance(eviction, ExpectedSaving)
    assert eviction.token_bytes == 2 * 4096 / 16
    # Two states, and the window's 40 tokens: 4 pages where they begin within one.
    assert eviction.slot_bytes == 2 * 3000 + 4 * 1024


@pytest.mark.parametrize(
    ("layout", "inside", "grid"),
    [(LAYOUT, False, 0), (LAYOUT, True, 64), (replace(LAYOUT, states=()), False, 1)],
)
def test_where_a_pass_can_keep_what_a_snapshot_needs(
    layout: CacheLayout, inside: bool, grid: int
) -> None:
    plan = replace(FIXED, layout=layout)
    cache = build_cache(plan, HybridConfig(), keeps_states_inside=inside)
    assert cache.policy.grid == grid


def test_deterministic_caches_hold_canonical_content_or_are_refused() -> None:
    options = HybridConfig(deterministic="prefix")
    layout = replace(LAYOUT, attention=LAYOUT.attention[:1])
    plan = CachePlan(layout, PoolSizes(64, 6, ()))
    assert build_cache(plan, options, keeps_states_inside=True).policy.canonical
    with pytest.raises(ConfigError, match="state layers all run on our kernels"):
        build_cache(plan, options)
    with pytest.raises(ConfigError, match="attention windows"):
        build_cache(FIXED, options, keeps_states_inside=True)
