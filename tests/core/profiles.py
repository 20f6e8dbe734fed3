# SPDX-License-Identifier: Apache-2.0
"""How long the random tests run: HYPOTHESIS_PROFILE is `ci` (default) or `soak`."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "ci")
SOAK_FACTOR = 50 if PROFILE == "soak" else 1
"""How much more the seeded traffic does than in CI."""

_QUIET = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]


def machine_settings(examples: int = 150) -> settings:
    """Settings of a state machine; no deadline, so no timed assertion.

    Args:
        examples: runs of it in CI, of some 45 steps each.  Of caches that are broken
            on purpose, the machine with elastic pools catches six by its 77th, and the
            one with a host tier 15 by its 26th; seeded traffic finds the others.
    """
    if PROFILE == "soak":
        return settings(
            max_examples=5000,
            stateful_step_count=120,
            deadline=None,
            suppress_health_check=_QUIET,
        )
    return settings(
        max_examples=examples,
        stateful_step_count=60,
        deadline=None,
        derandomize=True,
        suppress_health_check=_QUIET,
    )
