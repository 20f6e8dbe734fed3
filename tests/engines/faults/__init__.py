# SPDX-License-Identifier: Apache-2.0
"""Faults that tests plant into server processes; `sitecustomize` says which."""

from __future__ import annotations

import os
from pathlib import Path


def fault_environment(name: str | None) -> dict[str, str]:
    """The environment variables that plant a fault; none for None."""
    if name is None:
        return {}
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(paths), "HYBRID_TEST_FAULT": name}
