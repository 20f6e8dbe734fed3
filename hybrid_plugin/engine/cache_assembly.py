# SPDX-License-Identifier: Apache-2.0
"""Builds the core cache on the pools that were planned."""

from __future__ import annotations

import math
from dataclasses import replace

from hybrid_plugin.config import ConfigError, HybridConfig
from hybrid_plugin.core.cache import HybridCache
from hybrid_plugin.core.commands import CHUNK
from hybrid_plugin.core.memory.cache_pools import CachePools, FixedPools
from hybrid_plugin.core.memory.layout import CacheLayout
from hybrid_plugin.core.memory.pools import NoSlots, PagePool, SlotPool
from hybrid_plugin.core.memory.window_tables import WindowGroup
from hybrid_plugin.core.policy.concurrency import ConcurrencyTradeoff
from hybrid_plugin.core.policy.costs import pass_tokens_of
from hybrid_plugin.core.policy.eviction import ExpectedSaving
from hybrid_plugin.core.policy.message_boundaries import Delimiters
from hybrid_plugin.core.policy.snapshot_positions import SnapshotPolicy
from hybrid_plugin.core.tiers.host_tier import HostTier
from hybrid_plugin.core.tiers.restores import TransferRates
from hybrid_plugin.engine.sizing import CachePlan


def build_cache(
    plan: CachePlan,
    options: HybridConfig,
    delimiters: Delimiters | None = None,
    device_type: str = "cuda",
    *,
    keeps_states_inside: bool = False,
    records_drafts: bool = False,
    passes_are_shared: bool = True,
) -> HybridCache:
    """The cache of one engine, empty.

    Args:
        plan: sizes of its pools.
        options: of the plugin.
        delimiters: what ends a message, if the options want to know.
        device_type: "cpu" or "cuda", as torch calls it.
        keeps_states_inside: whether the kernels of all state layers write states at
            chunk boundaries inside a forward pass.
        records_drafts: as in `HybridCache`.
        passes_are_shared: as in `ExpectedSaving`.

    Raises:
        ConfigError: for options that this model or these kernels cannot serve.
    """
    layout, pools = plan.layout, build_pools(plan)
    if options.is_deterministic:
        _check_deterministic(layout, keeps_states_inside)
    policy = policy_for(
        options,
        layout.page_size,
        delimiters,
        has_states=bool(layout.states),
        keeps_states_inside=keeps_states_inside,
        device_type=device_type,
    )
    return HybridCache(
        pages=pools.pages,
        slots=pools.slots,
        windows=pools.windows,
        broker=pools.broker,
        scratch=pools.scratch,
        page_size=layout.page_size,
        policy=policy,
        eviction=eviction_for(layout, device_type, passes_are_shared=passes_are_shared),
        concurrency=ConcurrencyTradeoff(pass_tokens=pass_tokens_of(device_type)),
        records_drafts=records_drafts,
        host=host_tier_for(plan, device_type),
        # Nothing is on the host before workers have measured.
        rates=TransferRates(math.inf),
    )


def host_tier_for(plan: CachePlan, device_type: str = "cuda") -> HostTier | None:
    """The host memory behind the pools, empty; None where there is none."""
    if plan.host is None:
        return None
    layout = plan.layout
    return HostTier(
        plan.host,
        layout.page_size,
        eviction_for(layout, device_type),
        layout.attention_windows,
    )


def _check_deterministic(layout: CacheLayout, keeps_states_inside: bool) -> None:
    if layout.attention_windows:
        raise ConfigError(
            "deterministic is not served for models with attention windows: leave it "
            "out."
        )
    if not layout.states or not keeps_states_inside:
        raise ConfigError(
            "deterministic needs a model whose state layers all run on our kernels, "
            "and this one has others: leave it out."
        )


def policy_for(
    options: HybridConfig,
    page_size: int,
    delimiters: Delimiters | None = None,
    *,
    has_states: bool,
    keeps_states_inside: bool,
    device_type: str = "cuda",
) -> SnapshotPolicy:
    """Where a model's snapshots are taken.

    Args:
        options: of the plugin.
        page_size: tokens in a page.
        delimiters: what ends a message, if the options want to know.
        has_states: whether it has state layers; what attention windows need is there
            when a pass has run, at any token.
        keeps_states_inside: as for `build_cache`.
        device_type: likewise.
    """
    grid = 1 if not has_states else CHUNK if keeps_states_inside else 0
    policy = options.snapshot_policy(page_size, delimiters, pass_tokens_of(device_type))
    return replace(policy, grid=grid, canonical=options.is_deterministic)


def eviction_for(
    layout: CacheLayout,
    device_type: str = "cuda",
    *,
    passes_are_shared: bool = True,
) -> ExpectedSaving:
    """The eviction policy of a cache with that layout; it has learned nothing yet."""
    return ExpectedSaving(
        token_bytes=layout.page_bytes / layout.page_size,
        slot_bytes=layout.snapshot_bytes,
        pass_tokens=pass_tokens_of(device_type),
        passes_are_shared=passes_are_shared,
    )


def build_pools(plan: CachePlan) -> CachePools:
    """Ids of every pool, and the broker between the pools."""
    if plan.shared is not None:
        return plan.shared.build()
    layout, sizes = plan.layout, plan.sizes
    windows = zip(layout.attention_windows, sizes.windows, strict=True)
    return FixedPools(
        PagePool(sizes.pages),
        SlotPool(sizes.slots) if layout.states else NoSlots(),
        tuple(WindowGroup(window, PagePool(count)) for window, count in windows),
    )
