# SPDX-License-Identifier: Apache-2.0
"""The command line, and what it says when something is wrong: one sentence."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Sequence

from hybrid_plugin.cli import main


def run_quietly(arguments: Sequence[str]) -> tuple[int, str, str]:
    """Run a command; returns its status, output and errors."""
    out, error = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        try:
            status = main(arguments)
        except SystemExit as end:
            assert isinstance(end.code, int)
            status = end.code
    return status, out.getvalue(), error.getvalue()


def fails_with_one_sentence(arguments: Sequence[str], sentence: str) -> None:
    """The command must fail, print nothing, and say what is wrong in one line.

    Args:
        arguments: of the command.
        sentence: a pattern that the line must contain.
    """
    status, out, error = run_quietly(arguments)
    assert status != 0
    assert out == ""
    assert len(error.splitlines()) == 1, error
    assert error.endswith((".\n", "?\n"))
    assert re.search(sentence, error), error
