# SPDX-License-Identifier: Apache-2.0
"""What differs between engines, behind one interface; tests are written once.

The engine is the one that is installed, or HYBRID_TEST_ENGINE names it.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

from tests.engines.drivers.driver import (
    Decision,
    Driver,
    Model,
    Refusal,
    Setup,
    Stages,
    Variant,
)

__all__ = [
    "Decision",
    "Driver",
    "Model",
    "Refusal",
    "Setup",
    "Stages",
    "Variant",
    "installed_driver",
]

ENGINES = ("vllm", "sglang")


def installed_driver() -> Driver | None:
    """The driver of the engine under test; None where no engine is installed.

    Raises:
        ValueError: if HYBRID_TEST_ENGINE names no engine.
    """
    named = os.environ.get("HYBRID_TEST_ENGINE")
    if named is not None and named not in ENGINES:
        raise ValueError(f"HYBRID_TEST_ENGINE is {named!r}, not one of {ENGINES}")
    found = named or next((name for name in ENGINES if find_spec(name)), None)
    if found == "vllm":
        from tests.engines.drivers.vllm import VllmDriver

        return VllmDriver()
    if found == "sglang":
        from tests.engines.drivers.sglang import SglangDriver

        return SglangDriver()
    return None
