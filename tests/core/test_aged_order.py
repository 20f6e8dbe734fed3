# SPDX-License-Identifier: Apache-2.0
"""An order by worth that changes with age."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable

from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_plugin.core.policy.aged_order import AgedOrder, Rank
from hybrid_plugin.core.policy.eviction import ConstantRates
from hybrid_plugin.core.policy.exposure import interval_of, interval_start


class Falling(ConstantRates):
    """Rates that fall from interval to interval; counts who is there."""

    def __init__(self) -> None:
        self.scale = 1.0
        self.there: list[Hashable] = []

    def rate(self, kind: Hashable, age: int) -> float:
        power = 1.0 if kind == "fast" else 0.5
        return self.scale * (interval_start(interval_of(age)) + 1.0) ** -power

    def enter(self, kind: Hashable, since: int, now: int) -> int:
        self.there.append((kind, since))
        return since

    def leave(self, kind: Hashable, group: int, now: int) -> None:
        self.there.remove((kind, group))


def order_of(**values: float) -> AgedOrder[str]:
    order: AgedOrder[str] = AgedOrder(ConstantRates())
    for member, value in values.items():
        order.put(member, Rank("kind", 0, value), 0)
    return order


def first(order: AgedOrder[str], now: int = 0) -> str | None:
    found = order.first(now)
    return None if found is None else found[0]


def test_least_first() -> None:
    order = order_of(a=3, b=1, c=2, d=-1)
    assert list(order.ranked(0)) == ["d", "b", "c", "a"]
    assert order.first(0) == ("d", -1)
    assert len(order) == 4


def test_of_equals_the_one_that_was_put_first() -> None:
    order = order_of(a=1, b=1)
    order.put("a", Rank("kind", 0, 1), 0)
    assert list(order.ranked(0)) == ["b", "a"]
    assert first(order) == "b"


def test_putting_again_moves() -> None:
    order = order_of(a=1, b=2)
    order.put("a", Rank("kind", 0, 3), 0)
    assert (first(order), len(order), order.rank("a").value) == ("b", 2, 3)
    order.put("a", Rank("other kind", 0, 0), 0)
    assert first(order) == "a"


def test_discarding() -> None:
    order = order_of(a=1, b=2)
    order.discard("a", 0)
    order.discard("nobody", 0)
    assert first(order) == "b"
    assert "a" not in order and "b" in order
    order.discard("b", 0)
    assert first(order) is None


def test_old_entries_do_not_pile_up() -> None:
    order = order_of(a=0, b=1)
    for step in range(1000):
        order.put("b", Rank("kind", 0, step), 0)
        order.put("c", Rank(step, 0, step), 0)
        assert first(order) == "a"
    assert order._size < 100
    assert len(order._series) < 100


def test_the_order_turns_as_time_goes_by() -> None:
    order: AgedOrder[str] = AgedOrder(Falling())
    order.put("fast", Rank("fast", 0, 10.0), 0)
    order.put("slow", Rank("slow", 0, 3.0), 0)
    assert first(order) == "slow"
    assert first(order, 8) == "slow", "10/9 against 3/3"
    assert first(order, 20) == "fast", "10/17 against 3/4.1"


def test_what_is_learned_meanwhile_counts_when_it_is_an_eighth_older() -> None:
    rates = Falling()
    order: AgedOrder[str] = AgedOrder(rates)
    order.put("a", Rank("fast", 0, 1.0), 0)
    assert order.first(64) == ("a", 1 / 65)
    rates.scale = 2.0
    assert order.first(71) == ("a", 1 / 65)
    assert order.first(72) == ("a", 2 / 65)


def test_of_one_age_and_kind_the_order_is_exact_for_ever() -> None:
    order: AgedOrder[int] = AgedOrder(Falling())
    values = random.Random(3).sample(range(1000), 200)
    for value in values:
        order.put(value, Rank("fast", 0, value), 0)
    for number in range(1, 200):  # later ones make their heaps be merged
        order.put(1000 + number, Rank("fast", number, 1e9), number)
    assert [_pop(order, 200) for _ in values] == sorted(values)


def _pop(order: AgedOrder[int], now: int) -> int:
    found = order.first(now)
    assert found is not None
    order.discard(found[0], now)
    return found[0]


actions = st.lists(
    st.tuples(
        st.sampled_from(["put", "put again", "discard", "evict", "wait", "old"]),
        st.integers(0, 30),
        st.sampled_from(["fast", "slow", "slower"]),
        st.floats(0.1, 100.0),
    ),
    max_size=120,
)


@settings(max_examples=150, deadline=None)
@given(actions)
def test_nearly_the_least_is_found_whatever_happens(
    steps: list[tuple[str, int, str, float]],
) -> None:
    """Ages in a heap differ a little, which may be one interval: a factor of two."""
    rates, now = Falling(), 0
    order: AgedOrder[int] = AgedOrder(rates)
    model: dict[int, Rank] = {}

    def worth(rank: Rank) -> float:
        return rank.value * rates.rate(rank.kind, now - rank.since)

    def put(member: int, rank: Rank) -> None:
        model[member] = rank
        order.put(member, rank, now, observed=member % 5 != 0)

    do: dict[str, Callable[[int, str, float], object]] = {
        "put": lambda n, kind, value: put(len(model) + n, Rank(kind, now, value)),
        "put again": lambda n, kind, value: put(n, Rank(kind, now, value)),
        "old": lambda n, kind, value: put(n, Rank(kind, now // 3, value)),
        "discard": lambda n, kind, value: (model.pop(n, 0), order.discard(n, now)),
        "wait": lambda n, kind, value: None,
    }
    for action, number, kind, value in steps:
        now += number if action == "wait" else number % 2
        found = order.first(now)
        assert (found is None) == (not model)
        if found is not None:
            least = min(map(worth, model.values()))
            assert worth(model[found[0]]) <= 2 * least
            assert least / 2 <= found[1] <= 2 * least
        if action == "evict" and found is not None:
            del model[found[0]]
            order.discard(found[0], now)
        elif action != "evict":
            do[action](number, kind, value)
        assert len(order) == len(model)
        assert {member: order.rank(member) for member in model} == model
        watched = [(r.kind, r.since) for m, r in model.items() if m % 5]
        assert sorted(rates.there, key=str) == sorted(watched, key=str)
        ranked = list(order.ranked(now))
        assert [worth(model[m]) for m in ranked] == sorted(map(worth, model.values()))
