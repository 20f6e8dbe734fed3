# SPDX-License-Identifier: Apache-2.0
"""What tests plant into server processes; `sitecustomize` says which there are."""

from __future__ import annotations

import os
from pathlib import Path


def planted(fault: str | None, pools: tuple[int, int] | None = None) -> dict[str, str]:
    """The environment variables that plant a fault, or sizes of fixed pools.

    Args:
        fault: its name; None for none.
        pools: pages and slots; None for what the memory holds.
    """
    if fault is None and pools is None:
        return {}
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    variables = {"PYTHONPATH": os.pathsep.join(paths)}
    if fault is not None:
        variables["HYBRID_TEST_FAULT"] = fault
    if pools is not None:
        variables["HYBRID_TEST_POOLS"] = ",".join(map(str, pools))
    return variables


def counting_live(file: Path) -> dict[str, str]:
    """The environment of a server that counts its sequences.

    Args:
        file: gets the most that were live at once.
    """
    return planted("none") | {"HYBRID_TEST_MOST_LIVE": str(file)}
