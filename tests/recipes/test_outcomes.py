# SPDX-License-Identifier: Apache-2.0
"""What becomes of each recipe in the installed engine is what is written down."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from recipes.document import ENGINES
from run_recipes import OUTCOMES, ROOT

from hybrid_plugin.tools.doctor.installed import find_engine
from tests.recipes.conftest import SUMMARIES

RECORDED = json.loads(OUTCOMES.read_text())


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.timeout(1800)
def test_outcomes_are_those_recorded(engine: str) -> None:
    installed = find_engine(engine)
    if installed is None:
        pytest.skip(f"{engine} is not installed here")
    if installed.version != RECORDED[engine]["version"]:
        pytest.skip(f"recorded with {engine} {RECORDED[engine]['version']}")
    if torch.cuda.is_available():
        pytest.skip("what a GPU is pretended to be, this machine's may not be")
    done = subprocess.run(
        [sys.executable, str(ROOT / "ci" / "run_recipes.py"), f"--engine={engine}"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-3000:]}"
    (summary,) = [line for line in done.stdout.splitlines() if ": served: " in line]
    SUMMARIES.append(summary)
