# SPDX-License-Identifier: Apache-2.0
"""What is compared: every engine's own configurations, and the plugin's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.elastic_workloads import Scale

ELASTIC = "elastic"
CAPTURE_SIZES = [1, 2, 4, 8, *range(16, 257, 16)]
"""Sequences in a graph: fine enough that no split pays for padding."""
SLACK = 16
"""Tokens that a sequence may have besides the longest one's."""


@dataclass(frozen=True)
class Setup:
    """What all configurations of a run share."""

    model: str
    cache_mib: int
    """Of each engine."""
    scale: Scale
    experts: int | None = None
    """In place of the model's; fewer, if more engines are to fit."""
    on_gpu: bool = True

    @property
    def longest(self) -> int:
        """Tokens that an engine's longest sequence may have."""
        return self.scale.longest + SLACK

    @property
    def model_overrides(self) -> dict[str, int]:
        """What the model's configuration says differently here."""
        experts = {} if self.experts is None else {"num_experts": self.experts}
        return {"max_position_embeddings": self.longest, **experts}


@dataclass(frozen=True)
class Configuration:
    """What one side has for itself."""

    flags: Mapping[str, Any] = field(default_factory=dict)
    """Engine arguments."""
    options: Mapping[str, Any] | None = None
    """Of the plugin; None where the engine runs without it."""


def of_plugin(ratios: Sequence[float]) -> dict[str, Configuration]:
    """Fixed splits and elastic pools; by name.

    Args:
        ratios: shares of the memory for states.
    """
    fixed: dict[str, dict[str, Any]] = {"fixed, automatic": {}}
    fixed |= {f"fixed, {r:.0%} states": {"state_memory_ratio": r} for r in ratios}
    sides = {
        name: Configuration(options={"enabled": True, "elastic": False} | options)
        for name, options in fixed.items()
    }
    elastic = Configuration(options={"enabled": True, "elastic": True})
    return sides | {ELASTIC: elastic}
