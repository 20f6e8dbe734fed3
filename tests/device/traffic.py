# SPDX-License-Identifier: Apache-2.0
"""Random commands on real copies, and the same on a plain model of what they mean."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch

from hybrid_plugin.core.commands import (
    Await,
    Copy,
    Load,
    Map,
    Pool,
    PoolId,
    Store,
    Unmap,
)
from hybrid_plugin.core.tiers.host_plan import HostPlan
from hybrid_plugin.device.host.copies import HostCopies
from hybrid_plugin.device.host.queues import Queues
from hybrid_plugin.device.host.ring import RingSizes

RINGS = RingSizes(1024, store_pieces=2, load_pieces=3)
PLAN = HostPlan({Pool.KV: 260, Pool.STATE: 2600, "window0": 512}, 5200, 11)
"""Of the KV, a piece holds three rows and a block twenty.  A slot is three slabs."""
IDS = {Pool.KV: 30, Pool.STATE: 7, "window0": 12}
WAITS = [
    ("stores", "model"),
    ("model", "stores"),
    ("stores", "loads"),
    ("loads", "stores"),
    ("loads", "scatters"),
    ("scatters", "loads"),
    ("scatters", "model"),
    ("model", "scatters"),
]
"""Every queue that waits for another."""
Row = tuple[PoolId, int]
Sight = tuple[str, bytes, list[torch.Tensor]]
"""A row, what the model should find there, and what it found, part by part."""


def pools(device: str = "cpu") -> dict[PoolId, list[torch.Tensor]]:
    """Pages in three layers of two sizes, packed ones, and slots with a gap behind."""
    generator = torch.Generator().manual_seed(7)

    def rows(ids: int, size: int) -> torch.Tensor:
        found = torch.randint(-128, 128, (ids, size), generator=generator)
        return found.to(torch.int8).to(device)

    layers = [rows(30, 112)[:, 3:103], rows(30, 96), rows(30, 60)]
    return {
        Pool.KV: layers,
        Pool.STATE: [rows(7, 2700)[:, :2597]],
        "window0": [rows(12, 256), rows(12, 256)],
    }


class Traffic:
    """Commands as the core orders them, and passes of the model between them."""

    def __init__(
        self,
        rng: random.Random,
        queues: Queues,
        run_some: Callable[[], None],
        device: str = "cpu",
    ) -> None:
        """Start with pools of random content and no rows stored.

        Args:
            rng: decides.
            queues: that the copies run on.
            run_some: called behind each command.
            device: of the pools.
        """
        self.rng = rng
        self.queues = queues
        self.pools = pools(device)
        self.copies = HostCopies(self.pools, PLAN, rings=RINGS, queues=queues)
        self._run_some = run_some
        self.device: dict[Row, bytes] = {
            (pool, i): _bytes([part[i] for part in parts])
            for pool, parts in self.pools.items()
            for i in range(IDS[pool])
        }
        self.host: dict[Row, bytes] = {}
        """Rows that were stored."""
        self.granules: dict[PoolId, set[int]] = {pool: {0} for pool in IDS}
        self.loading: dict[int, dict[Row, bytes]] = {}
        """By ticket, what its loads bring to the device."""
        self.wrong: list[str] = []
        """Rows in which the model found something else, once all is finished."""
        self._seen: list[Sight] = []
        self._device = device
        self._tickets = 0

    def step(self) -> None:
        """One command or pass."""
        choices = (
            (self._pass, 4),
            (self._store, 4),
            (self._load, 4),
            (self._await, 2),
            (self._map, 1),
            (self._unmap, 1),
            (self._copy, 1),
        )
        weights = [weight for _, weight in choices]
        self.rng.choices([choice for choice, _ in choices], weights)[0]()
        self._run_some()

    def finish(self) -> None:
        """Await all loads, run everything, and look at all rows of the device."""
        for ticket in list(self.loading):
            self._end(ticket)
        self._expect(list(self.device))
        self.queues.finish()
        self.wrong = [name for name, row, found in self._seen if _bytes(found) != row]

    # ----------------------------------------------------------------- choices

    def _pass(self) -> None:
        """The model reads rows, and writes others."""
        rows = self._touchable()
        self._expect(self.rng.sample(rows, min(len(rows), 6)))
        for row in self.rng.sample(rows, min(len(rows), 8)):
            self._write(row)

    def _store(self) -> None:
        pool = self._pool()
        ids = [i for name, i in self._touchable() if name == pool]
        rows = self._rows(pool)
        count = self.rng.randint(1, min(len(ids), len(rows), 12))
        sources, destinations = self._some(ids, count), self._some(rows, count)
        self.copies.run(Store(pool, sources, destinations))
        for source, row in zip(sources, destinations, strict=True):
            self.host[pool, row] = self.device[pool, source]
        for source in sources:  # at once, as the contract has it
            self._write((pool, source))

    def _load(self) -> None:
        self._tickets += 1
        found: dict[Row, bytes] = {}
        for pool in self.rng.sample(sorted(IDS), self.rng.randint(1, 2)):
            ids = [i for name, i in self._touchable() if name == pool]
            rows = [row for name, row in self.host if name == pool]
            most = min(len(ids) - 2, len(rows), 9)
            if most < 1:
                continue
            count = self.rng.randint(1, most)
            sources, destinations = self._some(rows, count), self._some(ids, count)
            for i in destinations:  # still the model's work: the load is behind it
                self._write((pool, i))
            self.copies.run(Load(pool, sources, destinations, self._tickets))
            for row, i in zip(sources, destinations, strict=True):
                found[pool, i] = self.host[pool, row]
        if found:
            self.loading[self._tickets] = found

    def _await(self) -> None:
        if self.loading:
            self._end(self.rng.choice(list(self.loading)))

    def _map(self) -> None:
        pool = self._pool()
        used = sum(map(len, self.granules.values()))
        most = PLAN.rows(pool) // PLAN.rows_per_block(pool)
        holes = sorted(set(range(most)) - self.granules[pool])
        if holes and used < PLAN.blocks:
            granule = self.rng.choice(holes)
            self.copies.run(Map(Pool.host(pool), (granule,)))
            self.granules[pool].add(granule)

    def _unmap(self) -> None:
        pool = self._pool()
        mapped = sorted(self.granules[pool] - {0})
        if mapped:
            granule = self.rng.choice(mapped)
            self.copies.run(Unmap(Pool.host(pool), (granule,)))
            self.granules[pool].remove(granule)
            per = PLAN.rows_per_block(pool)
            for row in range(granule * per, (granule + 1) * per):
                self.host.pop((pool, row), None)

    def _copy(self) -> None:
        pool = self._pool()
        stored = [row for name, row in self.host if name == pool]
        if stored:
            source, row = self.rng.choice(stored), self.rng.choice(self._rows(pool))
            if source != row:
                self.copies.run(Copy(Pool.host(pool), source, row))
                self.host[pool, row] = self.host[pool, source]

    # ---------------------------------------------------------------- internal

    def _pool(self) -> PoolId:
        return self.rng.choice(sorted(IDS))

    def _some(self, ids: list[int], count: int) -> tuple[int, ...]:
        """Ids, often behind each other."""
        if self.rng.random() < 0.5:
            first = self.rng.randint(0, len(ids) - count)
            return tuple(ids[first : first + count])
        return tuple(self.rng.sample(ids, count))

    def _rows(self, pool: PoolId) -> list[int]:
        """Host rows with memory, but for the reserved one."""
        per = PLAN.rows_per_block(pool)
        granules = sorted(self.granules[pool])
        return [g * per + i for g in granules for i in range(per) if g or i]

    def _touchable(self) -> list[Row]:
        """Rows of the device that no load writes."""
        loading = {row for found in self.loading.values() for row in found}
        return [row for row in self.device if row not in loading]

    def _end(self, ticket: int) -> None:
        self.copies.run(Await(ticket))
        found = self.loading.pop(ticket)
        self.device.update(found)
        self._expect(list(found))
        for row in found:
            if self.rng.random() < 0.3:
                self._write(row)

    def _write(self, row: Row) -> None:
        """The model writes a row."""
        pool, index = row
        size, seed = self._size(pool), self.rng.randrange(1 << 15)
        self.device[row] = _pattern(size, seed, "cpu").numpy().tobytes()

        def work() -> None:
            # The device computes it: an upload would have the host wait.
            values = _pattern(size, seed, self._device)
            widths = [part.shape[1] for part in self.pools[pool]]
            cells = zip(self.pools[pool], values.split(widths), strict=True)
            for part, value in cells:
                part[index].copy_(value)

        self.queues.model().issue(work)

    def _expect(self, rows: Sequence[Row]) -> None:
        """The model finds in rows what it should."""
        for pool, index in rows:
            self._seen.append((f"{pool} {index}", self.device[pool, index], []))

        def work(seen: list[Sight]) -> None:
            for (pool, index), (_, _, found) in zip(rows, seen, strict=True):
                found += [part[index].clone() for part in self.pools[pool]]

        some = self._seen[len(self._seen) - len(rows) :]
        self.queues.model().issue(lambda: work(some))

    def _size(self, pool: PoolId) -> int:
        return sum(part.shape[1] for part in self.pools[pool])


def _pattern(size: int, seed: int, device: str) -> torch.Tensor:
    """`[size]` int8 that tells a row, and a place in it, from most others."""
    values = torch.arange(size, device=device) * (2 * seed + 1) + seed
    return (values % 251 - 125).to(torch.int8)


def _bytes(cells: list[torch.Tensor]) -> bytes:
    return torch.cat(cells).cpu().numpy().tobytes()
