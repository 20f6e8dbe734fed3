# SPDX-License-Identifier: Apache-2.0
"""A cap on the snapshots that one path of the tree holds."""

from __future__ import annotations

import pytest

from hybrid_plugin.core.cache import HybridCache
from hybrid_plugin.core.memory.pools import PagePool, SlotPool
from hybrid_plugin.core.policy.eviction import LeastRecentlyUsed
from hybrid_plugin.core.policy.snapshot_positions import SnapshotPolicy
from tests.core.audit import audit
from tests.core.support import NO_SNAPSHOTS, prefill, serve, span, start


def make(cap: int | None) -> HybridCache:
    """Snapshots at the end of every chunk, by plain recency."""
    policy = SnapshotPolicy(4, 1, NO_SNAPSHOTS, 1, max_per_path=cap)
    return HybridCache(
        PagePool(100), SlotPool(50), 4, policy, eviction=LeastRecentlyUsed()
    )


def positions(cache: HybridCache) -> list[int]:
    """Where there are snapshots."""
    return sorted(node.end for node in cache.tree.snapshots())


def chunks(cache: HybridCache, seq_id: str, *ends: int) -> None:
    """Serve a prompt of the last end in chunks, without an answer."""
    tokens = span(0, ends[-1])
    start(cache, seq_id, tokens)
    for end in ends:
        cache.drain_commands()
        cache.advance(seq_id, tokens, end)
    cache.finish(seq_id, tokens, ends[-1])


@pytest.mark.parametrize(
    ("cap", "kept"),
    [(None, [8, 16, 24, 32]), (3, [16, 24, 32]), (1, [32])],
)
def test_the_least_recently_used_of_the_path_goes(
    cap: int | None, kept: list[int]
) -> None:
    cache = make(cap)
    chunks(cache, "a", 8, 16, 24, 32)
    assert positions(cache) == kept
    audit(cache)


def test_its_slots_are_free_again() -> None:
    cache = make(1)
    chunks(cache, "a", 8, 16, 24, 32)
    assert (cache.slots.snapshots, cache.slots.free) == (1, 48)
    assert cache.stats.snapshots_evicted == 3


def test_other_paths_are_not_touched() -> None:
    cache = make(2)
    for first in (0, 100, 200):
        serve(cache, "a", span(first, first + 9))
    assert len(positions(cache)) == 3


def test_one_that_was_used_again_outlives_later_ones() -> None:
    cache = make(3)
    chunks(cache, "a", 8, 16, 24)
    admitted = start(cache, "b", (*span(0, 8), *span(100, 104)))
    assert admitted.hit == 8
    prefill(cache, "b", (*span(0, 8), *span(100, 104)))
    chunks(cache, "c", 32)
    assert 8 in positions(cache) and 16 not in positions(cache)


def test_a_snapshot_that_is_being_read_stays() -> None:
    cache = make(1)
    chunks(cache, "a", 8)
    node = next(cache.tree.snapshots())
    cache.tree.lock(node)
    cache.tree.lock_state(node)
    chunks(cache, "b", 16)
    assert node.snapshot is not None
    cache.tree.unlock_state(node)
    cache.tree.unlock(node)
    assert positions(cache) == [8, 16]
