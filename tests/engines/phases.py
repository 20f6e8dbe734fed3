# SPDX-License-Identifier: Apache-2.0
"""Phases that are served in a process of their own, which prints what it found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
_MARK = "FOUND "


@dataclass(frozen=True)
class Finding:
    """What a process found, and all that it printed."""

    found: dict[str, Any]
    log: str


def run_phases(module: str, arguments: Sequence[str]) -> Finding:
    """Run a module of `tests.engines` and read the JSON that it printed.

    Args:
        module: its name there; it calls `report` once.
        arguments: of its command line.
    """
    done = subprocess.run(
        [sys.executable, "-m", f"tests.engines.{module}", *arguments],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines = [x for x in done.stdout.splitlines() if x.startswith(_MARK)]
    assert done.returncode == 0 and len(lines) == 1, done.stdout[-4000:]
    return Finding(json.loads(lines[0].removeprefix(_MARK)), done.stdout)


def report(found: dict[str, Any]) -> None:
    """Print what was found, for `run_phases`."""
    print(_MARK + json.dumps(found), flush=True)
