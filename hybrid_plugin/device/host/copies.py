# SPDX-License-Identifier: Apache-2.0
"""Copies of pages and slots to rows of host memory, and back.

Four queues work beside each other.  A store: the model's queue gathers rows in a piece
of a ring, from which another queue copies them to the host.  A load: rows of the host
are copied to a piece of another ring, and from there scattered over rows of the device,
once the model's queue has come to where the load was ordered.

    model      .. gather ─┐  next step ..    load ordered ─┐  next step ..  await ..
    stores                └─ copy to the host              │                  │
    loads                    copy from the host ───────────┤                  │
    scatters                                               └─ scatter ────────┘

Every wait is for something issued before, so that none can wait for itself.  The host
waits for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch
from hybrid_kernels.state_copy import transfer_parts

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
from hybrid_plugin.device.host.bandwidth import Bandwidth, measure
from hybrid_plugin.device.host.blocks import HostBlocks
from hybrid_plugin.device.host.locked_memory import LockedMemory
from hybrid_plugin.device.host.queues import Mark, Queues, queues_for
from hybrid_plugin.device.host.ranges import Ranges, copier_for
from hybrid_plugin.device.host.ring import RingSizes, StagingRing, rings_for
from hybrid_plugin.device.host.rows import HostRows
from hybrid_plugin.device.host.slabs import Slab, slabs
from hybrid_plugin.device.host.waits import QueueWaits


class HostCopies:
    """The host memory of one rank, and what copies to it and from it."""

    def __init__(
        self,
        pools: Mapping[PoolId, Sequence[torch.Tensor]],
        plan: HostPlan,
        *,
        rings: RingSizes | None = None,
        queues: Queues | None = None,
    ) -> None:
        """Take the host memory of the plan, and the rings' memory of the device.

        Args:
            pools: `[ids, bytes]` int8 parts of each pool of the device; they must stay
                where they are.
            plan: of the host's rows.
            rings: by default those for the kind of device.
            queues: by default those of the device.

        Raises:
            RuntimeError: for a GPU without cuda-bindings.
            ValueError: if the plan does not fit the pools.
            MemoryError: if there is no such memory, or it cannot be locked.
        """
        if missing := sorted(plan.row_bytes.keys() - pools.keys()):
            raise ValueError(f"host rows are planned for {missing}, which are no pools")
        device = next(part.device for pool in plan.row_bytes for part in pools[pool])
        self._plan = plan
        self._queues = queues_for(device) if queues is None else queues
        rings = rings_for(device) if rings is None else rings
        size = rings.piece_bytes
        self._to_host = StagingRing(rings.store_pieces, size, device)
        self._from_host = StagingRing(rings.load_pieces, size, device)
        self._slabs = {
            pool: slabs(pools[pool], row_bytes, self._to_host, self._from_host)
            for pool, row_bytes in plan.row_bytes.items()
        }
        _compile(self._slabs.values(), device)
        self._copy = copier_for(device)
        self._locked = LockedMemory(plan.budget, device)
        self._blocks = HostBlocks(self._locked.memory, plan.block_bytes)
        self._rows = {
            Pool.host(pool): HostRows(
                Pool.host(pool), self._blocks, row_bytes, plan.rows_per_block(pool)
            )
            for pool, row_bytes in plan.row_bytes.items()
        }
        self._tickets: dict[int, Mark] = {}
        """Where the loads of each ticket end."""
        self._waits = QueueWaits()
        # The rings may be memory that the current stream's work of before still uses.
        self._queues.finish()

    def run(self, command: Store | Load | Await | Map | Unmap | Copy) -> None:
        """Issue a command; a `Map`, `Unmap` or `Copy` is of a host pool.

        Raises:
            KeyError: for a pool without host rows, and for a ticket without a load.
            ValueError: for a row without memory.
            MemoryError: if there is no block for a granule, which is an error of
                whoever ordered it.
        """
        match command:
            case Store(pool, sources, destinations):
                self._store(pool, sources, destinations)
            case Load(pool, sources, destinations, ticket):
                self._load(pool, sources, destinations)
                self._tickets[ticket] = self._queues.scatters.record()
            case Await(ticket):
                self._waits.wait(self._queues.model(), self._tickets.pop(ticket))
            case Map(pool, granules):
                self._rows[pool].map(granules)
            case Unmap(pool, granules):
                self._rows[pool].unmap(granules)
            case Copy(pool, source, destination):
                self._move(self._rows[pool], source, destination)

    def measure(self) -> Bandwidth:
        """Measure how fast pages are copied, before anything was stored.

        The reserved page, which is no sequence's, is stored and loaded over itself.
        The host waits.
        """
        pool, row_bytes = next(iter(self._plan.row_bytes.items()))
        rows = self._plan.rows_per_block(pool)
        return measure(self.run, self._queues.finish, pool, rows, row_bytes)

    @property
    def wait_seconds(self) -> float:
        """For how long the model's queue has waited for loads, and for room in the ring
        to store: all waits that are over."""
        return self._waits.seconds

    @property
    def region(self) -> tuple[int, int]:
        """Address and bytes of the memory in which all rows are, until `close`."""
        memory = self._locked.memory
        return memory.data_ptr(), memory.nbytes

    def row_bytes(self, pool: PoolId) -> int:
        """Bytes of a row of a host pool."""
        return self._rows[pool].row_bytes

    def views(self, pool: PoolId, rows: Sequence[int]) -> list[npt.NDArray[np.uint8]]:
        """The memory of rows of a host pool, in their order, for reading and writing.

        Whoever reads or writes it waits for `copies_over` first.

        Returns:
            Contiguous `[rows, row bytes]` each, as few as can be; of these rows for as
            long as nobody moves or frees them.

        Raises:
            KeyError: for a pool without host rows.
            ValueError: for a row without memory.
        """
        return self._rows[pool].views(rows)

    def copies_over(self) -> Callable[[], None]:
        """What waits, in any thread, for all copies so far from and to rows."""
        return self._queues.copies_over()

    def close(self) -> None:
        """Give the host memory back when all copies are over; nothing runs after.

        Nobody has views of rows by now.
        """
        self._queues.finish()
        self._blocks.drop()
        self._locked.close()

    # --------------------------------------------------------------- internal

    def _store(
        self, pool: PoolId, sources: Sequence[int], destinations: Sequence[int]
    ) -> None:
        rows, ring = self._rows[Pool.host(pool)], self._to_host
        model, stores = self._queues.model(), self._queues.stores
        to, start = _by_row(destinations, sources)
        rows.check(to)
        ids = model.upload(torch.tensor(start, dtype=torch.int64))
        for slab, some in _portions(self._slabs[pool], len(to)):
            piece = ring.take(model, self._waits.wait)
            blocks = rows.blocks_of(to[some])
            model.issue(_gather(slab, piece, ids[some]))
            stores.wait(model.record())
            self._blocks.before_writing(blocks, stores)
            ranges = _staged(rows, to[some], slab, ring.address(piece))
            stores.issue(partial(self._copy, ranges))
            done = stores.record()
            ring.release(piece, done)
            self._blocks.were_written(blocks, done)

    def _load(
        self, pool: PoolId, sources: Sequence[int], destinations: Sequence[int]
    ) -> None:
        rows, ring = self._rows[Pool.host(pool)], self._from_host
        loads, scatters = self._queues.loads, self._queues.scatters
        start, to = _by_row(sources, destinations)
        rows.check(start)
        scatters.wait(self._queues.model().record())
        ids = scatters.upload(torch.tensor(to, dtype=torch.int64))
        for slab, some in _portions(self._slabs[pool], len(to)):
            piece, blocks = ring.take(loads), rows.blocks_of(start[some])
            self._blocks.before_reading(blocks, loads)
            ranges = _staged(rows, start[some], slab, ring.address(piece))
            loads.issue(partial(self._copy, ranges.reversed()))
            done = loads.record()
            self._blocks.were_read(blocks, done)
            scatters.wait(done)
            scatters.issue(_scatter(slab, piece, ids[some]))
            ring.release(piece, scatters.record())

    def _move(self, rows: HostRows, source: int, destination: int) -> None:
        """Copy a row to another one, through the ring: so the host need not wait."""
        ring, stores = self._to_host, self._queues.stores
        rows.check([source, destination])
        here, there = next(rows.runs([source])), next(rows.runs([destination]))
        self._blocks.before_writing([there.block], stores)
        of, to = rows.address(here), rows.address(there)
        for start in range(0, rows.row_bytes, ring.piece_bytes):
            size = min(ring.piece_bytes, rows.row_bytes - start)
            piece = ring.take(stores)
            staged = ring.address(piece)
            there_and_back = (staged, of + start), (to + start, staged)
            for destined, begin in there_and_back:
                stores.issue(partial(self._copy, Ranges([destined], [begin], [size])))
            done = stores.record()
            ring.release(piece, done)
            self._blocks.were_written([there.block], done)


def _by_row(
    rows: Sequence[int], ids: Sequence[int]
) -> tuple[Sequence[int], Sequence[int]]:
    """Both in the order of the rows, so that few copies move many."""
    order = sorted(range(len(rows)), key=rows.__getitem__)
    return [rows[i] for i in order], [ids[i] for i in order]


def _portions(cut: Sequence[Slab], count: int) -> Iterator[tuple[Slab, slice]]:
    """As many rows of each slab as a piece holds, one after the other."""
    for slab in cut:
        for first in range(0, count, slab.rows):
            yield slab, slice(first, min(first + slab.rows, count))


def _staged(rows: HostRows, some: Sequence[int], slab: Slab, piece: int) -> Ranges:
    """From a piece of a ring, by its address, to a slab of rows of the host."""
    found = Ranges()
    for run in rows.runs(some):
        size = (run.count - 1) * rows.row_bytes + slab.size
        host = rows.address(run) + slab.start
        found.add(host, piece + run.first * rows.row_bytes, size)
    return found


def _gather(slab: Slab, piece: int, ids: torch.Tensor) -> Callable[[], None]:
    """What copies a slab of rows of the pool to a piece."""
    pair, places = slab.gathers[piece], slab.places[: len(ids)]
    return lambda: transfer_parts(pair, places, ids)


def _scatter(slab: Slab, piece: int, ids: torch.Tensor) -> Callable[[], None]:
    """What copies a piece over a slab of rows of the pool."""
    pair, places = slab.scatters[piece], slab.places[: len(ids)]
    return lambda: transfer_parts(pair, ids, places)


def _compile(cuts: Iterable[Sequence[Slab]], device: torch.device) -> None:
    """Run the kernels once, on nothing: compiling one in service would stall it."""
    nowhere = torch.full((1,), -1, dtype=torch.int64, device=device)
    for slab in chain.from_iterable(cuts):
        for pair in (*slab.gathers, *slab.scatters):
            transfer_parts(pair, nowhere, nowhere)
