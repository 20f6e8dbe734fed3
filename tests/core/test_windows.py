# SPDX-License-Identifier: Apache-2.0
"""Groups of attention layers with different spans, exactly."""

from __future__ import annotations

import pytest

from hybrid_plugin.core.cache import HybridCache
from hybrid_plugin.core.commands import Copy, Pool, Zero
from hybrid_plugin.core.memory.attention_windows import (
    FULL_ATTENTION,
    AttentionWindow,
    ChunkedLocal,
    SlidingWindow,
    live_pages,
)
from hybrid_plugin.core.memory.layout import AttentionGroup, CacheLayout, StateGroup
from hybrid_plugin.core.memory.pools import NoSlots, PagePool, SlotPool
from hybrid_plugin.core.memory.window_tables import WindowGroup
from hybrid_plugin.core.policy.snapshot_positions import SnapshotPolicy
from tests.core.audit import audit
from tests.core.support import NO_SNAPSHOTS, prefill, serve, span, start


def make(
    *spans: AttentionWindow,
    page_size: int = 4,
    pages: int = 60,
    window_pages: int = 60,
    states: bool = False,
    chunk_end: int = NO_SNAPSHOTS,
) -> HybridCache:
    return HybridCache(
        PagePool(pages),
        SlotPool(9) if states else NoSlots(),
        page_size,
        SnapshotPolicy(page_size, 1, NO_SNAPSHOTS, chunk_end, 0.0),
        windows=tuple(WindowGroup(s, PagePool(window_pages)) for s in spans),
    )


def held(cache: HybridCache, seq_id: str, group: int = 0) -> list[int]:
    """Indices of the pages that a sequence holds in a window group."""
    pages = cache.sequence(seq_id).windows[group].pages
    return [index for index, page in enumerate(pages) if page]


class TestPublishedExamples:
    """Of vLLM's design document on hybrid KV caches, and of Gemma 3."""

    def test_10_full_and_20_with_a_window_of_32(self) -> None:
        """Pages of 16 and 112 tokens: 7 pages of full attention, 2 of windows."""
        cache = make(SlidingWindow(32), SlidingWindow(32), page_size=16)
        tokens = span(0, 112)
        start(cache, "a", tokens)
        prefill(cache, "a", tokens)
        assert len(cache.sequence("a").pages) == cache.pages.in_use == 7
        for group in (0, 1):
            assert held(cache, "a", group) == [5, 6]
            assert cache.windows[group].pages.in_use == 2
        audit(cache)

    def test_10_full_and_52_with_a_window_need_no_padding_layers(self) -> None:
        """Each group counts by its own layers, whatever the other has."""
        layout = CacheLayout(
            page_size=16,
            attention=(
                AttentionGroup(tuple(f"full.{i}" for i in range(10)), 4096),
                AttentionGroup(
                    tuple(f"window.{i}" for i in range(52)), 4096, SlidingWindow(1024)
                ),
            ),
            states=(),
        )
        assert layout.page_bytes == 10 * 4096
        assert layout.attention_windows == (SlidingWindow(1024),)
        assert layout.window_page_bytes == (52 * 4096,)
        budget = 1 << 30
        sizes = layout.split(budget, max_model_len=8192, chunk=2048)
        taken = sizes.pages * 10 * 4096 + sizes.windows[0] * 52 * 4096
        assert layout.bytes_of(sizes) == taken
        assert budget - 10 * 4096 < taken <= budget

    def test_layers_that_share_kv_own_nothing(self) -> None:
        """They are in no group, so that they take no bytes."""
        owner = AttentionGroup(("owner",), 4096)
        state = StateGroup(("s",), 512)
        layout = CacheLayout(16, (owner,), (state,))
        assert layout.page_bytes == 4096


class TestSpans:
    @pytest.mark.parametrize(
        ("what", "position", "first"),
        [
            (FULL_ATTENTION, 100, 0),
            (SlidingWindow(1), 100, 100),
            (SlidingWindow(32), 100, 69),
            (SlidingWindow(32), 20, 0),
            (ChunkedLocal(16), 100, 96),
            (ChunkedLocal(16), 96, 96),
            (ChunkedLocal(16), 15, 0),
        ],
    )
    def test_the_first_token_that_is_needed(
        self, what: AttentionWindow, position: int, first: int
    ) -> None:
        assert what.first_needed(position) == first

    def test_live_pages(self) -> None:
        assert live_pages(FULL_ATTENTION, 112, 16) == range(0, 7)
        assert live_pages(SlidingWindow(32), 112, 16) == range(5, 7)
        # At a chunk's end nothing of it is needed any more.
        assert len(live_pages(ChunkedLocal(32), 128, 16)) == 0
        assert live_pages(ChunkedLocal(32), 127, 16) == range(6, 8)

    def test_neither_reaches_back_less_than_a_token(self) -> None:
        with pytest.raises(ValueError, match="a window holds at least 1 token"):
            SlidingWindow(0)
        with pytest.raises(ValueError, match="a chunk holds at least 1 token"):
            ChunkedLocal(0)


class TestPrefill:
    def test_pages_are_freed_while_it_runs(self) -> None:
        cache = make(SlidingWindow(8), ChunkedLocal(12))
        tokens = span(0, 64)
        start(cache, "a", tokens, num_tokens=16)
        expected = {16: ([2, 3], [3]), 32: ([6, 7], [6, 7]), 48: ([10, 11], [])}
        for end, (sliding, chunked) in expected.items():
            cache.grow("a", end)
            cache.advance("a", end)
            assert (held(cache, "a", 0), held(cache, "a", 1)) == (sliding, chunked)
            assert cache.windows[0].pages.in_use == len(sliding)
            audit(cache)
        assert cache.pages.in_use == 12

    def test_decoding_frees_pages_too(self) -> None:
        cache = make(SlidingWindow(8))
        tokens = span(0, 8)
        start(cache, "a", tokens)
        prefill(cache, "a", tokens)
        for length in range(9, 40):
            assert cache.grow("a", length) is not None
            cache.trim("a", length)
            assert len(held(cache, "a")) <= 3
        audit(cache)

    def test_a_long_prompt_runs_in_a_small_window_pool(self) -> None:
        cache = make(SlidingWindow(8), window_pages=6)
        tokens = span(0, 200)
        start(cache, "a", tokens, num_tokens=8)
        for end in range(8, 201, 8):
            assert cache.grow("a", end) is not None
            cache.advance("a", end)
        assert len(cache.sequence("a").pages) == 50


class TestHits:
    def test_the_longest_length_that_is_valid_for_all_groups(self) -> None:
        """KV of full attention is there for 40 tokens, windows only at the end."""
        cache = make(SlidingWindow(8))
        serve(cache, "a", span(0, 41), (1,))
        assert cache.look_up(span(0, 60)).match.length == 41
        parted = cache.look_up((*span(0, 20), *span(100, 120)))
        assert (parted.match.length, parted.match.kv_length) == (0, 20)
        # The next one may resume where they part: a snapshot is planned there.
        assert 20 in parted.snapshot_positions

    def test_a_hit_shares_live_pages_and_copies_the_last(self) -> None:
        cache = make(SlidingWindow(8), states=True)
        serve(cache, "a", span(0, 41), (1,))
        cache.drain_commands()
        admitted = start(cache, "b", span(0, 60), num_tokens=60)
        assert admitted.hit == 41
        # Tokens 34 to 40 are needed: pages 8 and 9 are shared, 10 is copied.
        assert held(cache, "b")[:3] == [8, 9, 10]
        copies = [c for c in cache.drain_commands() if isinstance(c, Copy)]
        assert [c.pool for c in copies] == [Pool.KV, Pool.window(0), Pool.STATE]
        audit(cache)

    def test_models_without_states_copy_and_clear_none(self) -> None:
        cache = make(SlidingWindow(8))
        serve(cache, "a", span(0, 41), (1,))
        start(cache, "b", span(0, 60))
        commands = cache.drain_commands()
        assert not any(isinstance(c, Zero) or c.pool is Pool.STATE for c in commands)

    def test_without_windows_and_states_any_page_end_is_a_hit(self) -> None:
        cache = make()
        serve(cache, "a", span(0, 41), (1,))
        found = cache.look_up((*span(0, 22), *span(100, 120)))
        assert (found.match.length, found.snapshot_positions) == (20, ())

    def test_a_window_group_makes_room_by_giving_up_snapshots(self) -> None:
        cache = make(SlidingWindow(8), window_pages=8)
        for first in range(0, 1000, 100):
            assert serve(cache, "a", span(first, first + 17)).hit == 0
            audit(cache)
        assert cache.stats.snapshots_evicted > 0
        assert serve(cache, "b", span(900, 930)).hit == 17

    @pytest.mark.parametrize("page_size", [1, 2, 16, 64, 256])
    def test_page_sizes(self, page_size: int) -> None:
        cache = make(
            SlidingWindow(48),
            page_size=page_size,
            pages=600,
            window_pages=600,
            states=True,
        )
        serve(cache, "a", span(0, 301), (1, 2))
        again = serve(cache, "b", (*span(0, 301), 1, 7))
        assert again.hit == 302
        audit(cache)
