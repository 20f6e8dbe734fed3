# SPDX-License-Identifier: Apache-2.0
"""The one exception for what a user can put right."""

from __future__ import annotations


class ConfigError(ValueError):
    """An option that cannot be served; the message says what to do about it."""
