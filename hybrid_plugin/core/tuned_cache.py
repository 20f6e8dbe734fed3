# SPDX-License-Identifier: Apache-2.0
"""Gives a cache a tuner that replays through copies of it."""

from __future__ import annotations

from hybrid_plugin.core.cache import HybridCache
from hybrid_plugin.core.memory.pools import PagePool, SlotPool
from hybrid_plugin.core.policy.eviction import FlopAware
from hybrid_plugin.core.policy.tuning import AlphaTuner


def tuner_of(cache: HybridCache) -> AlphaTuner:
    """A tuner of the policy of `cache`, by copies of its size.

    Raises:
        ValueError: if its policy has no weight, or its pools no fixed size.
    """
    if not isinstance(cache.eviction, FlopAware):
        raise ValueError("only a flop-aware policy has a weight to find")
    if cache.broker.moves_memory or cache.windows:
        raise ValueError("copies are made of two pools of fixed size only")

    def build(policy: FlopAware) -> HybridCache:
        return HybridCache(
            PagePool(cache.pages.capacity),
            SlotPool(cache.slots.capacity),
            cache.page_size,
            cache.policy,
            eviction=policy,
        )

    return AlphaTuner(cache.eviction, build)
