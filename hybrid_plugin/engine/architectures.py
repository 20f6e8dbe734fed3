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


NO_ATTENTION = "it has state layers only, which the engine runs without a prefix cache"


def of_ours(name: str, mixed: bool) -> Standing:
    """Of one of our own classes, where the engine has none.

    Args:
        name: of the architecture.
        mixed: whether it has attention layers beside its state layers.
    """
    if mixed:
        return Standing(name, Provider.OURS, Prospect.SERVED)
    return Standing(name, Provider.OURS, Prospect.LEFT_ALONE, NO_ATTENTION)
