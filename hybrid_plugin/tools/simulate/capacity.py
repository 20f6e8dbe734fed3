# SPDX-License-Identifier: Apache-2.0
"""How large the pools of a simulation are, and the cache built on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hybrid_plugin.config import ConfigError
from hybrid_plugin.core.cache import HybridCache
from hybrid_plugin.core.memory.attention_windows import AttentionWindow
from hybrid_plugin.core.memory.layout import CacheLayout
from hybrid_plugin.core.memory.pools import NoSlots, PagePool, SlotPool
from hybrid_plugin.core.memory.window_tables import WindowGroup
from hybrid_plugin.core.policy.eviction import LeastRecentlyUsed
from hybrid_plugin.core.policy.snapshot_positions import SnapshotPolicy
from hybrid_plugin.tools.simulate.request import Request

MOST_PAGES = 1 << 26
"""Half a GiB of counts."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """Sizes of the pools, without the reserved ids."""

    page_size: int
    pages: int
    slots: int | None
    """None for a model without state layers."""
    windows: tuple[tuple[AttentionWindow, int], ...] = ()
    """AttentionWindow and pages of each window group."""
    layout: CacheLayout | None = None
    """Bytes of a page and a slot, where they are known."""

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
        cls, layout: CacheLayout, budget: int, requests: Sequence[Request], chunk: int
    ) -> Capacity:
        """Divide a budget as an engine's start-up does.

        Raises:
            ConfigError: if the longest request does not fit.
        """
        longest = max(request.length + len(request.answer) for request in requests)
        try:
            sizes = layout.split(budget, max_model_len=longest, chunk=chunk)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        windows = zip(layout.attention_windows, sizes.windows, strict=True)
        return cls(
            page_size=layout.page_size,
            pages=sizes.pages - 1,
            slots=sizes.slots - 1 if layout.slot_bytes else None,
            windows=tuple((window, pages - 1) for window, pages in windows),
            layout=layout,
        )

    @classmethod
    def unbounded(
        cls, requests: Sequence[Request], page_size: int, *, states: bool
    ) -> Capacity:
        """Enough that nothing is ever evicted."""
        total = sum(request.length + len(request.answer) for request in requests)
        count = len(requests)
        pages = total // page_size + 2 * count + 1
        # Branch, body, prompt end, turn end, system message, and chunk ends.
        slots = 6 * count + total // 512 + 1 if states else None
        return cls(page_size, pages, slots)

    def build(
        self, policy: SnapshotPolicy, eviction: LeastRecentlyUsed | None
    ) -> HybridCache:
        """An empty cache on pools of these sizes."""
        return HybridCache(
            pages=PagePool(self.pages + 1),
            slots=NoSlots() if self.slots is None else SlotPool(self.slots + 1),
            page_size=self.page_size,
            policy=policy,
            windows=tuple(
                WindowGroup(window, PagePool(pages + 1))
                for window, pages in self.windows
            ),
            eviction=eviction,
        )

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
