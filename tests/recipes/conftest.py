# SPDX-License-Identifier: Apache-2.0
"""The last lines of a run say how many recipes are served."""

from __future__ import annotations

from typing import Any

SUMMARIES: list[str] = []
"""What the trials of this run ended with."""


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for summary in SUMMARIES:
        terminalreporter.write_line(summary)
