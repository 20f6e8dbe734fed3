# SPDX-License-Identifier: Apache-2.0
"""Models without attention: snapshots alone, and pages that only number tokens."""

from __future__ import annotations

from typing import Any

import pytest

from hybrid_plugin.core.commands import Copy, Pool
from hybrid_plugin.core.memory.layout import MOST_FREE_PAGES, CacheLayout, StateGroup
from hybrid_plugin.core.tree.radix import Evicted, MambaRadixCache
from tests.core.profiles import SOAK_FACTOR
from tests.core.support import Economical, make_cache, serve, span, start
from tests.core.traffic import Traffic

SLOT = 1 << 10
LAYOUT = CacheLayout(16, (), (StateGroup(("a", "b"), SLOT // 2),))
EPISODES = 6 * SOAK_FACTOR


def test_all_memory_is_for_slots() -> None:
    assert LAYOUT.has_states_alone
    assert (LAYOUT.page_bytes, LAYOUT.slot_bytes) == (0, SLOT)
    sizes = LAYOUT.split(9 * SLOT + 5, max_model_len=100)
    assert sizes.slots == 9
    assert LAYOUT.bytes_of(sizes) == 9 * SLOT
    assert sizes.pages == 9 * 7 + 1, "7 pages of 16 tokens behind each slot"


def test_numbers_of_pages_have_an_end() -> None:
    sizes = LAYOUT.split(1 << 30, max_model_len=1 << 20)
    assert (sizes.slots, sizes.pages) == (1 << 20, MOST_FREE_PAGES)
    one = LAYOUT.split(2 * SLOT, max_model_len=(MOST_FREE_PAGES + 5) * 16)
    assert one.pages == MOST_FREE_PAGES + 6, "the longest sequence always fits"


@pytest.mark.parametrize("page_size", [1, 4])
def test_no_snapshot_goes_for_a_page(
    page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is cached goes for want of slots; for want of pages, what saves nothing."""
    evict = MambaRadixCache.evict_kv
    found: list[Evicted] = []

    def evict_kv(tree: MambaRadixCache, wanted: int = 1) -> Any:
        evicted = evict(tree, wanted)
        if evicted is not None:
            found.append(evicted)
        return evicted

    monkeypatch.setattr(MambaRadixCache, "evict_kv", evict_kv)
    totals = dict.fromkeys(("hit_tokens", "snapshots_evicted", "refusals"), 0)
    for seed in range(EPISODES):
        traffic = Traffic.seeded(seed, page_size, states_alone=True)
        traffic.run(600, check_every=10)
        for name in totals:
            totals[name] += getattr(traffic.engine.cache.stats, name)
    assert all(totals.values()), f"the traffic exercises too little: {totals}"
    assert found, "pages were never short"
    assert not [one for one in found if one.snapshot is not None]


def test_a_hit_inside_a_page_copies_the_state_and_a_page_of_no_bytes() -> None:
    """The device's row of a page is empty, so its copy moves nothing."""
    cache = make_cache(policy=Economical(token_bytes=0))
    serve(cache, "first", span(0, 6))
    cache.drain_commands()
    admission = start(cache, "second", (*span(0, 6), 50, 51))
    assert admission.hit > 4
    copies = [one for one in cache.drain_commands() if isinstance(one, Copy)]
    assert {one.pool for one in copies} == {Pool.KV, Pool.STATE}
