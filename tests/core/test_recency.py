# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from hybrid_plugin.core.recency import RecencyList


def filled(members: str) -> RecencyList[str]:
    order: RecencyList[str] = RecencyList()
    for member in members:
        order.append(member)
    return order


def test_oldest_comes_first() -> None:
    assert list(filled("abc")) == ["a", "b", "c"]


def test_empty() -> None:
    order = filled("")
    assert len(order) == 0
    assert list(order) == []
    assert "a" not in order


def test_touch_makes_most_recent() -> None:
    order = filled("abc")
    order.touch("a")
    assert list(order) == ["b", "c", "a"]
    order.touch("a")
    assert list(order) == ["b", "c", "a"]


@pytest.mark.parametrize(
    ("older", "expected"),
    [("a", "axbc"), ("b", "abxc"), ("c", "abcx")],
    ids=["after first", "in the middle", "after last"],
)
def test_insert_after(older: str, expected: str) -> None:
    order = filled("abc")
    order.insert_after("x", older)
    assert "".join(order) == expected


@pytest.mark.parametrize("member", ["a", "b", "c"])
def test_remove(member: str) -> None:
    order = filled("abc")
    order.remove(member)
    assert "".join(order) == "abc".replace(member, "")
    assert member not in order
    assert len(order) == 2


def test_discard_takes_absent_members() -> None:
    order = filled("ab")
    order.discard("z")
    order.discard("a")
    assert list(order) == ["b"]


def test_the_member_last_yielded_may_be_removed() -> None:
    order = filled("abcd")
    for member in order:
        order.remove(member)
    assert list(order) == []


def test_absent_members_cannot_be_removed_or_touched() -> None:
    order = filled("a")
    with pytest.raises(KeyError):
        order.remove("z")
    with pytest.raises(KeyError):
        order.touch("z")
    assert list(order) == ["a"]


def test_no_member_twice() -> None:
    order = filled("ab")
    with pytest.raises(ValueError, match="'a' is in the list already"):
        order.append("a")
    with pytest.raises(ValueError, match="'b' is in the list already"):
        order.insert_after("b", "a")
    assert list(order) == ["a", "b"]
