# SPDX-License-Identifier: Apache-2.0
"""Why tokens were computed, by exact numbers; pages have 4 tokens."""

from __future__ import annotations

from collections.abc import Hashable

from hypothesis import given
from hypothesis import strategies as st

from hybrid_plugin.core.cache import HybridCache
from hybrid_plugin.core.misses import MissReason, missed_tokens
from hybrid_plugin.core.tree.evicted import RecentlyEvicted
from tests.core.support import Tokens, make_cache, serve, span, start


def why(
    cache: HybridCache, tokens: Tokens, namespace: Hashable = None
) -> dict[str, int]:
    """Tokens that would be computed, by reason."""
    found = cache.look_up(tokens, namespace)
    missed = missed_tokens(cache.tree, found)
    assert missed.total() == len(tokens) - found.match.length
    assert all(count > 0 for count in missed.values())
    return {str(reason): count for reason, count in missed.items()}


def evict_kv(cache: HybridCache, pages: int | None = None) -> None:
    """Evict so many pages of the next leaf, or everything."""
    if pages is not None:
        assert cache.memory.evict_pages(pages)
        return
    while cache.memory.evict_pages(1_000):
        pass


class TestKnownTokens:
    def test_what_nobody_computed_is_new(self) -> None:
        assert why(make_cache(), span(0, 10)) == {"new": 10}

    def test_what_comes_behind_a_hit_is_new(self) -> None:
        cache = make_cache()
        serve(cache, "a", span(0, 10))
        assert why(cache, span(0, 13)) == {"new": 3}

    def test_kv_without_a_state(self) -> None:
        """Sequences part in mid-prompt, where nobody kept a state."""
        cache = make_cache()
        serve(cache, "a", span(0, 22))
        assert why(cache, (*span(0, 12), *span(100, 103))) == {
            "no_snapshot": 12,
            "new": 3,
        }

    def test_a_prompt_that_ends_within_what_is_there(self) -> None:
        cache = make_cache()
        serve(cache, "a", span(0, 22))
        assert why(cache, span(0, 10)) == {"no_snapshot": 8, "new": 2}

    def test_a_prompt_of_less_than_a_page(self) -> None:
        cache = make_cache()
        serve(cache, "a", span(0, 22))
        assert why(cache, (7, 8, 9)) == {"too_short": 3}

    def test_what_must_not_be_served(self) -> None:
        cache = make_cache()
        serve(cache, "a", span(0, 10))
        found = cache.bypass(span(0, 13))
        assert missed_tokens(cache.tree, found) == {MissReason.NOT_CACHEABLE: 13}


class TestNamespaces:
    def test_the_same_beginning_under_another_salt(self) -> None:
        cache = make_cache()
        serve(cache, "a", span(0, 10), namespace="salt")
        assert why(cache, span(0, 9)) == {"other_namespace": 9}
        assert why(cache, span(1, 9)) == {"new": 8}

    def test_a_beginning_that_is_gone_everywhere(self) -> None:
        cache = make_cache()
        serve(cache, "a", span(0, 10), namespace="salt")
        serve(cache, "b", span(0, 10), namespace="pepper")
        evict_kv(cache, 3)
        assert why(cache, span(0, 9)) == {"other_namespace": 9}
        evict_kv(cache)
        assert why(cache, span(0, 9)) == {"new": 9}


class TestEvictedStates:
    def test_at_a_page_end(self) -> None:
        cache = make_cache()
        serve(cache, "a", span(0, 12))
        serve(cache, "b", span(0, 16))
        assert why(cache, span(0, 20)) == {"new": 4}
        while cache.memory.evict_snapshot():
            pass
        assert why(cache, span(0, 20)) == {"state_evicted": 16, "new": 4}
        assert why(cache, span(0, 15)) == {"state_evicted": 12, "new": 3}

    def test_in_the_middle_of_a_page(self) -> None:
        """The page went with its state; that of whole pages stays."""
        cache = make_cache()
        serve(cache, "a", span(0, 10))
        assert cache.memory.evict_snapshot()
        assert why(cache, span(0, 12)) == {"state_evicted": 10, "new": 2}
        assert why(cache, (*span(0, 9), 99, 98)) == {"no_snapshot": 8, "new": 3}

    def test_behind_a_state_that_is_there(self) -> None:
        cache = make_cache()
        serve(cache, "a", span(0, 6))
        serve(cache, "b", (*span(0, 6), *span(50, 60)))
        serve(cache, "c", span(0, 6))
        assert cache.memory.evict_snapshot()
        tokens = (*span(0, 6), *span(50, 62))
        assert cache.look_up(tokens).match.length == 6
        assert why(cache, tokens) == {"state_evicted": 10, "new": 2}

    def test_a_state_that_is_computed_again_is_not_missed(self) -> None:
        cache = make_cache()
        serve(cache, "a", span(0, 8))
        assert cache.memory.evict_snapshot()
        serve(cache, "b", span(0, 8))
        assert why(cache, span(0, 10)) == {"new": 2}


class TestEvictedKv:
    def test_all_of_it(self) -> None:
        cache = make_cache()
        serve(cache, "a", span(0, 12))
        evict_kv(cache)
        assert why(cache, span(0, 14)) == {"kv_evicted": 12, "new": 2}
        assert why(cache, (*span(0, 8), *span(90, 99))) == {
            "kv_evicted": 8,
            "new": 9,
        }

    def test_the_last_pages_one_by_one(self) -> None:
        cache = make_cache()
        serve(cache, "a", span(0, 16))
        assert cache.memory.evict_snapshot()
        evict_kv(cache, 1)
        evict_kv(cache, 1)
        assert why(cache, span(0, 18)) == {
            "no_snapshot": 8,
            "kv_evicted": 8,
            "new": 2,
        }

    def test_of_one_branch_the_other_is_there(self) -> None:
        cache = make_cache()
        serve(cache, "a", (*span(0, 8), *span(10, 18)))
        serve(cache, "b", (*span(0, 8), *span(20, 28)))
        evict_kv(cache, 2)
        assert why(cache, (*span(0, 8), *span(10, 19)))["kv_evicted"] == 8

    def test_branches_that_part_inside_what_is_computed_again(self) -> None:
        cache = make_cache()
        serve(cache, "a", (*span(0, 8), *span(10, 18)))
        evict_kv(cache)
        serve(cache, "b", (*span(0, 8), *span(20, 28)))
        assert why(cache, (*span(0, 8), *span(10, 20))) == {
            "no_snapshot": 8,
            "kv_evicted": 8,
            "new": 2,
        }

    def test_what_is_computed_again_is_not_missed(self) -> None:
        cache = make_cache()
        serve(cache, "a", span(0, 12))
        evict_kv(cache)
        serve(cache, "b", span(0, 20))
        assert why(cache, span(0, 22)) == {"new": 2}
        assert evicted(cache).tokens == 0

    def test_what_is_computed_again_in_part(self) -> None:
        cache = make_cache()
        serve(cache, "a", span(0, 16))
        evict_kv(cache)
        serve(cache, "b", span(0, 8))
        assert why(cache, span(0, 18)) == {"kv_evicted": 8, "new": 2}

    def test_a_flush_forgets(self) -> None:
        cache = make_cache()
        serve(cache, "a", span(0, 12))
        evict_kv(cache)
        cache.flush()
        assert why(cache, span(0, 12)) == {"new": 12}


def evicted(cache: HybridCache) -> RecentlyEvicted:
    found = cache.tree.evicted
    assert found is not None
    return found


def test_as_much_is_remembered_as_the_pool_holds() -> None:
    cache = make_cache(pages=9)
    for number in range(0, 1_000, 100):
        serve(cache, "a", span(number, number + 16))
    evict_kv(cache)
    memory = evicted(cache)
    assert 20 < memory.tokens <= memory.most_tokens == 36
    assert sum(len(one.tokens) for one in memory) == memory.tokens
    assert why(cache, span(0, 16)) == {"new": 16}
    assert why(cache, span(900, 916)) == {"kv_evicted": 16}


def test_first_admissions_count_once() -> None:
    cache = make_cache()
    serve(cache, "a", span(0, 10))
    start(cache, "b", span(0, 13))
    cache.finish("b", span(0, 13), 13)
    start(cache, "c", span(0, 22), resumed=True)
    stats = cache.stats
    assert dict(stats.computed_tokens) == {"new": 13}
    assert stats.computed_tokens.total() == stats.queried_tokens - stats.hit_tokens
    assert stats.as_dict()["computed_tokens"] == 13


PROMPTS = st.lists(st.integers(0, 2), min_size=1, max_size=8).map(
    lambda pages: tuple(page * 10 + token for page in pages for token in range(4))
)


@given(
    st.lists(
        st.tuples(PROMPTS, st.integers(0, 3), st.integers(0, 9), st.booleans()),
        max_size=30,
    )
)
def test_what_was_there_is_never_called_new(
    steps: list[tuple[Tokens, int, int, bool]],
) -> None:
    """Compared with a plain record of all that was ever computed."""
    cache = make_cache(pages=257)
    known: set[Tokens] = set()
    for tokens, more, pages, states in steps:
        tokens = (*tokens, *span(70, 70 + more))
        missed = why(cache, tokens)
        seen = max(
            (end for end in range(0, len(tokens) + 1, 4) if tokens[:end] in known),
            default=0,
        )
        hit = cache.look_up(tokens).match.length
        unknown = len(tokens) - max(seen, hit)
        assert unknown - 3 <= sum(missed.get(why, 0) for why in NOT_KNOWN) <= unknown
        serve(cache, "a", tokens)
        known |= {tokens[:end] for end in range(4, len(tokens) + 1, 4)}
        if pages:
            cache.memory.evict_pages(pages)
        if states:
            cache.memory.evict_snapshot()
        memory = evicted(cache)
        assert sum(len(one.tokens) for one in memory) == memory.tokens


NOT_KNOWN = ("new", "too_short")
