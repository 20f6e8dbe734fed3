# SPDX-License-Identifier: Apache-2.0
"""How large the pools of a simulation are, and the cache built on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hybrid_plugin.config import ConfigError, HybridConfig
from hybrid_plugin.core.cache import HybridCache
from hybrid_plugin.core.commands import PoolId
from hybrid_plugin.core.memory.attention_windows import AttentionWindow
from hybrid_plugin.core.memory.cache_pools import CachePools, FixedPools
from hybrid_plugin.core.memory.elastic_plan import ElasticPlan, plan_elastic
from hybrid_plugin.core.memory.layout import CacheLayout, TooLittleMemoryError
from hybrid_plugin.core.memory.pools import NoSlots, PagePool, SlotPool
from hybrid_plugin.core.memory.window_tables import WindowGroup
from hybrid_plugin.core.policy.eviction import LeastRecentlyUsed
from hybrid_plugin.core.policy.snapshot_positions import SnapshotPolicy
from hybrid_plugin.core.tiers.host_plan import HostPlan
from hybrid_plugin.core.tiers.host_tier import HostTier
from hybrid_plugin.core.tiers.restores import TransferRates
from hybrid_plugin.engine import elastic_memory
from hybrid_plugin.engine.host_memory import plan_tier
from hybrid_plugin.engine.memory_blocks import block_bytes, pool_budget
from hybrid_plugin.tools.simulate.request import Request

MOST_PAGES = 1 << 26
"""Half a GiB of counts."""
FIXED_POOLS = HybridConfig(elastic=False)


@dataclass(frozen=True, slots=True)
class Capacity:
    """Sizes of the pools, without the reserved ids.

    Elastic pools have as many ids as if each had the whole budget to itself.
    """

    page_size: int
    pages: int
    slots: int | None
    """None for a model without state layers."""
    windows: tuple[tuple[AttentionWindow, int], ...] = ()
    """AttentionWindow and pages of each window group."""
    layout: CacheLayout | None = None
    """Bytes of a page and a slot, where they are known."""
    elastic: ElasticPlan | None = None
    """How memory moves between pages and slots; None where each pool has its own."""
    host: HostPlan | None = None
    """Of the host memory behind them; None without any."""

    def __post_init__(self) -> None:
        if not 1 <= self.pages <= MOST_PAGES:
            raise ConfigError(
                f"A KV pool of {self.pages} pages cannot be simulated; the budget must "
                f"hold at least one page of {self.page_size} tokens, and at most "
                f"{MOST_PAGES}."
            )
        if self.slots is not None and not 1 <= self.slots <= MOST_PAGES:
            raise ConfigError(
                f"A state pool of {self.slots} slots cannot be simulated; give the "
                "cache more memory, or --kv-only for a model without states."
            )

    @classmethod
    def of_layout(
        cls,
        layout: CacheLayout,
        budget: int,
        requests: Sequence[Request],
        chunk: int,
        *,
        options: HybridConfig = FIXED_POOLS,
        concurrency: int = 1,
    ) -> Capacity:
        """Divide a budget as an engine's start-up does.

        Args:
            layout: of the model.
            budget: bytes in all.
            requests: to be served; the longest must fit.
            chunk: tokens of a prefill step at most.
            options: whether the pools are elastic, and how they share the budget.
            concurrency: sequences that are live at once.

        Raises:
            ConfigError: if the longest request does not fit, or if elastic pools or
                host memory are asked for where an engine would refuse them.
        """
        longest = max(request.length + len(request.answer) for request in requests)
        if options.gpu_memory_budget is not None:
            budget = min(budget, options.gpu_memory_budget)
        elastic = _plan_elastic(layout, budget, longest, chunk, options, concurrency)
        if elastic is not None:
            return cls(
                page_size=layout.page_size,
                pages=elastic.sizes.pages - 1,
                slots=elastic.sizes.slots - 1 if layout.slot_bytes else None,
                layout=elastic.layout,
                elastic=elastic,
                host=plan_tier(elastic.layout, options, budget),
            )
        try:
            sizes = layout.split(
                budget,
                max_model_len=longest,
                state_memory_ratio=options.state_memory_ratio,
                chunk=chunk,
            )
        except TooLittleMemoryError as error:
            raise ConfigError(str(error)) from error
        windows = zip(layout.attention_windows, sizes.windows, strict=True)
        return cls(
            page_size=layout.page_size,
            pages=sizes.pages - 1,
            slots=sizes.slots - 1 if layout.slot_bytes else None,
            windows=tuple((window, pages - 1) for window, pages in windows),
            layout=layout,
            host=plan_tier(layout, options, budget),
        )

    @classmethod
    def unbounded(
        cls, requests: Sequence[Request], page_size: int, *, states: bool
    ) -> Capacity:
        """Enough that nothing is ever evicted.

        Raises:
            ConfigError: if that is more than can be simulated.
        """
        total = sum(request.length + len(request.answer) for request in requests)
        count = len(requests)
        pages = total // page_size + 2 * count + 1
        if pages > MOST_PAGES:
            raise ConfigError(
                f"Room for all {total} tokens of the trace is more than can be "
                "simulated: say with --gpu-memory or --kv-tokens how much there is, or "
                "take fewer requests."
            )
        # Branch, body, prompt end, turn end, system message, and chunk ends.
        slots = 6 * count + total // 512 + 1 if states else None
        return cls(page_size, pages, slots)

    @property
    def token_bytes(self) -> float:
        """KV of a token with full attention; 1 where no size is known."""
        if self.layout is None:
            return 1.0
        return self.layout.page_bytes / self.page_size

    @property
    def slot_bytes(self) -> float:
        """What a snapshot keeps besides that KV; 0 where no size is known."""
        return 0.0 if self.layout is None else self.layout.snapshot_bytes

    def build(
        self,
        policy: SnapshotPolicy,
        eviction: LeastRecentlyUsed,
        host: HostTier | None = None,
        rates: TransferRates | None = None,
    ) -> HybridCache:
        """An empty cache on pools of these sizes.

        Args:
            policy: where snapshots are taken.
            eviction: what is evicted first.
            host: what `host_tier` made, if the cache is to have it.
            rates: of loads from there.
        """
        pools: CachePools
        if self.elastic is not None:
            pools = self.elastic.build()
        else:
            pools = FixedPools(
                PagePool(self.pages + 1),
                NoSlots() if self.slots is None else SlotPool(self.slots + 1),
                tuple(
                    WindowGroup(window, PagePool(pages + 1))
                    for window, pages in self.windows
                ),
            )
        return HybridCache(
            pages=pools.pages,
            slots=pools.slots,
            windows=pools.windows,
            broker=pools.broker,
            page_size=self.page_size,
            policy=policy,
            eviction=eviction,
            host=host,
            rates=rates,
        )

    def host_tier(self, eviction: LeastRecentlyUsed) -> HostTier | None:
        """Host memory, empty; None where there is none.

        Args:
            eviction: what is evicted first there; an object of its own.
        """
        if self.host is None:
            return None
        assert self.layout is not None, "host memory was divided by it"
        windows = self.layout.attention_windows
        return HostTier(self.host, self.page_size, eviction, windows)

    def host_rows(self, pool: PoolId) -> int:
        """Rows of host memory, if it keeps nothing but those of this pool."""
        if self.host is None or pool not in self.host.row_bytes:
            return 0
        return self.host.rows(pool)

    def held_bytes(self, cache: HybridCache) -> int | None:
        """Bytes of what is in use or cached; None where no size is known."""
        if self.layout is None:
            return None
        held = (cache.pages.usable - cache.pages.free) * self.layout.page_bytes
        if cache.slots.needed:
            held += (cache.slots.usable - cache.slots.free) * self.layout.slot_bytes
        sizes = self.layout.window_page_bytes
        for group, size in zip(cache.windows, sizes, strict=True):
            held += (group.pages.usable - group.pages.free) * size
        return held


def _plan_elastic(
    layout: CacheLayout,
    budget: int,
    longest: int,
    chunk: int,
    options: HybridConfig,
    concurrency: int,
) -> ElasticPlan | None:
    """How a GPU's pools would share the budget; None where each gets its own.

    Pages are packed, as both engines' usual attention backends take them.
    """
    states_alone = layout.has_states_alone
    if not elastic_memory.is_wanted(options, None, states_alone=states_alone):
        return None
    if not layout.page_bytes or not (layout.slot_bytes or layout.window_page_bytes):
        if options.elastic:
            raise ConfigError(
                "Elastic pools need layers with full attention, and layers with states "
                "or windows beside them: leave --elastic out for this model."
            )
        return None
    block = block_bytes(budget, "cuda")
    try:
        return plan_elastic(
            replace(layout, packed=True),
            pool_budget(budget, block),
            block_bytes=block,
            max_model_len=longest,
            max_sequences=concurrency,
            chunk=chunk,
        )
    except TooLittleMemoryError as error:
        if options.elastic:
            raise ConfigError(
                f"Elastic pools do not fit: {error}; give the cache more memory, or "
                "leave --elastic out."
            ) from error
        return None
