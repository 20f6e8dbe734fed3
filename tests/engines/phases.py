# SPDX-License-Identifier: Apache-2.0
"""Phases that are served in a process of their own, which prints what it found."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.engines.messages import Launch
from tests.engines.warm_start import completed

_MARK = "FOUND "


@dataclass(frozen=True)
class Finding:
    """What a process found, and all that it printed."""

    found: dict[str, Any]
    log: str


def run_phases(
    module: str,
    arguments: Sequence[str],
    imports: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Finding:
    """Run a module of `tests.engines` and read the JSON that it printed.

    Args:
        module: its name there; it calls `report` once.
        arguments: of its command line.
        imports: as of a `Launch`.
        environment: likewise, besides what every such process gets.
    """
    command = [sys.executable, "-m", f"tests.engines.{module}", *arguments]
    variables = {"OMP_NUM_THREADS": "1"} | dict(environment or {})
    done = completed(Launch(command, variables, imports))
    log = done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith(_MARK)]
    assert done.returncode == 0 and len(lines) == 1, log[-4000:]
    return Finding(json.loads(lines[0].removeprefix(_MARK)), log)


def report(found: dict[str, Any]) -> None:
    """Print what was found, for `run_phases`."""
    print(_MARK + json.dumps(found), flush=True)
