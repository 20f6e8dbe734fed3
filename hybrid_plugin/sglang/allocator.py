# SPDX-License-Identifier: Apache-2.0
"""SGLang's view of the two pools: sizes and room, while the core hands out ids.

SGLang asks its allocators what is free and frees what a request held.  Here the
core owns every id: room is read from it, and ids come and go with sequences.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.allocator.base import BaseTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.mamba import MambaSlotAllocator
from sglang.srt.mem_cache.prefill_budget import PrefillBudget

from hybrid_plugin.core.cache import HybridCache
from hybrid_plugin.core.commands import Pool
from hybrid_plugin.device.executor import Executor
from hybrid_plugin.sglang.window_map import WindowMap

_NOT_HERE = "hybrid-plugin hands out pages with each sequence, not by SGLang's {name}"


def most_pages(cache: HybridCache) -> int:
    """Pages that could be free at once, if all that is cached went."""
    return cache.broker.max_free(Pool.KV)


def spare_pages(cache: HybridCache) -> int:
    """The same with those that are filled from host memory, which make way, and
    without those that sequences have reserved for their prompts."""
    return (
        most_pages(cache)
        + cache.lower_tiers.restoring(Pool.KV)
        - cache.promised_pages()
    )


def most_slots(cache: HybridCache) -> int:
    """The same of slots."""
    return cache.broker.max_free(Pool.STATE)


class HybridTokenAllocator(BaseTokenToKVPoolAllocator):
    """Token positions of the KV pool; page 0 takes the writes of padded tokens."""

    def __init__(self, cache: HybridCache, stock: Any, executor: Executor) -> None:
        """Stand in for the allocator that SGLang built.

        Args:
            cache: the core cache that owns the pages.
            stock: SGLang's allocator for the same KV pool.
            executor: runs the cache's commands on this rank's pools.
        """
        self.cache = cache
        self.executor = executor
        self.window_map: WindowMap | None = None
        """None without a window pool."""
        super().__init__(
            size=cache.pages.usable * cache.page_size,
            page_size=cache.page_size,
            dtype=stock.dtype,
            device=stock.device,
            kvcache=stock.get_kvcache(),
            need_sort=False,
        )

    @property
    def size(self) -> int:
        """Tokens that the pool could hold now, whatever is cached in both pools."""
        return (most_pages(self.cache) + self.cache.pages.in_use) * self.page_size

    @size.setter
    def size(self, tokens: int) -> None:
        """The core says."""

    def create_prefill_budget(self, *args: Any, **kwargs: Any) -> HybridPrefillBudget:
        """The budget of one prefill pass."""
        return HybridPrefillBudget(self, *args, **kwargs)

    def available_size(self) -> int:
        """Tokens for which nothing of the pages' own cache would have to go."""
        pages = most_pages(self.cache) - self.cache.pages.reclaimable
        return pages * self.page_size

    def evict_to_free_tokens(self, tree_cache: Any, num_tokens: int) -> None:
        """The core makes room as it hands out pages."""

    def check_decode_capacity(self, *, num_tokens: int, **_: Any) -> bool:
        """Whether pages for `num_tokens` more tokens are free or can be freed.

        What a paused prompt has reserved is not: it must never wait for a page that
        another one took.
        """
        pages = num_tokens // self.page_size
        windows = map(Pool.window, range(len(self.cache.windows)))
        return pages <= spare_pages(self.cache) and all(
            pages
            <= self.cache.broker.max_free(pool) + self.cache.lower_tiers.restoring(pool)
            for pool in windows
        )

    def get_all_free_pages(self) -> None:
        """There is no free list on the device."""
        return None

    def clear(self) -> None:
        """The core is emptied by the prefix cache's `reset`."""
        self.free_group = None

    def free(self, free_index: torch.Tensor) -> None:
        """Pages go back with their sequence."""

    def free_group_begin(self) -> None:
        """Nothing is freed one by one."""

    def free_group_end(self) -> None:
        """Nothing is freed one by one."""

    def alloc(self, need_size: int) -> torch.Tensor:
        """Not served: pages belong to sequences."""
        raise NotImplementedError(_NOT_HERE.format(name="alloc"))


class HybridWindowAllocator(HybridTokenAllocator):
    """The same beside a window pool, with the numbers that SGLang asks for then.

    There is no budget for the window pool: admission reserves a request's pages there.
    """

    def __init__(self, cache: HybridCache, stock: Any, executor: Executor) -> None:
        """Stand in for SGLang's `SWATokenToKVPoolAllocator`; as for the base class."""
        super().__init__(cache, stock, executor)
        mapping = self.get_kvcache().full_to_swa_index_mapping
        self.window_map = WindowMap(mapping, self.page_size)

    @property
    def size_swa(self) -> int:
        """Tokens that the window pool holds."""
        return self.cache.windows[0].pages.usable * self.page_size

    def full_available_size(self) -> int:
        """Tokens of full attention for which nothing cached would have to go."""
        return self.cache.pages.free * self.page_size

    def swa_available_size(self) -> int:
        """The same of the window pool."""
        return self.cache.windows[0].pages.free * self.page_size

    def swa_capacity_and_available(
        self, *, full_capacity: int, swa_capacity: int
    ) -> tuple[tuple[int, int], tuple[int, int]]:
        """Tokens of each pool in all, as SGLang counts them, and those free."""
        return (
            (full_capacity, self.full_available_size()),
            (swa_capacity, self.swa_available_size()),
        )


class HybridPrefillBudget(PrefillBudget):
    """Room of one prefill pass, in tokens.

    SGLang charges the pass for what it will allocate later; the core hands out
    pages at admission.  What is charged for those is added back, or it would
    count twice.
    """

    allocator: HybridTokenAllocator

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Begin a pass."""
        super().__init__(*args, **kwargs)
        self._refunded = 0

    def refund(self, tokens: int) -> None:
        """Note that a chunk of so many tokens has its pages."""
        self._refunded += -(-tokens // self.page_size) * self.page_size

    def _available_and_evictable(self) -> int:
        pages = spare_pages(self.allocator.cache)
        return pages * self.page_size + self._refunded


class HybridSlotAllocator(MambaSlotAllocator):
    """State slots; slot 0 takes the writes of padded rows."""

    def __init__(self, cache: HybridCache, device: str) -> None:
        """Read room from `cache`."""
        self.cache = cache
        super().__init__(cache.slots.capacity - 1, device)
        self.ids = torch.arange(self.size + 1, dtype=torch.int64, device=device)
        """All ids on the device: taking one copies nothing to it."""

    def available_size(self) -> int:
        """Slots for which no snapshot would have to go."""
        return most_slots(self.cache) - self.cache.slots.snapshots

    def alloc_group_begin(self, num_reqs: int) -> None:
        """Nothing is allocated ahead."""

    def alloc_group_end(self) -> None:
        """Nothing is allocated ahead."""

    def alloc(self, need_size: int) -> torch.Tensor:
        """Not served: a slot belongs to a sequence."""
        raise NotImplementedError(_NOT_HERE.format(name="slot allocator"))

    def free(self, free_index: torch.Tensor) -> None:
        """Slots go back with their sequence."""

    def clear(self) -> None:
        """The core is emptied by the prefix cache's `reset`."""
