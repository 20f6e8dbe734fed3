# SPDX-License-Identifier: Apache-2.0
"""Eviction policies by name, ready for a simulation."""

from __future__ import annotations

from hybrid_plugin.core.policy.eviction import ExpectedSaving, LeastRecentlyUsed

DEFAULT_POLICY = "expected-saving"
"""The plugin's."""
POLICIES = (DEFAULT_POLICY, "lru")
"""It, and plain recency to compare it with."""


def build_policy(
    name: str, *, token_bytes: float, slot_bytes: float
) -> LeastRecentlyUsed:
    """A new policy that has seen nothing yet.

    Args:
        name: one of `POLICIES`.
        token_bytes: KV of a token.
        slot_bytes: states of a sequence.
    """
    if name == "lru":
        return LeastRecentlyUsed()
    return ExpectedSaving(token_bytes=token_bytes, slot_bytes=slot_bytes)
