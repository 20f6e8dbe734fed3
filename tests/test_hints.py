# SPDX-License-Identifier: Apache-2.0
"""What a request may say about the cache."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from hybrid_plugin.engine.hints import Hints, kept_positions


def test_positions_are_read() -> None:
    assert kept_positions({"hybrid_keep": [3, 1200], "other": 1}) == (3, 1200)
    assert kept_positions({"other": 1}) == kept_positions(None) == ()


@pytest.mark.parametrize("value", [5, "12", [1.5], [-1], [True], ["1"], {"1": 2}])
def test_anything_else_is_told_of(value: Any) -> None:
    with pytest.raises(ValueError, match="hybrid_keep takes a list of positions"):
        kept_positions({"hybrid_keep": value})


def test_a_bad_hint_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    hints = Hints(logging.getLogger("test"))
    assert [hints.keep({"hybrid_keep": v}) for v in ("x", [7], "y")] == [(), (7,), ()]
    assert len(caplog.records) == 1 and "got 'x'" in caplog.text
