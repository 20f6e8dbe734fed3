# SPDX-License-Identifier: Apache-2.0
"""Random tests have no time limit: a busy machine is no failure; sessions end soon."""

from __future__ import annotations

import gc

from hypothesis import settings

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


def pytest_sessionfinish() -> None:
    """Leave nothing to look through again.

    pytest collects garbage five times at its end, which takes seconds with an engine's
    modules; what is left after once stays.
    """
    gc.collect()
    gc.freeze()
