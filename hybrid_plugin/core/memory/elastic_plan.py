# SPDX-License-Identifier: Apache-2.0
"""How a budget is cut into granules that all pools of a cache can share."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, replace

from hybrid_plugin.core.commands import Pool, PoolId
from hybrid_plugin.core.memory.attention_windows import AttentionWindow
from hybrid_plugin.core.memory.elastic import ElasticBroker, PoolBudget
from hybrid_plugin.core.memory.layout import (
    DEFAULT_CHUNK,
    CacheLayout,
    PoolSizes,
    TooLittleMemoryError,
)
from hybrid_plugin.core.memory.pools import NoSlots, PagePool, SlotPool
from hybrid_plugin.core.memory.scratch import ScratchLayout, ScratchRows
from hybrid_plugin.core.memory.window_tables import WindowGroup

STATE_GRANULES = 2
"""Granules of slots at least: a slot to run in, and one to keep."""
_STATES_AT_START = 4
"""Slots get one part in this many of the budget at the start, at most."""
_COARSENESS = 4
"""So many times a granule's bytes count as lost: what is unused of a pool's last one
grows with it, and memory leaves a pool only with the last of a granule's rows."""
_TOKEN_ALIGNMENT = 128
"""Bytes: kernels load keys and values in vectors, and some count strides in heads."""


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """One pool of an elastic cache."""

    row_bytes: int
    """Bytes of a page or slot."""
    per_granule: int
    """Pages or slots whose memory comes and goes together."""
    floor: int
    """Granules that it never goes below."""
    start: int
    """Granules that have memory from the start."""

    @property
    def granule_bytes(self) -> int:
        return self.per_granule * self.row_bytes


@dataclass(frozen=True, slots=True)
class ElasticPools:
    """What a plan builds: the pools of a `HybridCache`, and their broker."""

    pages: PagePool
    slots: SlotPool
    windows: tuple[WindowGroup, ...]
    broker: ElasticBroker
    scratch: ScratchRows | None = None


@dataclass(frozen=True, slots=True)
class ElasticPlan:
    """All pools over one budget; equal on every rank."""

    layout: CacheLayout
    """With slots and packed pages that fill a granule without a rest."""
    budget: int
    """Bytes that may be mapped at once."""
    block_bytes: int
    """Bytes that the device maps at a time: in the pool, or, where pages are not
    packed, in each layer's buffer of pages."""
    pools: Mapping[PoolId, PoolPlan]
    """In the order in which memory is found for them."""

    def ids(self, pool: PoolId) -> int:
        """Ids of a pool: as many as if it had the whole budget to itself.

        The scratch has one for each sequence that may verify, in whole granules, and
        there are no more slots than the model's kernels address.
        """
        plan = self.pools[pool]
        if pool == Pool.SCRATCH and self.layout.scratch is not None:
            return -(-self.layout.scratch.rows // plan.per_granule) * plan.per_granule
        granules = self.budget // plan.granule_bytes
        if pool == Pool.STATE and self.layout.max_slots is not None:
            granules = min(granules, self.layout.max_slots // plan.per_granule)
        return granules * plan.per_granule

    @property
    def sizes(self) -> PoolSizes:
        """Ids of each pool, the reserved ones included."""
        return PoolSizes(
            pages=self.ids(Pool.KV),
            slots=self.ids(Pool.STATE) if Pool.STATE in self.pools else 2,
            windows=tuple(
                self.ids(Pool.window(i))
                for i in range(len(self.layout.attention_windows))
            ),
        )

    @property
    def usable_at_start(self) -> int:
        """Ids that every pool has memory for at the start."""
        return min(plan.start * plan.per_granule for plan in self.pools.values())

    def sequences(self, length: int) -> int:
        """Sequences of `length` tokens that fit at once."""
        reserved = sum(plan.granule_bytes for plan in self.pools.values())
        return (self.budget - reserved) // self.layout.sequence_bytes(length)

    def build(self) -> ElasticPools:
        """The pools, with memory where there is some at the start."""
        budgets = {
            name: PoolBudget(plan.granule_bytes, plan.floor)
            for name, plan in self.pools.items()
        }
        windows = [
            WindowGroup(window, self._pages(Pool.window(index)))
            for index, window in enumerate(self.layout.attention_windows)
        ]
        return ElasticPools(
            pages=self._pages(Pool.KV),
            slots=self._slots(),
            windows=tuple(windows),
            broker=ElasticBroker(self.budget, budgets),
            scratch=self._scratch(),
        )

    def _pages(self, pool: PoolId) -> PagePool:
        pages = PagePool(self.ids(pool), self.pools[pool].per_granule)
        for granule in range(1, self.pools[pool].start):
            pages.ids.map(granule)
        return pages

    def _scratch(self) -> ScratchRows | None:
        if self.layout.scratch is None:
            return None
        plan = self.pools[Pool.SCRATCH]
        rows = ScratchRows(self.layout.scratch, plan.per_granule)
        for granule in range(1, plan.start):
            rows.ids.map(granule)
        return rows

    def _slots(self) -> SlotPool:
        if Pool.STATE not in self.pools:
            return NoSlots()
        slots = SlotPool(self.ids(Pool.STATE), self.pools[Pool.STATE].per_granule)
        for granule in range(1, self.pools[Pool.STATE].start):
            slots.ids.map(granule)
        return slots


def plan_elastic(
    layout: CacheLayout,
    budget: int,
    *,
    block_bytes: int,
    max_model_len: int,
    max_sequences: int,
    warm_up_ids: int = 1,
    chunk: int = DEFAULT_CHUNK,
) -> ElasticPlan:
    """Cut a budget into granules.

    Args:
        layout: of the pages and of the slots.
        budget: bytes that may be mapped at once.
        block_bytes: bytes that the device maps at a time.
        max_model_len: tokens of the longest sequence.
        max_sequences: that run at once, at most; warm-up takes that many ids.
        warm_up_ids: that warm-up takes at least, whatever they cost.
        chunk: tokens of a prefill step at most; a window group holds them besides
            its window.

    Raises:
        TooLittleMemoryError: if one sequence of `max_model_len` tokens does not fit.
    """
    least = layout.least(max_model_len, chunk)
    rows: dict[PoolId, tuple[int, int, int]] = {}
    if layout.packed:
        layout, per_page = _fit_packed(layout, block_bytes, budget)
    else:
        per_page = {
            name: _pages_per_granule(layout, window, block_bytes)
            for name, window in layout.page_pools.items()
        }
    for name, per in per_page.items():
        rows[name] = layout.row_bytes[name], per, least.of(name)
    if layout.slot_bytes:
        per_slot, slot_bytes = _granule(
            layout.slot_bytes, layout.slot_alignment, block_bytes, budget
        )
        layout = replace(layout, slot_alignment=slot_bytes)
        rows[Pool.STATE] = (slot_bytes, per_slot, 0)
    pools = {
        name: PoolPlan(size, per, floor=1, start=max(-(-count // per), 1))
        for name, (size, per, count) in rows.items()
    }
    if Pool.STATE in pools:
        pools[Pool.STATE] = replace(pools[Pool.STATE], start=STATE_GRANULES)
    if layout.scratch is not None:
        scratch, pools[Pool.SCRATCH] = _plan_scratch(
            layout.scratch, pools, block_bytes, budget
        )
        layout = replace(layout, scratch=scratch)
    plan = ElasticPlan(layout, budget, block_bytes, pools)
    needed = _start_bytes(pools)
    if needed > budget:
        sizes = ", ".join(f"{p.granule_bytes} for {n}" for n, p in pools.items())
        raise TooLittleMemoryError(
            f"{budget} bytes cannot hold one sequence of {max_model_len} tokens in "
            f"granules of bytes {sizes}, which takes {needed}"
        )
    return _with_warm_up(plan, max_sequences, warm_up_ids)


def _pages_per_granule(
    layout: CacheLayout, window: AttentionWindow, block_bytes: int
) -> int:
    """Pages that fill whole blocks in every layer's buffer."""
    return math.lcm(
        *(
            block_bytes // math.gcd(block_bytes, group.page_bytes)
            for group in layout.attention
            if group.window == window
        )
    )


def _plan_scratch(
    scratch: ScratchLayout,
    others: Mapping[PoolId, PoolPlan],
    block_bytes: int,
    budget: int,
) -> tuple[ScratchLayout, PoolPlan]:
    """Cut the scratch into granules, and leave out rows that can never be needed.

    A sequence takes a slot besides its row, and so much must be there for one of the
    greatest length: more of them than fit then never run at once.

    Args:
        scratch: with the rows that the engine would use.
        others: all other pools, with what they start with at least.
        block_bytes: as for `plan_elastic`.
        budget: likewise.
    """
    if scratch.apart:
        per = math.lcm(
            *(block_bytes // math.gcd(block_bytes, b) for b in scratch.apart)
        )
        unit = math.lcm(_TOKEN_ALIGNMENT, block_bytes // math.gcd(block_bytes, per))
        together = -(-scratch.together // unit) * unit
    else:
        used = -(-scratch.together // _TOKEN_ALIGNMENT) * _TOKEN_ALIGNMENT
        per, together = _granule(used, _TOKEN_ALIGNMENT, block_bytes, budget)
    scratch = replace(scratch, together=together)
    plan = PoolPlan(scratch.row_bytes, per, floor=1, start=1)
    left = budget - _start_bytes(others)
    slot = others[Pool.STATE].row_bytes if Pool.STATE in others else 0

    def taken(rows: int) -> int:
        return -(-rows // per) * plan.granule_bytes + (rows - 1) * slot

    rows = bisect_right(range(1, scratch.rows + 1), left, key=taken)
    scratch = replace(scratch, rows=max(rows, 1))
    written = min(scratch.warm_up_rows, scratch.rows)
    return scratch, replace(plan, start=-(-written // per))


def _fit_packed(
    layout: CacheLayout, block_bytes: int, budget: int
) -> tuple[CacheLayout, dict[PoolId, int]]:
    """Pad packed pages so that they fill granules; with the pages of each granule.

    Tokens stay equally far apart, and aligned, whatever the padding.
    """
    alignment = layout.page_size * _TOKEN_ALIGNMENT
    padding, per_page = [], {}
    for name in layout.page_pools:
        used = layout.row_bytes[name]
        aligned = -(-used // alignment) * alignment
        per_page[name], size = _granule(aligned, alignment, block_bytes, budget)
        padding.append(size - used)
    return replace(layout, page_padding=tuple(padding)), per_page


def _granule(
    row_bytes: int, alignment: int, block_bytes: int, budget: int
) -> tuple[int, int]:
    """The granule that loses the least: (rows in it, bytes of each).

    A row is a slot or a packed page.  Lost is what pads the rows, in each granule,
    and the granule itself, a few times (`_COARSENESS`).

    Args:
        row_bytes: bytes of a row that are used, a multiple of the alignment.
        alignment: rows begin at multiples of so many bytes.
        block_bytes: a granule is a whole number of blocks.
        budget: bytes that may be mapped at once.
    """
    best: tuple[float, int, int] | None = None
    rows = 1
    while True:
        granule = -(-rows * row_bytes // block_bytes) * block_bytes
        coarse = _COARSENESS * granule / budget
        if best is not None and coarse >= best[0]:
            return best[1:]
        if granule % (rows * alignment) == 0:
            lost = 1 - rows * row_bytes / granule + coarse
            if best is None or lost < best[0]:
                best = lost, rows, granule // rows
        rows += 1


def _with_warm_up(plan: ElasticPlan, max_sequences: int, least: int) -> ElasticPlan:
    """Start with ids for warm-up instead of the longest sequence, if they fit."""
    ids = max_sequences + 1
    if plan.layout.slot_bytes:
        most = plan.budget // _STATES_AT_START // plan.layout.slot_bytes
        ids = min(ids, most)
    ids = max(ids, least + 1)
    pools = {
        name: replace(pool, start=max(_granules(plan, name, ids), pool.floor))
        if name != Pool.SCRATCH
        else pool
        for name, pool in plan.pools.items()
    }
    if _start_bytes(pools) > plan.budget:
        return plan
    return replace(plan, pools=pools)


def _granules(plan: ElasticPlan, pool: PoolId, ids: int) -> int:
    """Granules of a pool for so many ids, or for all that it can have."""
    return -(-min(ids, plan.ids(pool)) // plan.pools[pool].per_granule)


def _start_bytes(pools: Mapping[PoolId, PoolPlan]) -> int:
    return sum(pool.start * pool.granule_bytes for pool in pools.values())
