# SPDX-License-Identifier: Apache-2.0
"""What a request may say about the cache."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from hybrid_plugin.engine.hints import (
    MAX_POSITIONS,
    MAX_TTL,
    Hints,
    kept_positions,
    ttl_of,
)


def test_positions_are_read() -> None:
    assert kept_positions({"hybrid_keep": [3, 1200], "other": 1}) == (3, 1200)
    assert kept_positions({"other": 1}) == kept_positions(None) == ()
    assert kept_positions({"hybrid_keep": None}) == ()


@pytest.mark.parametrize("extra", ["a string", 5, 1.5, True, [], [1], [{}], {}])
def test_extra_parameters_of_any_type_may_hold_none(extra: Any) -> None:
    assert kept_positions(extra) == ()


def test_only_so_many_positions_are_taken() -> None:
    most = list(range(MAX_POSITIONS))
    assert kept_positions({"hybrid_keep": most}) == tuple(most)
    with pytest.raises(ValueError, match="takes at most 64 positions, got 240000"):
        kept_positions({"hybrid_keep": list(range(240_000))})


def test_a_huge_hint_is_not_looked_through_nor_repeated() -> None:
    class Watched(list[int]):
        def __iter__(self) -> Iterator[int]:
            raise AssertionError("the whole list was read")

    with pytest.raises(ValueError, match="at most"):
        kept_positions({"hybrid_keep": Watched(range(240_000))})
    with pytest.raises(ValueError, match="takes a list") as error:
        kept_positions({"hybrid_keep": "9" * 1_000_000})
    assert len(str(error.value)) < 200


@pytest.mark.parametrize(
    "value", [5, "12", [1.5], [-1], [True], ["1"], {"1": 2}, [[]], [None]]
)
def test_anything_else_is_told_of(value: Any) -> None:
    with pytest.raises(ValueError, match="hybrid_keep takes a list of positions"):
        kept_positions({"hybrid_keep": value})


def test_a_bad_hint_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    hints = Hints(logging.getLogger("test"))
    assert [hints.keep({"hybrid_keep": v}) for v in ("x", [7], "y")] == [(), (7,), ()]
    assert len(caplog.records) == 1 and "got 'x'" in caplog.text


def test_ttls_are_read() -> None:
    assert ttl_of({"hybrid_ttl": 60, "other": 1}) == 60.0
    assert ttl_of({"hybrid_ttl": 0.5}) == 0.5
    assert ttl_of({"hybrid_ttl": 0}) == 0.0
    assert ttl_of({"hybrid_ttl": MAX_TTL}) == MAX_TTL
    assert ttl_of({"hybrid_ttl": None}) is ttl_of({}) is ttl_of("text") is None


@pytest.mark.parametrize(
    "value",
    [-1, "60", True, [60], {}, MAX_TTL + 1, 10**400, 1e400, float("nan")],
    ids=range(9),
)
def test_anything_else_is_no_ttl(value: Any) -> None:
    with pytest.raises(ValueError, match="hybrid_ttl takes a number of sec") as error:
        ttl_of({"hybrid_ttl": value})
    assert len(str(error.value)) < 200


def test_the_first_bad_hint_of_any_kind_is_told_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    hints = Hints(logging.getLogger("test"))
    assert [hints.ttl({"hybrid_ttl": v}) for v in ("x", 7, -1)] == [None, 7.0, None]
    assert hints.keep({"hybrid_keep": "y"}) == ()
    assert len(caplog.records) == 1 and "got 'x'" in caplog.text
