# SPDX-License-Identifier: Apache-2.0
"""What an engine and the plugin make of an architecture, whatever the model's sizes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from hybrid_plugin.engine.outlook import Prospect


class Provider(StrEnum):
    """Whose class runs an architecture."""

    ENGINE = "engine"
    OURS = "hybrid-plugin"
    NOBODY = "nobody"


@dataclass(frozen=True, slots=True)
class Standing:
    """Of one architecture with state layers, in one engine."""

    architecture: str
    provider: Provider
    prospect: Prospect
    """Of the prefix cache."""
    reason: str = ""
    """Why it is not served, a phrase."""
    note: str = ""
    """Where it is, if not everywhere, a phrase."""
