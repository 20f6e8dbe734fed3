# SPDX-License-Identifier: Apache-2.0
"""Looks at the memory of pools from within a server; see `sitecustomize`."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

PERIOD_S = 0.25
"""The watch writes what it saw so often."""


def watch_environment(report: Path, *, packed: bool) -> dict[str, str]:
    """The environment variables that have a server write to `report`.

    Args:
        report: the file.
        packed: whether the layers of a page may lie side by side.
    """
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    apart = {} if packed else {"HYBRID_TEST_PAGES_APART": "1"}
    return apart | {
        "PYTHONPATH": os.pathsep.join(paths),
        "HYBRID_TEST_WATCH": str(report),
    }


def read(report: Path) -> dict[str, int]:
    """What the pools look like now, and the most that there ever was."""
    time.sleep(3 * PERIOD_S)
    found: dict[str, int] = json.loads(report.read_text())
    return found
