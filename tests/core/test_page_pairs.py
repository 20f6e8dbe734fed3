# SPDX-License-Identifier: Apache-2.0
"""One window page for each KV page, whoever reads it.

That it holds at any time is checked under random traffic too: `audit_pairs`.
"""

from __future__ import annotations

from array import array

import pytest

from hybrid_plugin.core.cache import HybridCache
from hybrid_plugin.core.memory.attention_windows import SlidingWindow
from hybrid_plugin.core.memory.page_pairs import PagePairs
from hybrid_plugin.core.memory.pools import NoSlots, PagePool
from hybrid_plugin.core.memory.window_tables import WindowGroup
from hybrid_plugin.core.policy.snapshot_positions import SnapshotPolicy
from tests.core.audit import audit
from tests.core.support import NO_SNAPSHOTS, ByMinimum, prefill, span, start


def pages(*ids: int) -> array[int]:
    return array("i", ids)


def make() -> tuple[PagePool, PagePairs]:
    pool = PagePool(100)
    return pool, PagePairs(100, pool)


@pytest.mark.parametrize("count", [1, 3, 80], ids=["one", "few", "many"])
def test_pages_allocated_together_are_pairs(count: int) -> None:
    pool, pairs = make()
    kv, windows = pages(*range(10, 10 + count)), pool.allocate(count)
    pairs.begin(kv, windows)
    others = pages(*[99] * count)
    assert pairs.settle(kv, others) == windows


def test_a_pair_ends_when_nobody_refers_to_the_window_page() -> None:
    pool, pairs = make()
    first = pool.allocate(1)
    pairs.begin(pages(10), first)
    pool.release(first)
    others = pool.allocate(2)
    assert others[0] == first[0], "the same id, for other tokens"
    pairs.begin(pages(20, 21), others)
    assert pairs.settle(pages(10), others[1:]) == others[1:]
    # From now on that is the pair, beside the one it had.
    assert pairs.settle(pages(10), others[:1]) == others[1:]
    assert pairs.settle(pages(21), others[:1]) == others[1:]


def test_pairs_outlive_new_ids() -> None:
    pool, pairs = make()
    windows = pool.allocate(3)
    pairs.begin(pages(10, 11, 12), windows)
    pairs.move_pages({11: 31})
    pool.allocate(1)
    target = pool.allocate(1)
    pairs.move_windows({windows[2]: target[0]})
    others = pages(99, 99, 99)
    expected = windows[:2] + target
    assert pairs.settle(pages(10, 31, 12), others) == expected
    pairs.begin(pages(40), windows[2:])  # the id is another one's now
    assert pairs.settle(pages(12), others[:1]) == target


class TestSequences:
    """Two that compute the same tokens side by side."""

    tokens = span(0, 16)

    def cache(self) -> HybridCache:
        return HybridCache(
            PagePool(60),
            NoSlots(),
            4,
            SnapshotPolicy(4, NO_SNAPSHOTS),
            eviction=ByMinimum(),
            windows=(WindowGroup(SlidingWindow(6), PagePool(60)),),
        )

    def run(self, cache: HybridCache) -> None:
        for name in "ab":
            start(cache, name, self.tokens)
            if name == "b":
                cache.pause_at(name, 12)
            prefill(cache, name, self.tokens)

    def test_a_snapshot_gets_the_window_pages_of_its_path(self) -> None:
        cache = self.cache()
        self.run(cache)
        audit(cache)
        first, second = cache.sequence("a"), cache.sequence("b")
        third = start(cache, "c", span(0, 14))
        assert third.hit == 12
        assert third.pages[:3] == first.pages[:3] != second.pages[:3]
        shared = cache.sequence("c").windows[0]
        assert shared.first == 1
        # The first page's pair had left the window before the snapshot was taken.
        assert shared.pages[2] == first.windows[0].pages[2]
        assert shared.pages[1] not in first.windows[0].pages
        audit(cache)

    def test_it_keeps_them_when_their_sequence_ends(self) -> None:
        cache = self.cache()
        self.run(cache)
        kept = cache.sequence("a").windows[0].pages[2]
        cache.finish("a", (), 0)
        start(cache, "c", span(0, 14))
        assert cache.sequence("c").windows[0].pages[2] == kept
        assert cache.windows[0].pages.references(kept) == (1, 1)
        audit(cache)
