# SPDX-License-Identifier: Apache-2.0
"""Every refusal says whose it is, once."""

from __future__ import annotations

import pytest

from hybrid_plugin.config import ConfigError
from hybrid_plugin.engine.refusals import cannot_serve, ending_the_server, named


@named()
def called_by_an_engine(error: Exception) -> None:
    raise error


@pytest.mark.parametrize("text", ["drop it.", "hybrid-plugin: drop it."])
def test_refusals_are_named_once(text: str) -> None:
    with pytest.raises(ConfigError) as refusal, named():
        called_by_an_engine(ConfigError(text))
    assert str(refusal.value) == "hybrid-plugin: drop it."


def test_other_errors_are_the_engine_s() -> None:
    with pytest.raises(RuntimeError, match=r"^no memory$"):
        called_by_an_engine(RuntimeError("no memory"))


def test_a_refusal_ends_a_server() -> None:
    expected = "hybrid-plugin: it cannot serve this: drop --flag."
    with pytest.raises(SystemExit) as end, ending_the_server():
        raise cannot_serve("drop --flag.")
    assert end.value.code == expected
