# SPDX-License-Identifier: Apache-2.0
"""A fake engine whose pools share one budget, on a device that knows its holes.

A page or slot that is touched while its granule has no memory fails at once,
and so does a moment in which more is mapped than the budget allows.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from hybrid_plugin.core.cache import HybridCache
from hybrid_plugin.core.commands import Command, Map, Pool, PoolId, Take, Unmap
from hybrid_plugin.core.memory.elastic import ElasticBroker, PoolBudget
from hybrid_plugin.core.memory.pools import NoSlots, PagePool, SlotPool
from hybrid_plugin.core.memory.scratch import ScratchLayout, ScratchRows
from hybrid_plugin.core.memory.window_tables import WindowGroup
from tests.core.device import HOLE, ZERO_STATE, ZEROED, FakeDevice, Forward
from tests.core.engine import FakeEngine
from tests.core.setups import Setup
from tests.core.traffic import (
    Traffic,
    random_setup,
    with_drafts,
    with_host,
    with_outer,
    with_peers,
    with_windows,
)


@dataclass(frozen=True, slots=True)
class ElasticSetup(Setup):
    """An engine whose ids are addresses, not memory."""

    pages_per_granule: int = 2
    slots_per_granule: int = 1
    page_bytes: int = 1
    slot_bytes: int = 3
    window_bytes: int = 1
    """Of a page of each window group, of which a granule has as many as of pages."""
    budget: int = 20
    floors: tuple[int, int] = (1, 1)
    compacts: bool = True
    rows: ScratchLayout | None = field(default=None, repr=False)
    """Of the scratch, where drafts are verified in one."""
    rows_per_granule: int = field(default=1, repr=False)

    @property
    def granules(self) -> dict[PoolId, tuple[int, int]]:
        """By pool, ids in a granule and bytes of one."""
        per = self.pages_per_granule
        found: dict[PoolId, tuple[int, int]] = {Pool.KV: (per, per * self.page_bytes)}
        for index in range(len(self.windows)):
            found[Pool.window(index)] = (per, per * self.window_bytes)
        if self.has_states:
            found[Pool.STATE] = (
                self.slots_per_granule,
                self.slots_per_granule * self.slot_bytes,
            )
        if self.rows is not None:
            per = self.rows_per_granule
            found[Pool.SCRATCH] = (per, per * self.rows.row_bytes)
        return found

    @property
    def scratch_of_one(self) -> int:
        """Bytes of the scratch that a sequence alone takes."""
        if self.rows is None:
            return 0
        granules = -(-self.rows.padded(1) // self.rows_per_granule)
        return granules * self.rows_per_granule * self.rows.row_bytes

    @property
    def max_length(self) -> int:
        states = max(2, self.floors[1]) * self.slots_per_granule * self.slot_bytes
        left = self.budget - states * self.has_states - self.scratch_of_one
        each = self.page_bytes + len(self.windows) * self.window_bytes
        granules = min(
            left // (self.pages_per_granule * each),
            self.pages // self.pages_per_granule,
        )
        pages = granules * self.pages_per_granule - 1
        return pages * self.page_size - self.lookahead - self.overrun

    def build(self, cls: type[HybridCache] = HybridCache) -> HybridCache:
        """The cache under test."""
        floors = {Pool.KV: self.floors[0], Pool.STATE: self.floors[1]}
        budgets = {
            pool: PoolBudget(size, floors.get(pool, 1))
            for pool, (_, size) in self.granules.items()
        }
        controller = ElasticBroker(self.budget, budgets, compacts=self.compacts)
        return cls(
            pages=PagePool(self.pages, self.pages_per_granule),
            slots=SlotPool(self.slots, self.slots_per_granule)
            if self.has_states
            else NoSlots(),
            windows=tuple(
                WindowGroup(window, PagePool(pages, self.pages_per_granule))
                for window, pages in self.window_pools
            ),
            page_size=self.page_size,
            policy=Setup.build(self).policy,
            eviction=self.eviction,
            broker=controller,
            records_drafts=self.records,
            host=self.build_host(),
            rates=self.rates,
            tiers=self.build_tiers(),
            scratch=None
            if self.rows is None
            else ScratchRows(self.rows, self.rows_per_granule),
        )


class ElasticDevice(FakeDevice):
    """Memory that is there only where it was mapped."""

    def __init__(self, setup: ElasticSetup) -> None:
        super().__init__(
            setup.pages,
            setup.slots if setup.has_states else 0,
            setup.page_size,
            setup.window_pools,
            setup.grid,
            setup.chunk,
            setup.host,
        )
        self.setup = setup
        self.mapped: dict[PoolId, set[int]] = {pool: {0} for pool in setup.granules}
        for pool, (per, _) in setup.granules.items():
            if pool == Pool.SCRATCH:
                continue
            memory = self.memory(pool)
            for index in range(per, len(memory)):
                memory.turn(index, HOLE)

    def clone(self) -> ElasticDevice:
        """A copy to try commands on."""
        twin = ElasticDevice(self.setup)
        self._copy_to(twin)
        twin.mapped = {pool: set(granules) for pool, granules in self.mapped.items()}
        return twin

    def run(self, commands: Iterable[Command]) -> None:
        """Execute commands in order."""
        for command in self._folded(commands):
            match command:
                case Map(pool, granules) if not Pool.is_host(pool):
                    self._require(not self.mapped[pool] & set(granules), f"{command}")
                    self.mapped[pool] |= set(granules)
                    self._turn(pool, granules, mapped=True)
                case Unmap(pool, granules) if not Pool.is_host(pool):
                    self._require(self.mapped[pool] >= set(granules), f"{command}")
                    self._require(0 not in granules, "granule 0 stays for ever")
                    self.mapped[pool] -= set(granules)
                    self._turn(pool, granules, mapped=False)
                case Take(_, row, _, _) if self.setup.rows is not None:
                    self._require_row(row)
                    self._execute(command)
                case _:
                    self._execute(command)
            used = self.mapped_bytes()
            self._require(
                used <= self.setup.budget, f"{used} bytes are mapped after {command}"
            )

    def forward(self, batch: Sequence[Forward]) -> None:
        """Execute one step; a batch that verifies writes rows for its padding, too."""
        if self.setup.rows is not None and any(p.row is not None for p in batch):
            for row in range(self.setup.rows.padded(len(batch))):
                self._require_row(row)
        super().forward(batch)

    def _require_row(self, row: int) -> None:
        granule = row // self.setup.rows_per_granule
        there = granule in self.mapped[Pool.SCRATCH]
        self._require(there, f"row {row} was touched, but has no memory")

    def mapped_bytes(self) -> int:
        """Bytes that are mapped now."""
        return sum(
            len(self.mapped[pool]) * size
            for pool, (_, size) in self.setup.granules.items()
        )

    def _turn(self, pool: PoolId, granules: Iterable[int], *, mapped: bool) -> None:
        per, _ = self.setup.granules[pool]
        if pool == Pool.SCRATCH:
            for granule in granules:
                for row in range(granule * per, (granule + 1) * per):
                    self.scratch.pop(row, None)
            return
        memory = self.memory(pool)
        for granule in granules:
            for index in range(granule * per, (granule + 1) * per):
                page = [ZEROED] * self.setup.page_size
                cleared = ZERO_STATE if pool == Pool.STATE else page
                self._require(not memory.is_loading(index), f"{index} is being loaded")
                memory.turn(index, cleared if mapped else HOLE)


class ElasticEngine(FakeEngine):
    """A fake engine on pools that share one budget."""

    def __init__(
        self, setup: ElasticSetup, cls: type[HybridCache] = HybridCache
    ) -> None:
        super().__init__(setup, cls)
        self.device: ElasticDevice = ElasticDevice(setup)
        self.ranks = self._build_ranks()

    @property
    def controller(self) -> ElasticBroker:
        assert isinstance(self.cache.broker, ElasticBroker)
        return self.cache.broker

    def _is_scattered(self) -> bool:
        """Whether windows find no memory because KV pages lie in too many granules.

        Pages that one sequence took while others ran stay where they are.
        """
        return bool(self.cache.windows) and any(
            member.ids.pinned_granules > -(-(member.ids.live + 1) // per)
            for member in self.controller._members.values()
            for per in (member.ids.per_granule,)
        )

    def check(self) -> None:
        """Check all invariants, and that cache and device agree on what is mapped."""
        super().check()
        twin = self.device.clone()
        twin.run(self.cache._commands)
        cache = self.cache
        pools = {name: pool.ids for name, pool in cache.memory.page_pools.items()}
        if cache.slots.needed:
            pools[Pool.STATE] = cache.slots.ids
        if cache.scratch is not None:
            pools[Pool.SCRATCH] = cache.scratch.ids
        assert set(pools) == set(twin.setup.granules)
        for pool, ids in pools.items():
            assert sorted(twin.mapped[pool]) == ids.mapped_granules()
        assert sum(self.controller.mapped_bytes().values()) == twin.mapped_bytes()
        assert self.controller.slack == twin.setup.budget - twin.mapped_bytes() >= 0
        floors = {Pool.KV: twin.setup.floors[0], Pool.STATE: twin.setup.floors[1]}
        for pool, ids in pools.items():
            assert ids.mapped >= floors.get(pool, 1)


def random_elastic_setup(
    rng: random.Random, page_size: int, *, windows: bool = False, drafts: bool = False
) -> ElasticSetup:
    """A small elastic engine, mostly short of memory."""
    fixed = random_setup(rng, page_size)
    if drafts:
        fixed = with_drafts(rng, fixed)
    if windows:
        fixed = with_windows(rng, fixed)
    per_page, per_slot = rng.choice((1, 2, 4)), rng.choice((1, 1, 2, 3))
    page_bytes, slot_bytes = rng.choice(((1, 3), (2, 2), (3, 1), (1, 8)))
    floors = rng.choice(((1, 1), (1, 1), (2, 3)))
    kv = rng.randint(4, 5 + 24 // (page_size * per_page))
    kv += -(-fixed.overrun // (page_size * per_page))
    states = rng.randint(max(2, floors[1]), 5)
    each = per_page * (page_bytes + len(fixed.windows))
    budget = kv * each + states * per_slot * slot_bytes
    rows, per_row = None, 1
    if fixed.scratch:
        rows = ScratchLayout(
            rows=fixed.max_running,
            together=rng.choice((1, 2, 5)),
            batches=rng.choice(((), (1, 2, 4), (3, 100))),
        )
        per_row = rng.choice((1, 1, 2, 3))
        budget += rng.randint(2, 5) * per_row * rows.row_bytes
    compacts = rng.random() < 0.7
    slots = budget // (slot_bytes * per_slot) * per_slot
    if rng.random() < 0.2:  # as where kernels address no more
        slots = states * per_slot
    return ElasticSetup(
        **{
            **{name: getattr(fixed, name) for name in Setup.__dataclass_fields__},
            "pages": budget // (page_bytes * per_page) * per_page,
            "slots": slots,
            "windows": tuple((window, 0) for window, _ in fixed.windows),
            "canonical": False,  # only fixed pools keep what is reserved
        },
        pages_per_granule=per_page,
        slots_per_granule=per_slot,
        page_bytes=page_bytes,
        slot_bytes=slot_bytes,
        budget=budget,
        rows=rows,
        rows_per_granule=per_row,
        floors=floors,
        compacts=compacts,
    )


def seeded_traffic(
    seed: int,
    page_size: int,
    cache: type[HybridCache] = HybridCache,
    *,
    windows: bool = False,
    drafts: bool = False,
    host: bool = False,
    outer: bool = False,
    peers: bool = False,
) -> Traffic:
    """Traffic on a random elastic engine."""
    rng = random.Random(f"elastic/{seed}/{page_size}")
    setup = random_elastic_setup(rng, page_size, windows=windows, drafts=drafts)
    if host:
        setup = with_host(setup)
    if outer:
        setup = with_outer(setup)
    if peers:
        setup = with_peers(setup)
    return Traffic(rng, ElasticEngine(setup, cache))
