# SPDX-License-Identifier: Apache-2.0
"""TTLs: what an application says of a conversation's next turn, and what it changes."""

from __future__ import annotations

from typing import Any

import pytest

from hybrid_plugin.core.cache import HybridCache
from hybrid_plugin.core.policy.pace import MOST_ADMISSIONS, Pace
from hybrid_plugin.core.policy.reuse import ReuseModel
from hybrid_plugin.core.policy.reuse_classes import (
    PromisedClass,
    class_of,
    unused_class,
)
from hybrid_plugin.core.policy.ttls import ReuseWithTtls, Trust, Ttls
from hybrid_plugin.core.tree.node import Node, admissions_between
from hybrid_plugin.core.tree.promise import Promise
from hybrid_plugin.core.tree.snapshot import SnapshotKind
from tests.core.audit import audit
from tests.core.support import ByMinimum, Economical, Tokens, make_cache, prefill, span


def cache_of(slots: int = 99, policy: Economical | None = None) -> HybridCache:
    """Slots are short where a test says so, pages never are."""
    return make_cache(pages=2000, slots=slots, policy=policy or Economical())


def trust_in(cache: HybridCache, ttl: float) -> Trust:
    return cache.tree.eviction.ttls.trust(Promise(ttl).magnitude)


def ask(
    cache: HybridCache,
    first: int,
    length: int = 10,
    *,
    ttl: float | None = None,
    at: float | None = None,
    named: tuple[int, ...] = (),
    answer: int = 2,
    **options: Any,
) -> int:
    """Serve a request whose tokens count up from `first`; returns its hit.

    Args:
        cache: that serves it.
        first: its first token.
        length: of the prompt.
        ttl: that it gives.
        at: the time at which it comes and ends; by default no time passes.
        named: positions that it names.
        answer: tokens that are generated, of which the last is not computed.
        options: of its admission.
    """
    if at is not None:
        cache.pass_time(at)
    name = f"{first}/{length}"
    prompt: Tokens = span(first, first + length)
    found = cache.look_up(prompt, snapshot_at=named, ttl=ttl)
    admission = cache.admit(name, found, num_tokens=length, **options)
    assert admission is not None
    prefill(cache, name, prompt)
    computed = length + answer - 1
    assert cache.grow(name, computed) is not None
    cache.finish(name, span(first, first + length + answer), computed)
    audit(cache)
    return admission.hit


def order(cache: HybridCache) -> list[int]:
    """First tokens of the conversations, those that are evicted first in front."""
    evicted = []
    while (node := cache.tree.next_snapshot()) is not None:
        evicted.append(first_token(node))
        cache.memory.evict_snapshot()
        audit(cache)
    return evicted


def by_worth(cache: HybridCache) -> list[int]:
    """The same without evicting anything, from which the policy would learn."""
    return [first_token(node) for node in cache.tree.snapshots()]


def promised(cache: HybridCache) -> dict[int, SnapshotKind]:
    """Kinds of the snapshots that a promise holds for, by position."""
    found = {}
    for node in cache.tree.nodes():
        if node.snapshot is not None:
            kind = class_of(node.snapshot)
            if isinstance(kind, PromisedClass):
                found[node.end] = kind.kind
    return found


def promised_ends(cache: HybridCache) -> list[int]:
    return sorted(promised(cache))


def first_token(node: Node) -> int:
    while node.parent is not None and node.parent.parent is not None:
        node = node.parent
    return int(node.tokens[0])


# -------------------------------------------------------------------- the order


def test_those_that_will_go_on_outlast_those_that_may() -> None:
    """And of them the one with the shorter TTL outlasts the other."""
    cache = cache_of()
    for turn, ttl in enumerate([None, 60.0, None, 3600.0, None]):
        ask(cache, 1000 * turn, ttl=ttl, at=2.0 * turn)
    for number in range(160):
        ask(cache, 100_000 + 100 * number, at=10.0 + 0.25 * number, ttl=0)
    evicted = order(cache)
    assert set(evicted[:3]) == {0, 2000, 4000}
    assert evicted[3:] == [3000, 1000]


def test_a_ttl_that_is_over_changes_nothing_any_more() -> None:
    cache = cache_of()
    ask(cache, 0, ttl=30.0, at=0.0)
    for turn in range(1, 4):
        # Of ages at which the older is worth less, even before anything was seen.
        for _ in range(4):
            cache.tree.begin_admission()
        ask(cache, 1000 * turn, at=5.0 * turn)
    for _ in range(4):
        cache.tree.begin_admission()
    cache.pass_time(29.9)
    assert by_worth(cache) == [1000, 2000, 3000, 0]
    (node,) = [n for n in cache.tree.snapshots() if first_token(n) == 0]
    cache.pass_time(30.0)
    assert cache.stats.promises_broken == 1
    policy = cache.tree.eviction
    assert isinstance(policy, Economical)
    age = 3 * 5 + 4
    rate = policy.reuse.rate(unused_class(SnapshotKind.TURN_END, None), age)
    assert node in list(cache.tree.snapshots())
    worth = policy.worth(cache.tree._snapshots.rank(node), cache.tree.clock)
    assert worth == pytest.approx(rate * 11 / (11 + 4)), "it is ranked again"
    assert order(cache)[-1] == 3000


def test_after_its_use_it_is_like_any_other() -> None:
    """The turn that went on supersedes it, as it would without a TTL."""
    cache = cache_of()
    ask(cache, 0, ttl=1000.0, at=0.0)
    ask(cache, 5000, at=1.0)
    assert by_worth(cache) == [5000, 0]
    assert ask(cache, 0, 20, at=2.0) == 11
    assert promised_ends(cache) == []
    assert (cache.stats.promised_hits, cache.stats.promises_broken) == (1, 0)
    first = cache.tree.next_snapshot()
    assert first is not None and first.end == 11 and first_token(first) == 0
    assert order(cache) == [0, 5000, 0]


def test_equal_calls_give_equal_orders() -> None:
    orders = []
    for _ in range(2):
        cache = cache_of()
        for turn in range(30):
            ttl = (None, 5.0, 50.0)[turn % 3]
            ask(cache, 1000 * (turn % 20), 10 + turn, ttl=ttl, at=1.5 * turn)
        orders.append(order(cache))
    assert orders[0] == orders[1] and len(orders[0]) > 20


def test_recency_alone_knows_no_promise() -> None:
    cache = make_cache(pages=2000, slots=99, policy=ByMinimum())
    for turn, ttl in enumerate([100.0, None, 100.0]):
        ask(cache, 1000 * turn, ttl=ttl, at=float(turn))
    assert order(cache) == [0, 1000, 2000]


# --------------------------------------------------------------- what it is for


def test_a_conversation_outlives_traffic_that_evicts_it_without_a_ttl() -> None:
    for ttl, hit in ((None, 0), (600.0, 39)):
        cache = cache_of(slots=8)
        ask(cache, 0, 38, ttl=ttl, at=0.0)
        for number in range(300):
            ask(cache, 10_000 + 100 * number, 38, at=1.0 + number)
        assert ask(cache, 0, 60, at=400.0) == hit


def test_the_named_position_and_both_ends_are_promised() -> None:
    cache = cache_of(policy=Economical(prompt_end=4))
    ask(cache, 0, 30, ttl=60.0, named=(9,), answer=5)
    assert promised(cache) == {
        8: SnapshotKind.REQUESTED,
        28: SnapshotKind.PROMPT_END,
        34: SnapshotKind.TURN_END,
    }


def test_a_use_keeps_the_promise_up_to_there() -> None:
    """Somebody else who shares the named position does not continue the turn."""
    cache = cache_of()
    ask(cache, 0, 30, ttl=60.0, named=(8,))
    assert promised_ends(cache) == [8, 31]
    other = span(0, 8) + span(700, 720)
    found = cache.look_up(other)
    assert found.match.length == 8
    assert cache.admit("other", found, num_tokens=28) is not None
    assert promised_ends(cache) == [31]
    cache.finish("other", other, 28)
    ask(cache, 0, 40)
    assert promised_ends(cache) == []
    assert cache.stats.promised_hits == 2
    assert cache.stats.promises_broken == 0


def test_who_names_a_position_again_renews_its_ttl() -> None:
    cache = cache_of()
    ask(cache, 0, 30, ttl=60.0, named=(8,), at=0.0)
    tokens = span(0, 8) + span(700, 720)
    cache.pass_time(50.0)
    found = cache.look_up(tokens, snapshot_at=(8,), ttl=60.0)
    assert cache.admit("b", found, num_tokens=28) is not None
    prefill(cache, "b", tokens)
    cache.finish("b", tokens, 28)
    assert promised_ends(cache) == [8, 28, 31]
    cache.pass_time(100.0)
    assert promised_ends(cache) == [8, 28]
    cache.pass_time(110.0)
    assert promised_ends(cache) == []


@pytest.mark.parametrize("repays", [True, False])
def test_a_position_keeps_its_promise_wherever_its_snapshot_lies(repays: bool) -> None:
    """At its page end, or where a pass can keep a state before it."""
    policy = Economical()
    policy.repays_pass = lambda *_, **__: repays  # type: ignore[method-assign]
    cache = make_cache(pages=2000, slots=99, policy=policy, grid=8)
    place = 12 if repays else 8
    for turn, hit in enumerate((0, place, place)):
        tokens = span(0, 14) + span(1000 * (turn + 1), 1000 * (turn + 1) + 20)
        found = cache.look_up(tokens, snapshot_at=(13,), ttl=60.0)
        assert found.match.length == hit
        assert cache.admit("a", found, num_tokens=34) is not None
        prefill(cache, "a", tokens)
        cache.finish("a", tokens, 34)
        assert place in promised_ends(cache)


def test_what_another_request_waits_for_is_not_promised() -> None:
    """The position at which a prompt pauses for others is none that it named."""
    cache = cache_of()
    tokens = span(0, 30)
    found = cache.look_up(tokens, snapshot_at=(8,), pause_at=(20,), ttl=10.0)
    assert cache.admit("a", found, num_tokens=30) is not None
    cache.pause_at("a", 24)
    prefill(cache, "a", tokens)
    cache.finish("a", tokens, 30)
    assert promised_ends(cache) == [8, 30]
    assert ask(cache, 0, 25) == 24
    assert cache.stats.promised_hits == 0


def test_a_check_of_a_hit_uses_nothing_up() -> None:
    cache = cache_of()
    ask(cache, 0, 20, ttl=60.0, named=(8,))
    before = cache.stats.as_dict(), promised_ends(cache), cache.tree.admissions
    checks = {"cacheable": False, "counted": False}
    assert ask(cache, 0, 12, **checks) == 8
    assert ask(cache, 0, 30, **checks) == 21
    after = cache.stats.as_dict(), promised_ends(cache), cache.tree.admissions
    assert after == before
    assert ask(cache, 0, 40) == 21
    assert cache.stats.promised_hits == 1


def test_a_check_that_takes_the_slot_over_ends_the_promise() -> None:
    cache = cache_of(slots=2)
    ask(cache, 0, 20, ttl=60.0)
    assert promised_ends(cache) == [21]
    assert ask(cache, 0, 30, cacheable=False, counted=False) == 21
    assert promised_ends(cache) == []
    assert cache.stats.promises_evicted == 1


def test_the_longer_of_two_ttls_counts() -> None:
    cache = cache_of()
    ask(cache, 0, 30, ttl=1000.0, at=0.0)
    ask(cache, 0, 30, ttl=10.0, at=1.0)  # the same turn, sent again
    cache.pass_time(900.0)
    assert promised_ends(cache) == [31]
    cache.pass_time(1000.0)
    assert promised_ends(cache) == []


def test_the_ttl_begins_when_the_request_ends() -> None:
    cache = cache_of()
    tokens = span(0, 30)
    found = cache.look_up(tokens, snapshot_at=(8,), ttl=10.0)
    assert cache.admit("a", found, num_tokens=30) is not None
    prefill(cache, "a", tokens)
    cache.pass_time(500.0)
    assert promised_ends(cache) == [8]
    cache.finish("a", tokens, 30)
    cache.pass_time(509.0)
    assert promised_ends(cache) == [8, 30]
    cache.pass_time(510.0)
    assert promised_ends(cache) == []


def test_while_the_request_runs_nothing_of_its_ttl_is_over() -> None:
    """However long it does; from its end on the age of what it took counts."""
    cache = cache_of()
    tokens = span(0, 30)
    found = cache.look_up(tokens, snapshot_at=(8,), ttl=10.0)
    assert cache.admit("a", found, num_tokens=30) is not None
    prefill(cache, "a", tokens)
    (node,) = [n for n in cache.tree.nodes() if n.end == 8]
    snapshot = node.snapshot
    assert snapshot is not None
    for number in range(20):
        ask(cache, 1000 + 100 * number, at=float(number))
    assert class_of(snapshot) == PromisedClass(SnapshotKind.REQUESTED, 4, False)
    assert admissions_between(snapshot.used_at, cache.tree.clock) == 20
    cache.finish("a", tokens, 30)
    audit(cache)
    assert class_of(snapshot) == PromisedClass(SnapshotKind.REQUESTED, 4, True)
    assert admissions_between(snapshot.used_at, cache.tree.clock) == 0


def test_anything_promised_can_be_evicted_for_an_admission() -> None:
    cache = cache_of(slots=4)
    for turn in range(12):
        assert ask(cache, 1000 * turn, ttl=1e6, at=float(turn)) == 0
    assert cache.stats.snapshots_evicted > 0
    assert cache.stats.promises_evicted == cache.stats.snapshots_evicted


def test_where_everything_is_promised_the_saving_by_bytes_decides() -> None:
    """The longer conversation saves more by the bytes that it holds."""
    policy = Economical()
    policy.slot_bytes = 100.0
    cache = cache_of(policy=policy)
    for turn, length in enumerate([40, 8, 90, 20]):
        ask(cache, 1000 * turn, length, ttl=100.0, at=0.0)
    assert order(cache) == [1000, 3000, 0, 2000]


def with_preempted() -> HybridCache:
    """What is left of a request of 30 tokens that promised ten seconds."""
    cache = cache_of()
    tokens = span(0, 30)
    found = cache.look_up(tokens, ttl=10.0)
    assert cache.admit("a", found, num_tokens=30) is not None
    prefill(cache, "a", tokens)
    cache.finish("a", tokens, 30, preempted=True)
    return cache


def test_a_promise_of_a_preempted_request_is_made_again() -> None:
    cache = with_preempted()
    assert promised_ends(cache) == [30]
    assert ask(cache, 0, 31, ttl=10.0, resumed=True) == 30
    assert promised_ends(cache) == [32]
    assert cache.stats.promised_hits == 0, "nobody continued it"


def test_a_preempted_request_that_waits_breaks_no_promise() -> None:
    """Nobody could have continued it."""
    cache = with_preempted()
    cache.pass_time(100.0)
    assert ask(cache, 0, 31, ttl=10.0, resumed=True) == 30
    assert ask(cache, 0, 40, at=105.0) == 32
    assert (cache.stats.promised_hits, cache.stats.promises_broken) == (1, 0)
    assert trust_in(cache, 10.0).broken == 0


# ------------------------------------------------------------------ nobody will


def test_nothing_is_left_of_a_turn_that_nobody_continues() -> None:
    cache = cache_of(policy=Economical(prompt_end=4))
    ask(cache, 0, 30, ttl=0, answer=5)
    assert cache.levels()["state"].cached == 0
    assert [n.end for n in cache.tree.nodes() if n.parent] == [28]
    assert ask(cache, 0, 40) == 0


def test_it_keeps_what_it_names_and_what_it_shares() -> None:
    cache = cache_of()
    ask(cache, 0, 30, ttl=0, named=(8,))
    other = span(0, 20) + span(500, 520)
    found = cache.look_up(other, ttl=0)
    assert found.match.length == 8
    assert dict(found.planned) == {20: SnapshotKind.BRANCH}
    assert promised_ends(cache) == []


def test_it_is_resumed_after_a_preemption() -> None:
    cache = cache_of()
    tokens = span(0, 30)
    found = cache.look_up(tokens, ttl=0)
    assert cache.admit("a", found, num_tokens=30) is not None
    prefill(cache, "a", tokens)
    cache.finish("a", tokens, 30, preempted=True)
    assert ask(cache, 0, 31, ttl=0, resumed=True) == 30


# -------------------------------------------------------------------- how much


def test_promises_count_as_much_as_they_were_kept() -> None:
    cache = cache_of()
    trust = trust_in(cache, 100.0)
    assert trust.share == 1.0
    for turn in range(3):
        ask(cache, 1000 * turn, ttl=100.0, at=0.0)
    cache.pass_time(100.0)
    assert cache.stats.promises_broken == 3
    f = 1 - 1 / 64
    broken = 1 + f + f * f
    assert trust.share == pytest.approx(2 / (2 + broken))
    ask(cache, 9000, ttl=90.0)
    ask(cache, 9000, 30)
    kept = 1.0
    assert trust.share == pytest.approx((2 + kept) / (2 + kept + broken * f))
    assert trust_in(cache, 10.0).share == 1.0, "of another magnitude"


def test_an_eviction_within_the_ttl_is_a_part_of_a_broken_promise() -> None:
    cache = cache_of()
    ask(cache, 0, ttl=100.0, at=0.0)
    cache.pass_time(25.0)
    cache.memory.evict_snapshot()
    trust = trust_in(cache, 100.0)
    assert trust.broken == pytest.approx(0.25)
    assert (cache.stats.promises_evicted, cache.stats.promises_broken) == (1, 0)


def test_even_a_long_ttl_counts_more_than_none() -> None:
    """As far as nothing else was seen of either."""
    cache = cache_of()
    ask(cache, 0, ttl=1e7, at=0.0)
    ask(cache, 1000, at=0.0)
    assert order(cache) == [1000, 0]


def test_pace() -> None:
    pace = Pace()
    assert pace.admissions_within(5.0) == MOST_ADMISSIONS
    for now in (100.0, 100.5, 101.0, 101.5):
        pace.pass_to(now)
        pace.admitted()
    assert pace.seconds_apart == pytest.approx(0.5)
    assert pace.admissions_within(5.0) == pytest.approx(10.0)
    assert pace.admissions_within(0.1) == 1.0
    assert pace.admissions_within(1e30) == MOST_ADMISSIONS
    pace.pass_to(50.0)
    assert pace.now == 101.5, "time does not run backwards"


def test_what_is_left_of_a_ttl_tells_the_rate() -> None:
    """With an admission in each second, and TTLs of up to 64 seconds."""
    ttls = Ttls()
    for now in range(10):
        ttls.pace.pass_to(float(now))
        ttls.pace.admitted()
    reuse = ReuseWithTtls(ttls)
    begun = PromisedClass(SnapshotKind.TURN_END, 6, True)
    running = PromisedClass(SnapshotKind.TURN_END, 6, False)
    for age in (0, 1, 10, 32, 63, 64, 1000):
        left = max(64.0 - age, 1.0)
        assert reuse.rate(begun, age) == reuse.rate_if_certain(begun, age, left)
        whole = reuse.rate_if_certain(running, age, 64.0)
        assert reuse.rate(running, age) == whole
    assert reuse.rate(begun, 63) == 1.0 > reuse.rate(begun, 32) > 1 / 32
    trusted = reuse.rate(begun, 32)
    ttls.trust(6).observe(broken=2.0)
    assert reuse.rate(begun, 32) == pytest.approx(trusted / 2)
    assert reuse.rate(PromisedClass(SnapshotKind.TURN_END, 5, True), 31) == 1.0


@pytest.mark.parametrize("assumed", [1e-9, 0.01, 0.5, 0.99])
@pytest.mark.parametrize("age", [0, 1, 4, 1024, 1 << 22])
@pytest.mark.parametrize("within", [1.0, 1.5, 10.0, 1000.0, 1e6])
def test_a_certain_use(assumed: float, age: int, within: float) -> None:
    """It is worth at least the use at the last moment, and at most one at once."""
    reuse = ReuseModel(lambda kind: assumed)
    rate = reuse.rate_if_certain("a", age, within)
    assert 0.999 / within <= rate <= 1.0
    if within > 100:
        assert rate >= 0.999 * min(reuse.rate("a", age), 1.0)
    assert reuse.rate_if_certain("a", age, 2 * within) <= rate * 1.01


def test_a_certain_use_comes_when_it_was_seen_to_come() -> None:
    """Nothing is used within 16 admissions, all within 32; the TTL is far longer."""
    reuse = ReuseModel(lambda kind: 0.5)
    for now in range(200):
        group = reuse.enter("a", now, now)
        reuse.leave("a", group, now + 20)
        reuse.observe("a", 20, now + 20, used=True)
    assert reuse.rate_if_certain("a", 0, 1e5) == pytest.approx(1 / 24, rel=0.5)
    assert reuse.rate_if_certain("a", 64, 1e5) < reuse.rate_if_certain("a", 0, 1e5) / 2
