# SPDX-License-Identifier: Apache-2.0
"""What somebody wants in the outer tier now, or on the host before it is needed."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from hybrid_plugin.core.cache import HybridCache
from hybrid_plugin.core.commands import Discard, Fetch, Store, Write, WriteRecord
from hybrid_plugin.core.memory.pools import PagePool, SlotPool
from hybrid_plugin.core.policy.snapshot_positions import SnapshotPolicy
from hybrid_plugin.core.tiers.saves import GONE, HOST_FULL, Saving
from hybrid_plugin.core.tiers.writes import FLUSHED, NO_ROOM
from tests.core.audit import audit
from tests.core.support import Tokens, serve, span
from tests.core.test_outer_tier import (
    CHAT,
    LATER,
    NEXT,
    PLAN,
    RATES,
    TURN,
    chat_on_disk,
    disk,
    fetch,
    host,
    ids,
    make,
    of,
    used,
)


def chat(cache: HybridCache) -> None:
    """Serve a chat of 12 computed tokens."""
    serve(cache, "chat", CHAT, (100, 101, 102))


def save(cache: HybridCache, tokens: Tokens = TURN) -> Saving:
    """A save that must begin."""
    saving = cache.lower_tiers.save(tokens)
    assert saving is not None
    return saving


def stored(cache: HybridCache, tokens: Tokens = TURN) -> int:
    """Tokens of a sequence that the disk has."""
    found = disk(cache).find(None, ids(*tokens), len(tokens))
    return found[-1].end if found else 0


def forget_host(cache: HybridCache) -> None:
    while host(cache).memory.evict_pages(1_000):
        pass


# ----------------------------------------------------------------------- save


def test_a_save_waits_until_its_bundle_is_reported() -> None:
    cache = make()
    chat(cache)
    saving = save(cache)
    assert (saving.length, saving.is_over) == (12, False)
    cache.drain_commands()
    cache.drain_commands()
    assert not saving.is_over and cache.lower_tiers.writing
    cache.lower_tiers.done(1, True)
    assert saving.is_over and not saving.reason
    assert stored(cache) == 12 and not cache.lower_tiers.writing
    assert not any(used(cache).values())
    audit(cache)


def test_what_is_there_is_saved_at_once() -> None:
    cache = make()
    chat_on_disk(cache)
    saving = save(cache)
    assert saving.is_over and not saving.reason
    assert not cache.lower_tiers.writing and not cache.drain_commands()


def test_nothing_can_be_saved_of_what_nobody_knows() -> None:
    cache = make()
    chat(cache)
    assert cache.lower_tiers.save(LATER) is None
    assert cache.lower_tiers.save(TURN, "another salt") is None


def test_a_save_goes_before_what_was_noted_earlier() -> None:
    cache = make()
    for i in range(4):
        serve(cache, f"r{i}", span(20 * i, 20 * i + 5), (500, 501))
    saving = save(cache, (*span(60, 65), 500, 501))
    cache.drain_commands()  # the two oldest have begun
    begun = [one.tokens[0] for one in disk(cache).begun.values()]
    assert begun == [0, 20]
    cache.lower_tiers.done(1, True)
    cache.drain_commands()
    assert [one.tokens[0] for one in disk(cache).begun.values()] == [20, 60]
    cache.lower_tiers.done(3, True)
    assert saving.is_over and not saving.reason
    audit(cache)


def test_what_only_the_device_has_is_stored_first() -> None:
    cache = make()
    chat(cache)
    forget_host(cache)
    cache.drain_commands()
    saving = save(cache)
    assert not of(Store, cache.drain_commands())
    commands = cache.drain_commands()
    assert [type(one) for one in commands] == [Store, Store, Write]
    cache.lower_tiers.done(1, True)
    assert saving.is_over and not saving.reason and stored(cache) == 12


def small() -> HybridCache:
    """A cache whose host has room for one chat."""
    return make(plan=replace(PLAN, blocks=4))


def test_a_save_takes_the_place_of_what_is_worth_more() -> None:
    cache = small()
    host(cache).tree.eviction.worth = lambda *_: -math.inf  # type: ignore[method-assign]
    chat(cache)
    serve(cache, "later", LATER[:10], (300, 301, 302))
    cache.drain_commands()
    cache.lower_tiers.done(1, True)
    assert host(cache).stats.stores_refused == 1
    saving = save(cache, (*LATER[:10], 300, 301, 302))
    cache.drain_commands()
    cache.drain_commands()
    assert (
        cache.lower_tiers.resumable(TURN)
        and not host(cache).match(None, ids(*TURN), 12).length
    )
    cache.lower_tiers.done(2, True)
    assert saving.is_over and not saving.reason
    audit(cache)


def test_a_host_in_use_is_a_reason() -> None:
    cache = small()
    chat_on_disk(cache)
    serve(cache, "later", LATER[:10], (300, 301, 302))
    forget_host(cache)
    cache.drain_commands()
    fetch(cache, NEXT)  # has the rows until it is reported
    cache.drain_commands()
    saving = save(cache, (*LATER[:10], 300, 301, 302))
    cache.drain_commands()
    assert saving.is_over and saving.reason == HOST_FULL
    audit(cache)


@pytest.mark.parametrize("reason", ["the disk is full", "io"])
def test_a_failed_write_is_a_reason(reason: str) -> None:
    cache = make()
    chat(cache)
    saving = save(cache)
    cache.drain_commands()
    cache.drain_commands()
    cache.lower_tiers.done(1, False, reason=reason)
    assert saving.is_over and saving.reason == reason
    assert not any(used(cache).values()) and not cache.lower_tiers.writing
    audit(cache)


def test_what_the_tier_does_not_take_is_a_reason() -> None:
    cache = make(budget=6)
    chat(cache)
    saving = save(cache)
    cache.drain_commands()
    cache.drain_commands()
    assert saving.is_over and saving.reason == NO_ROOM
    assert not cache.lower_tiers.writing and not any(used(cache).values())


def test_a_flush_ends_saves() -> None:
    cache = make()
    chat(cache)
    saving = save(cache)
    cache.drain_commands()
    cache.drain_commands()
    assert cache.flush()
    assert saving.is_over and saving.reason == FLUSHED
    cache.lower_tiers.done(1, True)
    assert not stored(cache)
    audit(cache)


def test_what_was_evicted_meanwhile_is_a_reason() -> None:
    cache = make()
    chat(cache)
    saving = save(cache)
    while cache.memory.evict_pages(1_000):
        pass
    forget_host(cache)
    cache.drain_commands()
    assert saving.is_over and saving.reason == HOST_FULL


def test_a_tier_that_finds_nothing_behind_a_write_is_a_reason() -> None:
    """As one whose weights were updated meanwhile."""
    cache = make()
    chat(cache)
    saving = save(cache)
    cache.drain_commands()
    cache.drain_commands()
    disk(cache).find = lambda *_: ()  # type: ignore[method-assign]
    cache.lower_tiers.done(1, True)
    assert saving.is_over and saving.reason == GONE


def test_two_saves_of_one_prefix_share_a_write() -> None:
    cache = make()
    chat(cache)
    savings = [save(cache), save(cache)]
    commands = [*cache.drain_commands(), *cache.drain_commands()]
    assert len(of(Write, commands)) == 1
    cache.lower_tiers.done(1, True)
    assert all(one.is_over and not one.reason for one in savings)
    audit(cache)


# ---------------------------------------------------------------------- bring


def test_a_prefix_is_brought_whatever_it_is_worth() -> None:
    """Computing it would be faster, so no request would wait for it."""
    cache = make(rates=replace(RATES, prefill_seconds_per_token=1e-9))
    chat_on_disk(cache)
    assert cache.lower_tiers.restore(cache.look_up(NEXT)) is None
    assert cache.lower_tiers.resumable(TURN) == 0
    found = cache.lower_tiers.bring(TURN[:12])
    assert found is not None and found.length == 12
    (command,) = of(Fetch, cache.drain_commands())
    assert isinstance(command, Fetch)
    assert cache.lower_tiers.bring(TURN[:12]) is found, "it is on its way"
    cache.lower_tiers.done(command.ticket, True)
    assert found.is_over and not found.reason
    assert cache.lower_tiers.resumable(TURN) == 12
    assert cache.lower_tiers.bring(TURN[:12]) is None, "it is there"
    audit(cache)


def test_a_fetch_that_failed_says_why() -> None:
    cache = make()
    chat_on_disk(cache)
    found = cache.lower_tiers.bring(TURN[:12])
    cache.drain_commands()
    cache.lower_tiers.done(2, False, reason="torn", bundle=0)
    assert found is not None and found.is_over and found.reason == "torn"
    assert (
        cache.lower_tiers.bring(TURN[:12]) is None
        and cache.lower_tiers.resumable(TURN) == 0
    )


def test_nothing_is_brought_of_what_nobody_has() -> None:
    cache = make()
    chat_on_disk(cache)
    assert cache.lower_tiers.bring(LATER) is None
    assert cache.lower_tiers.bring(TURN, "another salt") is None


# -------------------------------------------------------------------- records


def test_a_record_comes_behind_what_it_discards() -> None:
    cache = make()
    recording = cache.lower_tiers.record("ab", "text", ["old"])
    assert cache.lower_tiers.writing == 1 and not recording.is_over
    commands = cache.drain_commands()
    assert commands == [Discard(("old",)), WriteRecord(1, "ab", "text")]
    cache.lower_tiers.done(1, True)
    assert recording.is_over and not recording.reason and not cache.lower_tiers.writing


def test_a_record_that_failed_says_why() -> None:
    cache = make()
    recording = cache.lower_tiers.record("ab", None)
    assert cache.drain_commands() == [WriteRecord(1, "ab", None)]
    cache.lower_tiers.done(1, False, reason="io")
    assert recording.is_over and recording.reason == "io"
    with pytest.raises(ValueError, match="ticket 1"):
        cache.lower_tiers.done(1, True)


def test_without_a_tier_there_is_nothing_to_save_to() -> None:
    cache = HybridCache(PagePool(9), SlotPool(3), 4, SnapshotPolicy(4, 1_000))
    for call in (
        lambda: cache.lower_tiers.save(TURN),
        lambda: cache.lower_tiers.bring(TURN),
        lambda: cache.lower_tiers.record("ab", None),
    ):
        with pytest.raises(ValueError, match="no outer tier"):
            call()
