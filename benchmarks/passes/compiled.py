# SPDX-License-Identifier: Apache-2.0
"""Triton kernels that an engine's process compiles or loads, written down as they are.

A kernel that is compiled while requests are served delays them by far more than a pass
takes, and no median shows it.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.passes.log import VARIABLE

_SUFFIX = ".compiled"


def watch() -> None:
    """Begin, in the process that computes; without Triton there is nothing to watch."""
    try:
        from triton import knobs
    except ImportError:
        return
    path = Path(os.environ[VARIABLE] + _SUFFIX)

    def note(*, src: Any, times: Any, cache_hit: bool, **_: Any) -> None:
        one = [time.monotonic(), src.name, cache_hit, times.total / 1e6]
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(one) + "\n")

    knobs.compilation.listener = note


def read(passes: Path, begin: float, end: float) -> dict[str, Any]:
    """Kernels made ready in a span of time.

    Args:
        passes: the file of the passes of the same engine.
        begin: of the span, in seconds of `time.monotonic`.
        end: the same.

    Returns:
        `seconds` that it took, and how often each kernel was `compiled` anew or
        `loaded` from Triton's cache on disk, by name.
    """
    path = Path(f"{passes}{_SUFFIX}")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    found = [one for one in map(json.loads, lines) if begin <= one[0] < end]
    return {
        "seconds": round(sum(one[3] for one in found), 3),
        "compiled": dict(Counter(name for _, name, hit, _ in found if not hit)),
        "loaded": dict(Counter(name for _, name, hit, _ in found if hit)),
    }
