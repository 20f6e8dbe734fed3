# SPDX-License-Identifier: Apache-2.0
"""An environment per row, and the engine tests in it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from hybrid_plugin.upstream.matrix import Row

ROOT = Path(__file__).parents[1]


def run_engine_tests(row: Row, folder: Path) -> str | None:
    """Make the row's environment, run its tests; returns what went wrong, or None.

    The environment is kept in `folder` and used again.
    """
    assert row.install is not None
    environment = folder / f"{row.name}.venv"
    variables = {**os.environ, **row.install.variables, "PYTHON": f"python{row.python}"}
    made = subprocess.run(
        [ROOT / row.install.script, environment, "dev"], cwd=ROOT, env=variables
    )
    if made.returncode:
        return f"{row.name}: {row.install.script} failed with {made.returncode}."
    tested = subprocess.run(
        [environment / "bin" / "python", "-m", "pytest", "-q", *row.tests], cwd=ROOT
    )
    if tested.returncode:
        return f"{row.name}: its engine tests failed with {tested.returncode}."
    return None
