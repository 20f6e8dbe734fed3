# SPDX-License-Identifier: Apache-2.0
"""How the memory of an engine's cache is divided between its pools.

An adapter says how many bytes there are, how the cache is laid out and what the
engine's limits and flags are; what follows from that is decided here, for serving
and for `hybrid-plugin doctor` alike.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from logging import CRITICAL, Logger

from hybrid_plugin.config import ConfigError, HybridConfig
from hybrid_plugin.core.commands import Pool
from hybrid_plugin.core.memory.elastic_plan import (
    STATE_GRANULES,
    ElasticPlan,
    plan_elastic,
)
from hybrid_plugin.core.memory.layout import (
    DEFAULT_CHUNK,
    CacheLayout,
    PoolSizes,
    TooLittleMemoryError,
)
from hybrid_plugin.core.tiers.host_plan import HostPlan
from hybrid_plugin.engine import elastic_memory, host_memory
from hybrid_plugin.engine.memory_blocks import pool_budget

_SILENT = Logger("hybrid_plugin.silent", CRITICAL)
"""For attempts whose outcome is not reported."""


@dataclass(frozen=True, slots=True)
class FixedCount:
    """Pages or slots that a flag of the engine fixes."""

    ids: int
    """The reserved one included."""
    flag: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """What an engine says about its cache besides the memory and the layout."""

    max_model_len: int
    """Tokens of the longest sequence."""
    max_sequences: int
    """That run at once, at most."""
    block_bytes: int
    """Of the memory of elastic pools, equal on every rank."""
    hindrance: str | None = None
    """What stands against elastic pools in this engine, to follow those words."""
    chunk: int = DEFAULT_CHUNK
    """Tokens of a prefill step at most."""
    warm_up_ids: int = 1
    """Ids of each pool that the engine's warm-up takes at least."""
    pages: FixedCount | None = None
    """At most so many pages."""
    slots: FixedCount | None = None
    """Exactly so many slots."""


@dataclass(frozen=True, slots=True)
class CachePlan:
    """The pools of one rank; equal on every rank."""

    layout: CacheLayout
    sizes: PoolSizes
    """Ids of each pool, the reserved ones included."""
    shared: ElasticPlan | None = None
    """How the pools share their memory; None where each has its own."""
    host: HostPlan | None = None
    """Of the host memory behind them; None without any."""

    @property
    def tokens(self) -> int:
        """Tokens that fit into the pages, the reserved page left out: with their KV,
        where layers have some."""
        return (self.sizes.pages - 1) * self.layout.page_size

    def sequences(self, length: int) -> float:
        """Sequences of `length` tokens that fit at once."""
        if self.shared is not None:
            return self.shared.sequences(length)
        layout, sizes = self.layout, self.sizes
        fitting = [(sizes.pages - 1) / layout.pages_for(length)]
        if layout.states:
            fitting.append(sizes.slots - 1)
        for window, count in zip(layout.attention_windows, sizes.windows, strict=True):
            fitting.append((count - 1) / layout.live_pages(window, length))
        return min(fitting)

    def describe(self) -> Iterator[str]:
        """The pools in a few lines, for the log."""
        yield from self._describe_pools()
        if self.host is not None:
            yield host_memory.describe(self.host, self.layout.page_size)

    def _describe_pools(self) -> Iterator[str]:
        if self.shared is not None:
            yield elastic_memory.describe(self.shared)
            return
        layout, sizes = self.layout, self.sizes
        if layout.has_states_alone:
            yield (
                f"hybrid-plugin pool: {sizes.slots} state slots of "
                f"{layout.slot_bytes / 2**10:.1f} KiB "
                f"({_mib(sizes.slots * layout.slot_bytes)}), and no KV; "
                f"{sizes.pages} pages of {layout.page_size} tokens number what is "
                "cached"
            )
            return
        slots = ""
        if layout.states:
            slots = (
                f" and {sizes.slots} state slots of {layout.slot_bytes / 2**10:.1f} "
                f"KiB ({_mib(sizes.slots * layout.slot_bytes)})"
            )
        yield (
            f"hybrid-plugin pools: {sizes.pages} KV pages of {layout.page_size} tokens "
            f"({_mib(sizes.pages * layout.page_bytes)}){slots}"
        )
        for window, count, page_bytes in zip(
            layout.attention_windows,
            sizes.windows,
            layout.window_page_bytes,
            strict=True,
        ):
            yield (
                f"hybrid-plugin pool of {window}: {count} KV pages "
                f"({_mib(count * page_bytes)})"
            )


def asked_page_size(options: HybridConfig, flag: str, given: int | None) -> int | None:
    """Tokens in a page that the user asked for; None for no preference.

    Args:
        options: of the plugin.
        flag: of the engine, for the same.
        given: its value, None if it was not given.

    Raises:
        ConfigError: if the flag and the option contradict each other.
    """
    wanted = options.page_size
    if None not in (wanted, given) and wanted != given:
        raise ConfigError(
            f"{flag} {given} and the option page_size {wanted} contradict each other: "
            "give one of them."
        )
    return given if wanted is None else wanted


def divide(
    layout: CacheLayout,
    available: int,
    options: HybridConfig,
    limits: EngineLimits,
    log: Logger,
    *,
    fixed_layout: CacheLayout | None = None,
    beside: int = 0,
    host_room: int | None = None,
) -> CachePlan:
    """Divide the memory: elastic pools where they are wanted and possible.

    Args:
        layout: of the cache.
        available: bytes that every rank has.
        options: of the plugin.
        limits: of the engine.
        log: where to say why the pools do not share their memory.
        fixed_layout: of pools with memory of their own, where that differs.
        beside: bytes that such pools leave to what lies beside them.
        host_room: as of `host_memory.plan_tier`.

    Raises:
        ConfigError: if one sequence of the maximum length does not fit, or the
            options ask for elastic pools or host memory that cannot be had.
    """
    shared = _share(layout, available, options, limits, log)
    if shared is not None:
        plan = CachePlan(shared.layout, shared.sizes, shared)
    else:
        plan = _split(fixed_layout or layout, available - beside, options, limits)
    host = host_memory.plan_tier(plan.layout, options, available, host_room)
    return replace(plan, host=host)


def with_fitting_length(
    layout: CacheLayout, available: int, options: HybridConfig, limits: EngineLimits
) -> EngineLimits:
    """Lower the maximum length to the greatest of which one sequence fits.

    It stays at least 1: where not even one token fits, `divide` says so.

    Args:
        layout: of the cache.
        available: bytes that every rank has.
        options: of the plugin.
        limits: of the engine.
    """

    def is_too_long(length: int) -> bool:
        shorter = replace(limits, max_model_len=length)
        try:
            divide(layout, available, options, shorter, _SILENT)
        except ConfigError:
            return True
        return False

    longest = limits.max_model_len
    if not is_too_long(longest):
        return limits
    fitting = bisect_left(range(1, longest), True, key=is_too_long)
    return replace(limits, max_model_len=max(fitting, 1))


def _share(
    layout: CacheLayout,
    available: int,
    options: HybridConfig,
    limits: EngineLimits,
    log: Logger,
) -> ElasticPlan | None:
    """How the pools share the memory; None where each gets its own, or there is one.

    Raises:
        ConfigError: if the options ask for elastic pools that cannot be had.
    """
    is_wanted = partial(
        elastic_memory.is_wanted, options, states_alone=layout.has_states_alone
    )
    found = limits.hindrance or _hindrance_of(layout)
    if not is_wanted(found, log):
        return None
    plan: ElasticPlan | None = None
    try:
        plan = plan_elastic(
            layout,
            pool_budget(elastic_memory.limited(available, options), limits.block_bytes),
            block_bytes=limits.block_bytes,
            max_model_len=limits.max_model_len,
            max_sequences=limits.max_sequences,
            warm_up_ids=limits.warm_up_ids,
            chunk=limits.chunk,
        )
        found = _out_of_reach(plan)
    except TooLittleMemoryError as error:
        found = (
            f"do not fit: {error}; give the cache more memory, or set elastic to false."
        )
    return plan if is_wanted(found, log) else None


def _hindrance_of(layout: CacheLayout) -> str | None:
    """What a model has against elastic pools, to follow those words."""
    if layout.page_bytes and (layout.states or layout.attention_windows):
        return None
    return (
        "need layers with full attention, and layers with states or windows beside "
        "them; set elastic to false."
    )


def _out_of_reach(plan: ElasticPlan) -> str | None:
    """What the model's kernels have against pools with the slots they reach."""
    if Pool.STATE not in plan.pools:
        return None
    least = STATE_GRANULES * plan.pools[Pool.STATE].per_granule
    if plan.ids(Pool.STATE) >= least:
        return None
    return (
        f"begin with {least} state slots, and this model's kernels address only "
        f"{plan.layout.max_slots}; set elastic to false."
    )


def _split(
    layout: CacheLayout, available: int, options: HybridConfig, limits: EngineLimits
) -> CachePlan:
    """Pools with memory of their own.

    Raises:
        ConfigError: if one sequence of the maximum length does not fit.
    """
    budget = elastic_memory.limited(available, options)
    try:
        sizes = layout.split(
            budget,
            max_model_len=limits.max_model_len,
            state_memory_ratio=options.state_memory_ratio,
            chunk=limits.chunk,
        )
    except TooLittleMemoryError as error:
        raise ConfigError(str(error)) from error
    least = layout.least(limits.max_model_len, limits.chunk)
    if limits.slots is not None:
        sizes = _with_slots(layout, budget, sizes, limits.slots.ids)
        _require(sizes.slots, least.slots, "state slots", limits.slots, limits)
        _require(sizes.pages, least.pages, "pages", limits.slots, limits)
    if limits.pages is not None:
        sizes = replace(sizes, pages=min(sizes.pages, limits.pages.ids))
        _require(sizes.pages, least.pages, "pages", limits.pages, limits)
    return CachePlan(layout, sizes)


def _with_slots(
    layout: CacheLayout, budget: int, sizes: PoolSizes, slots: int
) -> PoolSizes:
    """The same with exactly so many slots; pages get what that leaves or takes."""
    spent = layout.bytes_of(replace(sizes, pages=0, slots=slots))
    pages = sizes.pages
    if layout.page_bytes:
        pages = max(budget - spent, 0) // layout.page_bytes
    return replace(sizes, pages=pages, slots=slots)


def _require(
    found: int, least: int, what: str, fixed: FixedCount, limits: EngineLimits
) -> None:
    """Check that one sequence of the maximum length fits into a pool.

    Raises:
        ConfigError: naming the flag that fixed the pool.
    """
    if found < least:
        raise ConfigError(
            f"{fixed.flag} leaves {found} {what}, and one sequence of "
            f"{limits.max_model_len} tokens takes {least}, the reserved ones included: "
            "change it, or lower the maximum model length."
        )


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"
