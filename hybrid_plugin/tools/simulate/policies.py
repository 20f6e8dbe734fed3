# SPDX-License-Identifier: Apache-2.0
"""Eviction policies by name, ready for a simulation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hybrid_plugin.config import ConfigError
from hybrid_plugin.core.policy.eviction import FlopAware, LeastRecentlyUsed, UsedFirst
from hybrid_plugin.tools.plan.shape import ModelShape

POLICIES = ("lru", "used-first", "flop-aware")


@dataclass(frozen=True, slots=True)
class PolicyChoice:
    """An eviction policy, and what is to be known of the model for it."""

    name: str
    shape: ModelShape | None = None
    """Without one, computing and keeping a token cost the same everywhere, and a
    state costs nothing."""
    alpha: float | None = None
    """Weight of a FLOP-aware policy; None to find it by replay."""

    def __post_init__(self) -> None:
        if self.alpha is not None and self.name != "flop-aware":
            raise ConfigError("--alpha is for --policy flop-aware only; leave it out.")
        if self.alpha is not None and not 0 <= self.alpha <= 1000:
            raise ConfigError(f"--alpha must lie between 0 and 1000, got {self.alpha}.")

    @property
    def is_tuned(self) -> bool:
        """Whether the weight is found while the trace is served."""
        return self.name == "flop-aware" and self.alpha is None

    def build(self) -> LeastRecentlyUsed:
        """A new policy that has seen nothing yet."""
        if self.name == "lru":
            return LeastRecentlyUsed()
        if self.name == "used-first":
            return UsedFirst()
        return self._flop_aware()

    def _flop_aware(self) -> FlopAware:
        cost: Callable[[float], float] = float
        token_bytes, slot_bytes = 1.0, 0.0
        if self.shape is not None:
            cost = self.shape.prefill_flops
            token_bytes, slot_bytes = self.shape.token_bytes, self.shape.state_bytes
        policy = FlopAware(cost, token_bytes=token_bytes, slot_bytes=slot_bytes)
        return policy if self.alpha is None else policy.with_alpha(self.alpha)
