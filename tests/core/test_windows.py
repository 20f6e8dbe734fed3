# SPDX-License-Identifier: Apache-2.0
"""Groups of attention layers with different spans, exactly."""

from __future__ import annotations

import random

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
from hybrid_plugin.core.memory.window_tables import WindowDemand, WindowGroup
from hybrid_plugin.core.policy.snapshot_positions import SnapshotPolicy
from tests.core.audit import audit
from tests.core.support import (
    NO_SNAPSHOTS,
    ByMinimum,
    admit,
    prefill,
    serve,
    span,
    start,
)


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
        SnapshotPolicy(page_size, chunk_end),
        eviction=ByMinimum(),
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


class TestReserves:
    """An engine that cannot preempt a prefill reserves what it will take."""

    CHUNK = 8

    def reserve(self, length: int, answer: int = 0) -> dict[str, object]:
        """Options of an admission that gets the pages of its first chunk."""
        return {
            "num_tokens": min(self.CHUNK, length),
            "reserve_tokens": length,
            "window_demand": WindowDemand(self.CHUNK, length + answer),
        }

    def test_pages_of_a_chunk_and_of_the_window_are_reserved(self) -> None:
        # 8 tokens lie in 3 pages at most, and a chunk takes 2 more.
        cache = make(SlidingWindow(8), window_pages=12)
        tokens = span(0, 40)
        start(cache, "a", tokens, **self.reserve(40))
        assert cache.promised_pages(Pool.window(0)) == 5 - 2
        start(cache, "b", span(100, 140), **self.reserve(40))
        assert admit(cache, "c", span(200, 240), **self.reserve(40)) is None
        # What is shorter than its window takes no more than its own pages.
        assert admit(cache, "d", span(200, 204), **self.reserve(4)) is not None

    def test_decoding_needs_the_window_alone(self) -> None:
        cache = make(SlidingWindow(8), window_pages=9)
        tokens = span(0, 40)
        start(cache, "a", tokens, **self.reserve(40, answer=100))
        for end in range(8, 41, 8):
            assert admit(cache, "b", span(100, 140), **self.reserve(40)) is None
            assert cache.grow("a", end) is not None
            cache.advance("a", end)
        assert admit(cache, "b", span(100, 140), **self.reserve(40)) is not None
        audit(cache)

    def test_a_page_that_two_share_is_reserved_for_each(self) -> None:
        cache = make(SlidingWindow(8), window_pages=11)
        serve(cache, "first", span(0, 16), (1,))
        for name in "ab":
            more = (*span(0, 16), *span(100, 124))
            start(cache, name, more, **self.reserve(40) | {"num_tokens": 24})
        assert admit(cache, "c", (1, 2, 3), **self.reserve(3)) is None

    @pytest.mark.parametrize("window", [SlidingWindow(11), ChunkedLocal(16)])
    def test_nobody_waits_for_a_page_of_a_window(self, window: AttentionWindow) -> None:
        rng = random.Random(5)
        cache = make(window, pages=400, window_pages=17)
        beginning = span(0, 30)
        live: dict[str, tuple[tuple[int, ...], int, int]] = {}
        refused = hits = 0
        for step in range(2000):
            tokens = tuple(rng.randrange(9) for _ in range(rng.randint(1, 60)))
            if rng.random() < 0.5:
                tokens = beginning[: rng.randint(1, 30)] + tokens
            found = cache.look_up(tokens)
            end = min(found.match.length + self.CHUNK, len(tokens))
            answer = rng.randint(1, 30)
            options = self.reserve(len(tokens), answer) | {"num_tokens": end}
            if admit(cache, str(step), tokens, **options) is None:
                refused += 1
                assert live, "nobody waits for an empty pool"
            else:
                hits += found.match.length
                live[str(step)] = (tokens, found.match.length, len(tokens) + answer)
            for name, (known, computed, most) in list(live.items()):
                end = min(computed + self.CHUNK, len(known))
                if computed >= len(known):
                    end, known = computed + 1, (*known, 7)
                    cache.trim(name, computed)
                assert cache.grow(name, end) is not None
                cache.drain_commands()
                if end <= cache.sequence(name).prompt_length:
                    cache.advance(name, end)
                live[name] = (known, end, most)
                if end == most:
                    cache.finish(name, known, end)
                    del live[name]
            if step % 50 == 0:
                audit(cache)
        assert refused > 100 and hits > 100 and cache.stats.snapshots_evicted > 100


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

    @pytest.mark.parametrize(("states", "hit"), [(False, 41), (True, 0)])
    def test_a_step_in_flight_costs_a_state_and_no_window(
        self, states: bool, hit: int
    ) -> None:
        """A sequence is retracted while a token is computed that nobody has seen."""
        cache = make(SlidingWindow(8), states=states)
        tokens = span(0, 41)
        start(cache, "a", tokens)
        prefill(cache, "a", tokens)
        assert cache.grow("a", 42) is not None
        cache.finish("a", tokens, 42)
        assert cache.look_up(span(0, 60)).match.length == hit
        audit(cache)

    def test_a_window_that_moved_on_is_not_resumed(self) -> None:
        cache = make(SlidingWindow(8))
        tokens = span(0, 47)
        start(cache, "a", tokens)
        prefill(cache, "a", tokens)
        assert cache.grow("a", 48) is not None
        cache.trim("a", 60)
        cache.finish("a", tokens, 48)
        assert cache.look_up(span(0, 60)).match.length == 0

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
