# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
import random

from hybrid_plugin.core.policy.priority_queue import PriorityOrder


def order_of(**priorities: float) -> PriorityOrder[str]:
    order: PriorityOrder[str] = PriorityOrder()
    for member, priority in priorities.items():
        order.put(member, priority)
    return order


def test_least_first() -> None:
    order = order_of(a=3, b=1, c=2, d=-math.inf)
    assert list(order) == ["d", "b", "c", "a"]
    assert order.first() == "d"
    assert len(order) == 4


def test_of_equals_the_one_that_was_put_first() -> None:
    order = order_of(a=1, b=1)
    order.put("a", 1)
    assert list(order) == ["b", "a"]


def test_putting_again_moves() -> None:
    order = order_of(a=1, b=2)
    order.put("a", 3)
    assert (order.first(), len(order), order.priority("a")) == ("b", 2, 3)
    order.put("a", 0)
    assert order.first() == "a"


def test_discarding() -> None:
    order = order_of(a=1, b=2)
    order.discard("a")
    order.discard("nobody")
    assert order.first() == "b"
    assert "a" not in order and "b" in order
    order.discard("b")
    assert order.first() is None


def test_a_member_that_comes_back_counts_once() -> None:
    order = order_of(a=1, b=2)
    order.discard("a")
    order.put("a", 5)
    assert list(order) == ["b", "a"]


def test_like_sorting_a_dictionary() -> None:
    rng = random.Random(5)
    order: PriorityOrder[int] = PriorityOrder()
    model: dict[int, tuple[int, int]] = {}
    for step in range(5000):
        member = rng.randrange(40)
        if rng.random() < 0.3:
            order.discard(member)
            model.pop(member, None)
        else:
            priority = rng.randrange(100)
            order.put(member, priority)
            model[member] = (priority, step)
        expected = min(model, key=lambda m: model[m], default=None)
        assert order.first() == expected
    assert list(order) == sorted(model, key=lambda m: model[m])


def test_old_entries_do_not_pile_up() -> None:
    order = order_of(a=0, b=1)
    for step in range(1000):
        order.put("b", step)
    assert len(order._heap) < 100
