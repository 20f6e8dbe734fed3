# SPDX-License-Identifier: Apache-2.0
"""A fake engine whose pools share one budget, on a device that knows its holes.

A page or slot that is touched while its granule has no memory fails at once,
and so does a moment in which more is mapped than the budget allows.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from hybrid_plugin.core.cache import HybridCache
from hybrid_plugin.core.commands import Command, Map, Pool, Unmap
from hybrid_plugin.core.memory.elastic import ElasticBroker, PoolBudget
from hybrid_plugin.core.memory.pools import PagePool, SlotPool
from tests.core.device import ZEROED, ContentError, FakeDevice
from tests.core.engine import FakeEngine, Setup
from tests.core.traffic import Traffic, random_setup

HOLE = object()


class _Memory(list[Any]):
    """Pages or slots; those without memory cannot be touched."""

    def __getitem__(self, index: Any) -> Any:
        content = super().__getitem__(index)
        if content is HOLE:
            raise ContentError(f"id {index} was touched, but has no memory")
        return content

    def __setitem__(self, index: Any, content: Any) -> None:
        self[index]
        super().__setitem__(index, content)

    def turn(self, index: int, content: Any) -> None:
        """Map or unmap an id."""
        super().__setitem__(index, content)

    def is_hole(self, index: int) -> bool:
        return super().__getitem__(index) is HOLE


@dataclass(frozen=True, slots=True)
class ElasticSetup(Setup):
    """An engine whose `pages` and `slots` are addresses, not memory."""

    pages_per_granule: int = 2
    slots_per_granule: int = 1
    page_bytes: int = 1
    slot_bytes: int = 3
    budget: int = 20
    floors: tuple[int, int] = (1, 1)
    compacts: bool = True
    patience: int = 0

    @property
    def kv_granule(self) -> int:
        return self.pages_per_granule * self.page_bytes

    @property
    def state_granule(self) -> int:
        return self.slots_per_granule * self.slot_bytes

    @property
    def max_length(self) -> int:
        states = max(2, self.floors[1]) * self.state_granule
        granules = min(
            (self.budget - states) // self.kv_granule,
            self.pages // self.pages_per_granule,
        )
        pages = granules * self.pages_per_granule - 1
        return pages * self.page_size - self.lookahead

    def build(self, cls: type[HybridCache] = HybridCache) -> HybridCache:
        """The cache under test."""
        budgets = {
            Pool.KV: PoolBudget(self.kv_granule, self.floors[0]),
            Pool.STATE: PoolBudget(self.state_granule, self.floors[1]),
        }
        controller = ElasticBroker(
            self.budget, budgets, compacts=self.compacts, patience=self.patience
        )
        return cls(
            pages=PagePool(self.pages, self.pages_per_granule),
            slots=SlotPool(self.slots, self.slots_per_granule),
            page_size=self.page_size,
            policy=Setup.build(self).policy,
            elastic=controller,
        )


class ElasticDevice(FakeDevice):
    """Memory that is there only where it was mapped."""

    def __init__(self, setup: ElasticSetup) -> None:
        super().__init__(setup.pages, setup.slots, setup.page_size)
        self.setup = setup
        self.pages = _Memory(self.pages)
        self.slots = _Memory(self.slots)
        self.mapped: dict[Pool, set[int]] = {Pool.KV: {0}, Pool.STATE: {0}}
        for page in range(setup.pages_per_granule, setup.pages):
            self.pages.turn(page, HOLE)
        for slot in range(setup.slots_per_granule, setup.slots):
            self.slots.turn(slot, HOLE)

    def clone(self) -> ElasticDevice:
        """A copy to try commands on."""
        twin = ElasticDevice(self.setup)
        twin.pages = _Memory(
            cells if cells is HOLE else list(cells) for cells in self.pages
        )
        twin.slots = _Memory(self.slots)
        twin.mapped = {pool: set(granules) for pool, granules in self.mapped.items()}
        return twin

    def run(self, commands: Iterable[Command]) -> None:
        """Execute commands in order."""
        for command in commands:
            match command:
                case Map(pool, granules):
                    self._require(not self.mapped[pool] & set(granules), f"{command}")
                    self.mapped[pool] |= set(granules)
                    self._turn(pool, granules, mapped=True)
                case Unmap(pool, granules):
                    self._require(self.mapped[pool] >= set(granules), f"{command}")
                    self._require(0 not in granules, "granule 0 stays for ever")
                    self.mapped[pool] -= set(granules)
                    self._turn(pool, granules, mapped=False)
                case _:
                    super().run([command])
            used = self.mapped_bytes()
            self._require(
                used <= self.setup.budget, f"{used} bytes are mapped after {command}"
            )

    def mapped_bytes(self) -> int:
        """Bytes that are mapped now."""
        return (
            len(self.mapped[Pool.KV]) * self.setup.kv_granule
            + len(self.mapped[Pool.STATE]) * self.setup.state_granule
        )

    def _turn(self, pool: Pool, granules: Iterable[int], *, mapped: bool) -> None:
        setup = self.setup
        is_kv = pool is Pool.KV
        per = setup.pages_per_granule if is_kv else setup.slots_per_granule
        memory = self.pages if is_kv else self.slots
        assert isinstance(memory, _Memory)
        for granule in granules:
            for index in range(granule * per, (granule + 1) * per):
                cleared = [ZEROED] * setup.page_size if is_kv else ZEROED
                memory.turn(index, cleared if mapped else HOLE)


class ElasticEngine(FakeEngine):
    """A fake engine on pools that share one budget."""

    def __init__(
        self, setup: ElasticSetup, cls: type[HybridCache] = HybridCache
    ) -> None:
        super().__init__(setup, cls)
        self.device: ElasticDevice = ElasticDevice(setup)

    @property
    def controller(self) -> ElasticBroker:
        assert self.cache.elastic is not None
        return self.cache.elastic

    def check(self) -> None:
        """Check all invariants, and that cache and device agree on what is mapped."""
        super().check()
        twin = self.device.clone()
        twin.run(self.cache._commands)
        pools = {Pool.KV: self.cache.pages.ids, Pool.STATE: self.cache.slots.ids}
        for pool, ids in pools.items():
            assert sorted(twin.mapped[pool]) == ids.mapped_granules()
        assert sum(self.controller.mapped_bytes().values()) == twin.mapped_bytes()
        assert self.controller.slack == twin.setup.budget - twin.mapped_bytes() >= 0
        for ids, floor in zip(pools.values(), twin.setup.floors, strict=True):
            assert ids.mapped >= floor


def random_elastic_setup(rng: random.Random, page_size: int) -> ElasticSetup:
    """A small elastic engine, mostly short of memory."""
    fixed = random_setup(rng, page_size)
    per_page, per_slot = rng.choice((1, 2, 4)), rng.choice((1, 1, 2, 3))
    page_bytes, slot_bytes = rng.choice(((1, 3), (2, 2), (3, 1), (1, 8)))
    floors = rng.choice(((1, 1), (1, 1), (2, 3)))
    kv = rng.randint(4, 5 + 24 // (page_size * per_page))
    states = rng.randint(max(2, floors[1]), 5)
    budget = kv * per_page * page_bytes + states * per_slot * slot_bytes
    return ElasticSetup(
        **{
            **{name: getattr(fixed, name) for name in Setup.__dataclass_fields__},
            "pages": budget // (page_bytes * per_page) * per_page,
            "slots": budget // (slot_bytes * per_slot) * per_slot,
        },
        pages_per_granule=per_page,
        slots_per_granule=per_slot,
        page_bytes=page_bytes,
        slot_bytes=slot_bytes,
        budget=budget,
        floors=floors,
        compacts=rng.random() < 0.7,
        patience=rng.choice((0, 1, 16)),
    )


def seeded_traffic(
    seed: int, page_size: int, cache: type[HybridCache] = HybridCache
) -> Traffic:
    """Traffic on a random elastic engine."""
    rng = random.Random(f"elastic/{seed}/{page_size}")
    return Traffic(rng, ElasticEngine(random_elastic_setup(rng, page_size), cache))
