# SPDX-License-Identifier: Apache-2.0
"""Random tests have no time limit: a busy machine is no failure."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
