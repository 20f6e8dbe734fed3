# SPDX-License-Identifier: Apache-2.0
"""Modules that run an engine in a process of their own and print what they found."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from tests.engines.messages import Launch
from tests.engines.warm_start import completed

MARK = "FOUND "


def report(found: object) -> None:
    """Print what was found, in the process that found it."""
    print(MARK + json.dumps(found), flush=True)


def found_by(
    module: str, *arguments: str, imports: Sequence[str] = ()
) -> tuple[Any, str]:
    """Run a module that calls `report` once.

    Args:
        module: its name.
        arguments: of its command line.
        imports: as of a `Launch`.

    Returns:
        What it reported, and all that it printed.
    """
    command = [sys.executable, "-m", module, *arguments]
    done = completed(Launch(command, {"OMP_NUM_THREADS": "1"}, imports))
    log = done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    assert done.returncode == 0 and len(lines) == 1, log[-4000:]
    return json.loads(lines[0].removeprefix(MARK)), log
