# SPDX-License-Identifier: Apache-2.0
"""How a budget is cut into granules that pages and slots can share."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from hybrid_plugin.core.commands import Pool
from hybrid_plugin.core.memory.elastic import ElasticBroker, PoolBudget
from hybrid_plugin.core.memory.layout import CacheLayout, PoolSizes
from hybrid_plugin.core.memory.pools import PagePool, SlotPool

_STATES_AT_START = 4
"""Slots get one part in so many of the budget at the start, at most."""


@dataclass(frozen=True, slots=True)
class ElasticPlan:
    """Two pools over one budget; equal on every rank."""

    layout: CacheLayout
    """With slots that fill a granule without a rest."""
    budget: int
    """Bytes that may be mapped at once."""
    block_bytes: int
    """Bytes that the device maps at a time, in each layer's buffer of pages."""
    pages_per_granule: int
    slots_per_granule: int
    floors: tuple[int, int]
    """Granules that the pages, and the slots, never go below."""
    start: tuple[int, int]
    """Granules of pages, and of slots, that have memory from the start."""

    @property
    def page_granule_bytes(self) -> int:
        return self.pages_per_granule * self.layout.page_bytes

    @property
    def slot_granule_bytes(self) -> int:
        return self.slots_per_granule * self.layout.slot_bytes

    @property
    def sizes(self) -> PoolSizes:
        """Ids of each pool: as many as if it had the whole budget to itself."""
        return PoolSizes(
            pages=self.budget // self.page_granule_bytes * self.pages_per_granule,
            slots=self.budget // self.slot_granule_bytes * self.slots_per_granule,
        )

    @property
    def usable_at_start(self) -> int:
        """Ids that both pools have memory for at the start."""
        return min(
            self.start[0] * self.pages_per_granule,
            self.start[1] * self.slots_per_granule,
        )

    def sequences(self, length: int) -> int:
        """Sequences of so many tokens that fit at once."""
        rest = self.budget - self.page_granule_bytes - self.slot_granule_bytes
        pages = self.layout.pages_for(length) * self.layout.page_bytes
        return rest // (pages + self.layout.slot_bytes)

    def build(self) -> tuple[PagePool, SlotPool, ElasticBroker]:
        """The pools, with memory where there is some at the start."""
        sizes = self.sizes
        pages = PagePool(sizes.pages, self.pages_per_granule)
        slots = SlotPool(sizes.slots, self.slots_per_granule)
        for ids, granules in zip((pages.ids, slots.ids), self.start, strict=True):
            for granule in range(1, granules):
                ids.map(granule)
        budgets = {
            Pool.KV: PoolBudget(self.page_granule_bytes, self.floors[0]),
            Pool.STATE: PoolBudget(self.slot_granule_bytes, self.floors[1]),
        }
        return pages, slots, ElasticBroker(self.budget, budgets)


def plan_elastic(
    layout: CacheLayout,
    budget: int,
    *,
    block_bytes: int,
    max_model_len: int,
    max_sequences: int,
    pages_floor: int = 0,
    slots_floor: int = 0,
) -> ElasticPlan:
    """Cut a budget into granules.

    Args:
        layout: of the pages, all with full attention, and of the slots.
        budget: bytes that may be mapped at once.
        block_bytes: bytes that the device maps at a time.
        max_model_len: tokens of the longest sequence.
        max_sequences: that run at once, at most; warm-up takes so many ids.
        pages_floor: pages that slots never take.
        slots_floor: slots that pages never take.

    Raises:
        ValueError: if one sequence of `max_model_len` tokens does not fit.
    """
    per_page = math.lcm(
        *(
            block_bytes // math.gcd(block_bytes, group.page_bytes)
            for group in layout.attention
        )
    )
    per_slot, slot_bytes = _granule_of_slots(layout, block_bytes, budget)
    layout = replace(layout, slot_alignment=slot_bytes)
    longest = -(-(layout.pages_for(max_model_len) + 1) // per_page)
    floors = (
        max(-(-(pages_floor + 1) // per_page), 1),
        max(-(-(slots_floor + 1) // per_slot), 1),
    )
    least = (max(longest, floors[0]), max(2, floors[1]))
    plan = ElasticPlan(
        layout, budget, block_bytes, per_page, per_slot, floors, start=least
    )
    needed = _bytes_of(plan, least)
    if needed > budget:
        raise ValueError(
            f"{budget} bytes cannot hold one sequence of {max_model_len} tokens in "
            f"granules of {plan.page_granule_bytes} bytes for pages and "
            f"{plan.slot_granule_bytes} for states, which takes {needed}"
        )
    return replace(plan, start=_start(plan, max_sequences))


def _granule_of_slots(
    layout: CacheLayout, block_bytes: int, budget: int
) -> tuple[int, int]:
    """The granule that loses the least: (slots in it, bytes of each).

    Lost is what pads its slots, in each granule, and what a pool has of its last
    granule without using it, once: half a granule for each pool.
    """
    candidates: list[tuple[float, int, int]] = []
    slots = 1
    while block_bytes % slots == 0 and block_bytes // slots >= layout.slot_alignment:
        granule = -(-slots * layout.slot_bytes // block_bytes) * block_bytes
        padding = 1 - slots * layout.slot_bytes / granule
        candidates.append((padding + granule / budget, slots, granule // slots))
        slots *= 2
    return min(candidates)[1:]


def _start(plan: ElasticPlan, max_sequences: int) -> tuple[int, int]:
    """What has memory at the start: the floors, and ids for warm-up."""
    most = plan.budget // _STATES_AT_START // plan.layout.slot_bytes
    ids = max(min(max_sequences + 1, most), 2)
    start = (
        max(-(-ids // plan.pages_per_granule), plan.floors[0]),
        max(-(-ids // plan.slots_per_granule), plan.floors[1]),
    )
    return start if _bytes_of(plan, start) <= plan.budget else plan.start


def _bytes_of(plan: ElasticPlan, granules: tuple[int, int]) -> int:
    pages, slots = granules
    return pages * plan.page_granule_bytes + slots * plan.slot_granule_bytes
