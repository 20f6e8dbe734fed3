# SPDX-License-Identifier: Apache-2.0
"""The package cuda-bindings: without it, this process cannot call NVIDIA's driver."""

from __future__ import annotations

import importlib.util


def are_installed() -> bool:
    """Whether the package is there; nothing of it is imported."""
    try:
        return importlib.util.find_spec("cuda.bindings") is not None
    except ImportError:  # nothing of "cuda" is there
        return False
