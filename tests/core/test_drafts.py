# SPDX-License-Identifier: Apache-2.0
"""Draft slots: lent, verified in, promoted and given back."""

from __future__ import annotations

import pytest

from hybrid_plugin.core.cache import HybridCache
from hybrid_plugin.core.commands import MoveWindow, Pool, Take
from tests.core.audit import audit
from tests.core.support import make_cache, prefill, span, start


def decoding(slots: int = 9) -> HybridCache:
    """Sequence `a` in slot 1 has computed its prompt of 8 tokens."""
    cache = make_cache(slots=slots)
    start(cache, "a", span(0, 8))
    prefill(cache, "a", span(0, 8))
    assert cache.grow("a", 30) is not None
    cache.drain_commands()
    return cache


def test_a_turn_ends_in_the_slot_of_its_accepted_column() -> None:
    cache = decoding()
    assert cache.hold_drafts("a", 3) == [2, 3, 4]
    cache.verify("a", 8, 3)
    cache.accept("a", 2)
    cache.finish("a", span(0, 12))  # 9 were known, 2 accepted, 1 sampled
    assert cache.drain_commands() == [MoveWindow(Pool.STATE, 1, 2, 3)]
    assert cache.slots.free_ids() == [1, 2, 4, 5, 6, 7, 8]
    assert cache.look_up(span(0, 20)).match.length == 11
    assert cache.stats.turn_ends_exact == 1
    audit(cache)


def test_a_turn_ends_in_its_own_slot_if_nothing_was_accepted() -> None:
    cache = decoding()
    cache.hold_drafts("a", 3)
    cache.verify("a", 8, 3)
    cache.accept("a", 0)
    cache.finish("a", span(0, 10))
    assert cache.drain_commands() == []
    assert cache.slots.free_ids() == [2, 3, 4, 5, 6, 7, 8]
    assert cache.look_up(span(0, 20)).match.length == 9


def test_with_a_step_in_flight_column_0_has_all_known_tokens() -> None:
    cache = decoding()
    cache.hold_drafts("a", 3)
    cache.verify("a", 8, 3)
    cache.verify("a", 12, 3)  # counted as if all were accepted
    cache.accept("a", 2)
    cache.finish("a", span(0, 12))
    assert cache.drain_commands() == []
    assert cache.look_up(span(0, 20)).match.length == 12


def test_a_stop_inside_a_run_is_missed_with_a_step_in_flight_only() -> None:
    for in_flight in (False, True):
        cache = decoding()
        cache.hold_drafts("a", 3)
        cache.verify("a", 8, 3)
        if in_flight:
            cache.verify("a", 12, 3)
        cache.accept("a", 2)
        cache.finish("a", span(0, 10))  # the first accepted draft was a stop
        commands = [] if in_flight else [MoveWindow(Pool.STATE, 1, 1, 2)]
        assert cache.drain_commands() == commands
        assert cache.look_up(span(0, 20)).match.length == (0 if in_flight else 10)
        assert cache.stats.turn_ends_missed == in_flight
        audit(cache)


def test_a_state_is_taken_from_the_scratch() -> None:
    for known, length, take in ((12, 11, None), (10, 10, 4)):
        cache = decoding()
        cache.verify("a", 8, 5, row=7)
        cache.accept("a", 2, columns=[4, 5])  # a tree
        cache.finish("a", span(0, known))
        commands = [] if take is None else [Take(Pool.STATE, 7, take, 1)]
        assert cache.drain_commands() == commands
        assert cache.look_up(span(0, 20)).match.length == length


def test_drafts_are_given_back_behind_a_step_without_drafts() -> None:
    cache = decoding()
    cache.hold_drafts("a", 2)
    cache.verify("a", 8, 2)
    with pytest.raises(ValueError, match="was the last one scheduled"):
        cache.return_drafts("a")
    cache.accept("a", 1)
    cache.verify("a", 10, 0)
    cache.return_drafts("a")
    assert cache.drafts_held == 0
    audit(cache)
