# SPDX-License-Identifier: Apache-2.0
"""Applies commands to arenas, on every rank alike."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from hybrid_plugin.core.commands import (
    Await,
    Command,
    Copy,
    Fold,
    Load,
    Map,
    MoveWindow,
    OuterCommand,
    Pool,
    PoolId,
    SaveInPass,
    Store,
    Take,
    Unmap,
    Zero,
)
from hybrid_plugin.core.tiers.host_plan import HostPlan
from hybrid_plugin.device.arena import Arena, ElasticArena
from hybrid_plugin.device.batching import batches
from hybrid_plugin.device.draft_records import DraftRecords
from hybrid_plugin.device.host.copies import HostCopies
from hybrid_plugin.device.interior import InteriorSnapshots
from hybrid_plugin.device.verified import RollingWindows, VerificationScratch
from hybrid_plugin.device.virtual_arena import Refusal, VirtualArena


class Transfers(Protocol):
    """Moves host rows to files, and from files or peers; offers them to peers."""

    def run(self, command: OuterCommand) -> None:
        """Begin what a command asks for, and wait for nothing."""


@dataclass(slots=True)
class MappingStats:
    """What mapping and unmapping cost this rank so far."""

    calls: int = 0
    granules: int = 0
    bytes: int = 0
    seconds: float = 0.0
    """Time the device's queue stood empty for it at most: the waiting for work
    issued before is part of it, and so are the driver's calls."""


class Executor:
    """Runs command lists on the current stream, first to last."""

    def __init__(
        self,
        arenas: Mapping[PoolId, Arena],
        interior: InteriorSnapshots | None = None,
    ) -> None:
        """Work on pools, by their ids.

        Args:
            arenas: the pools.
            interior: passes on what forward passes are to keep; None where they can
                keep nothing.
        """
        self._arenas = dict(arenas)
        self.interior = interior
        self.windows: RollingWindows | None = None
        """Where `MoveWindow` works; set it where draft slots are lent."""
        self.scratch: VerificationScratch | None = None
        """Where `Take` takes from; set it where verifications write a scratch."""
        self.records: DraftRecords | None = None
        """Where `Fold` folds from; set it where verifications record what they do."""
        self.host: HostCopies | None = None
        """Rows of host memory, where `attach_host` gave some."""
        self.transfers: Transfers | None = None
        """Runs what is written from host rows and fetched into them; set it where the
        host memory has something behind it."""
        self.moves = MappingStats()
        self._postponed: list[Command] | None = None
        """Commands that came while memory was released; None while it is there."""
        self._held: dict[VirtualArena, int] = {}
        """Bytes that were held when memory was released: mapped, or there for `Map`."""

    @property
    def is_released(self) -> bool:
        """Whether the pools have no memory at present."""
        return self._postponed is not None

    def release(self) -> int:
        """Give the memory of elastic pools back, with all that is in them.

        For when nothing is cached and nothing runs.  Commands wait until `restore`:
        fixed pools may have lost their memory as well, by the engine's own means.

        Returns:
            Bytes that the system has again; 0 where they were released before.
        """
        if self.is_released:
            return 0
        if self.host is not None:
            self.host.copies_over()()
        self._postponed = []
        arenas = self._elastic_arenas()
        # Before the first of them gives back what all of them share.
        self._held = {arena.memory: arena.memory.held for arena in arenas}
        return sum(arena.release() for arena in arenas)

    def restore(self) -> None:
        """Take as much memory again as there was, and run what has waited for it.

        All pools are cleared, those of fixed sizes too.

        Raises:
            MemoryError: if the system has it not; then no pool has any, and it can be
                asked for again.
        """
        if self._postponed is None:
            return
        restored: list[ElasticArena] = []
        try:
            for memory, size in self._held.items():
                _require(memory.hold(size))
            for arena in self._arenas.values():
                _require(arena.restore())
                if isinstance(arena, ElasticArena):
                    restored.append(arena)
        except MemoryError:
            for done in restored:
                done.release()
            for memory in self._held:
                memory.trim()
            raise
        postponed, self._postponed = self._postponed, None
        self.run(postponed)

    def parts(self) -> dict[PoolId, tuple[torch.Tensor, ...]]:
        """`[ids, bytes]` int8 parts of each pool, in the order of a host row."""
        return {pool: arena.parts for pool, arena in self._arenas.items()}

    def join(self, pool: PoolId, parts: Sequence[torch.Tensor]) -> None:
        """Have the rows of a pool of fixed size include more parts.

        Args:
            pool: one of the pools.
            parts: as for `Arena`.
        """
        arena = self._arenas[pool]
        if isinstance(arena, ElasticArena):
            raise TypeError(f"the memory of pool {pool!r} moves")
        if self.host is not None:
            raise TypeError(f"pool {pool!r} has host rows already, without these parts")
        self._arenas[pool] = Arena([*arena.parts, *parts])

    def attach_host(self, plan: HostPlan) -> HostCopies:
        """Have rows of host memory beside the pools, which are all there by now.

        Args:
            plan: of the rows.

        Returns:
            What copies to them, to measure and to close.

        Raises:
            ValueError: if the plan does not fit the pools.
            MemoryError: if there is no such memory, or it cannot be locked.
        """
        self.host = HostCopies(self.parts(), plan)
        return self.host

    def run(self, commands: Iterable[Command]) -> None:
        """Issue the commands; returns before a GPU has executed them.

        Call it before each forward pass, with its commands or with none.

        Raises:
            TypeError: for something that is no command here.
            RuntimeError: if the last pass did not keep the states that it was to keep.
            MemoryError: if the system refuses memory for a granule, which can
                only be where it was not held from the start.
        """
        if self._postponed is not None:
            self._postponed += commands
            return
        if self.interior is not None:
            self.interior.clear()
        for batch in batches(self._fold(commands)):
            first = batch[0]
            if isinstance(first, SaveInPass | MoveWindow | Take):
                self._keep(batch)
                continue
            if isinstance(first, OuterCommand):
                self._beyond_host(batch)
                continue
            if isinstance(first, Store | Load | Await) or Pool.is_host(first.pool):
                self._on_host(batch)
                continue
            arena = self._arenas[first.pool]
            match first:
                case Zero():
                    arena.zero([command.index for command in batch])
                case Copy():
                    arena.copy(
                        [command.source for command in batch],
                        [command.destination for command in batch],
                    )
                case Map() | Unmap():
                    refusal = self._move(first, self._elastic(first.pool))
                    if refusal is not None:
                        raise MemoryError(str(refusal))

    def _fold(self, commands: Iterable[Command]) -> list[Command]:
        """Bring states up to date before anything reads them; the other commands."""
        commands = list(commands)
        folds = [command for command in commands if isinstance(command, Fold)]
        if self.records is not None:
            self.records.fold(folds)
        elif folds:
            raise TypeError("verifications record nothing here")
        return [command for command in commands if not isinstance(command, Fold)]

    def _on_host(self, batch: list[Any]) -> None:
        """Run commands about rows of host memory."""
        if self.host is None:
            raise TypeError("this rank has no host memory")
        for command in batch:
            self.host.run(command)

    def _beyond_host(self, batch: list[Any]) -> None:
        """Run commands about what is behind the host memory."""
        if self.transfers is None:
            raise TypeError("nothing is behind this rank's host memory")
        for command in batch:
            self.transfers.run(command)

    def _keep(self, batch: list[Any]) -> None:
        """Run commands about what forward passes keep, or have kept."""
        match batch[0]:
            case SaveInPass():
                if self.interior is None:
                    raise TypeError("forward passes keep no interior states here")
                self.interior.order(batch)
            case MoveWindow():
                if self.windows is None:
                    raise TypeError("no convolution windows move here")
                self.windows.move(batch)
            case Take():
                if self.scratch is None:
                    raise TypeError("verifications write no scratch here")
                self.scratch.take(batch)

    def _move(self, command: Map | Unmap, arena: ElasticArena) -> Refusal | None:
        begin = time.perf_counter()
        refusal = None
        if isinstance(command, Map):
            refusal = arena.map(command.granules)
        else:
            arena.unmap(command.granules)
        self.moves.calls += 1
        self.moves.granules += len(command.granules)
        self.moves.bytes += len(command.granules) * arena.granule_bytes
        self.moves.seconds += time.perf_counter() - begin
        return refusal

    def _elastic_arenas(self) -> list[ElasticArena]:
        every = self._arenas.values()
        return [arena for arena in every if isinstance(arena, ElasticArena)]

    def _elastic(self, pool: PoolId) -> ElasticArena:
        arena = self._arenas[pool]
        if not isinstance(arena, ElasticArena):
            raise TypeError(f"the memory of pool {pool!r} is fixed")
        return arena


def _require(refusal: Refusal | None) -> None:
    if refusal is not None:
        raise MemoryError(str(refusal))
