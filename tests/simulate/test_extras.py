# SPDX-License-Identifier: Apache-2.0
"""What needs other packages: the progress bar and the picture."""

from __future__ import annotations

import io
import sys

import pytest

from hybrid_plugin.tools.simulate.progress import progress
from tests.oneliners import fails_with_one_sentence


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def drawn(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO) -> str:
    """What a bar of three steps writes to standard error."""
    monkeypatch.setattr(sys, "stderr", stream)
    with progress("Replaying", 3) as advance:
        for _ in range(3):
            advance()
    return stream.getvalue()


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    monkeypatch.setenv("TERM", "xterm")
    assert "Replaying" in drawn(monkeypatch, Terminal())


def test_nothing_in_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    assert drawn(monkeypatch, io.StringIO()) == ""


def test_without_rich_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    text = drawn(monkeypatch, Terminal())
    assert text == "Replaying (install `rich` for a progress bar)\n"


def test_without_matplotlib_a_picture_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    flags = ["simulate", "--plot", "run.png"]
    fails_with_one_sentence(flags, r"--plot needs matplotlib: pip install")
