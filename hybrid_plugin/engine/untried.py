# SPDX-License-Identifier: Apache-2.0
"""Features that are written and not yet tested where they run: refused but in tests.

A feature for GPUs alone cannot be shown on a CPU.  Until its tests have passed on
GPUs it is refused, whatever the options say.  Those tests name it in an environment
variable, which all processes of an engine inherit.
"""

from __future__ import annotations

import os
from typing import Final

TRIED: Final = "HYBRID_PLUGIN_TRY"
"""Environment variable: names of features, divided by commas, that are served all the
same.  For tests: answers may be wrong."""
STAGES: Final = "stages"
"""Pipeline parallelism on GPUs."""
CONTEXT: Final = "context-parallelism"
"""Decode context parallelism."""
SCALES: Final = "kv-scales"
"""KV with scales beside it, on GPUs."""


def is_refused(feature: str) -> bool:
    """Whether a feature that no GPU has shown to be right is not to be tried here."""
    names = os.environ.get(TRIED, "").split(",")
    return feature not in (name.strip() for name in names)
