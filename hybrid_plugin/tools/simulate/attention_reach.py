# SPDX-License-Identifier: Apache-2.0
"""How many earlier tokens the attention of a model reads, windows considered."""

from __future__ import annotations

from dataclasses import dataclass

from hybrid_plugin.core.memory.attention_windows import FULL_ATTENTION, AttentionWindow
from hybrid_plugin.tools.plan.shape import ModelShape, pairs


@dataclass(frozen=True, slots=True)
class AttentionReach:
    """Windows, and the share of a token's KV bytes that belongs to each."""

    shares: tuple[tuple[AttentionWindow, float], ...] = ((FULL_ATTENTION, 1.0),)

    @classmethod
    def of(cls, shape: ModelShape) -> AttentionReach:
        """Of a model; empty for one without attention."""
        total = shape.token_bytes
        return cls(
            tuple(
                (group.window, group.count * group.token_bytes / total)
                for group in shape.attention
            )
        )

    def read(self, tokens: int) -> float:
        """Tokens that the last one of `tokens` attends to, itself included."""
        return sum(
            share * (tokens - max(window.first_needed(tokens - 1), 0))
            for window, share in self.shares
        )

    def pairs(self, start: int, end: int) -> float:
        """Pairs of tokens that computing those from `start` to `end` looks at."""
        return sum(
            share * (pairs(window, end) - pairs(window, start))
            for window, share in self.shares
        )
