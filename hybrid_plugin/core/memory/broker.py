# SPDX-License-Identifier: Apache-2.0
"""MemoryBroker: who asks it for free ids gets them at the price of what is cached.

Pools register with a broker by name: pages of any number of attention groups,
state slots, and any other rows that come and go with sequences.  The cache
asks for ids of several pools at once and never looks at how they are found.
There are two brokers: `FixedBroker`, where each pool keeps its memory, and
`ElasticBroker` (`elastic.py`), which moves memory between the pools.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Protocol

from hybrid_plugin.core.commands import Command, PoolId
from hybrid_plugin.core.memory.id_space import IdSpace


@dataclass(slots=True)
class MoveStats:
    """Totals of memory that moved between pools since start-up."""

    moves: int = 0
    """Granules that got memory or lost it."""
    moved_bytes: int = 0
    granules_emptied: int = 0
    """Granules whose cached ids were moved elsewhere."""
    seconds: float = 0.0
    """Time spent on deciding, and on evicting what had to go."""
    device_seconds: float = 0.0
    """Time a rank spent on moving memory; whoever runs the commands says so."""

    def as_dict(self) -> dict[str, float]:
        """Every total by name."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


class Reclaim(Protocol):
    """What the owner of a pool's ids tells the broker, and does for it."""

    def worth(self) -> float | None:
        """Worth of what would be evicted next; None for nothing.

        Comparable between pools: what it is expected to save, by byte and admission.
        """

    def lifetime(self) -> float:
        """Admissions that content is kept after its last use, as of late."""

    def evict(self, count: int) -> bool:
        """Evict that, up to `count` ids; False if nothing could be."""

    def promised(self) -> int:
        """Free ids that live sequences will take; others get them if they must."""

    def migrate_granule(self, granule: int) -> None:
        """Move the cached ids of a granule without live ones to free ids elsewhere."""


class MemoryBroker(Protocol):
    """Finds free ids for the pools that registered with it."""

    stats: MoveStats
    moves_memory: bool
    """Whether memory moves between pools.  Each move waits for the device, so one
    call for a whole prompt costs less than one in each step of its prefill."""

    def send_to(self, enqueue: Callable[[Command], None]) -> None:
        """Have commands go to `enqueue`."""

    def register(self, pool: PoolId, ids: IdSpace, reclaim: Reclaim) -> None:
        """Take charge of a pool.  Pools are served in the order of registration."""

    def fits(
        self,
        wanted: Mapping[PoolId, int],
        pinned: Mapping[PoolId, Iterable[int]] | None = None,
        returned: Mapping[PoolId, Sequence[int]] | None = None,
    ) -> bool:
        """Whether pools can have that many free ids each; changes nothing.

        Args:
            wanted: ids by pool.
            pinned: cached ids that must stay, by pool.
            returned: live ids that count as if they were free, by pool.
        """

    def provide(
        self,
        wanted: Mapping[PoolId, int],
        pinned: Mapping[PoolId, Iterable[int]] | None = None,
    ) -> bool:
        """Make that many ids free in each pool, at the price of all that is cached.

        Args:
            wanted: ids by pool.
            pinned: cached ids that cannot be evicted now, by pool.

        Returns:
            False if it cannot be done, with nothing changed.
        """

    def offer(self, wanted: Mapping[PoolId, int], worth: float) -> bool:
        """Make that many ids free in each pool, if what is worth less can make room.

        Args:
            wanted: ids by pool.
            worth: of what is to be kept there.

        Returns:
            False if everything else is worth more or in use.  Content worth less may
            have been evicted in the attempt.
        """

    def must_evict(self, wanted: Mapping[PoolId, int]) -> bool:
        """Whether something cached must go for pools to have so many free ids each."""

    def max_free(self, pool: PoolId) -> int:
        """Ids of a pool that could be free at once, if all that is cached went."""

    def usage(self) -> float:
        """Share of the memory that live sequences use, between 0 and 1."""

    def mapped_bytes(self) -> dict[PoolId, int]:
        """Bytes that each pool has now; empty where no memory moves."""

    def notice(self) -> str | None:
        """A sentence, if the balance moved by much since the last one."""


class FixedBroker:
    """Every pool keeps its memory, and makes room in itself alone."""

    moves_memory = False

    def __init__(self) -> None:
        """No pool is registered yet."""
        self.stats = MoveStats()
        self._pools: dict[PoolId, tuple[IdSpace, Reclaim]] = {}

    def send_to(self, enqueue: Callable[[Command], None]) -> None:
        """This broker orders nothing from the device."""

    def register(self, pool: PoolId, ids: IdSpace, reclaim: Reclaim) -> None:
        """Take charge of a pool whose memory is all there."""
        self._pools[pool] = (ids, reclaim)

    def fits(
        self,
        wanted: Mapping[PoolId, int],
        pinned: Mapping[PoolId, Iterable[int]] | None = None,
        returned: Mapping[PoolId, Sequence[int]] | None = None,
    ) -> bool:
        """See `MemoryBroker.fits`."""
        for pool, count in wanted.items():
            ids = self._pools[pool][0]
            count -= len(returned.get(pool, ())) if returned else 0
            if count <= ids.free:
                continue
            kept = len(set(pinned.get(pool, ()))) if pinned else 0
            if count > ids.free + ids.cached - kept:
                return False
        return True

    def provide(
        self,
        wanted: Mapping[PoolId, int],
        pinned: Mapping[PoolId, Iterable[int]] | None = None,
    ) -> bool:
        """See `MemoryBroker.provide`."""
        if not self.fits(wanted, pinned):
            return False
        for pool, count in wanted.items():
            ids, reclaim = self._pools[pool]
            while ids.free < count:
                evicted = reclaim.evict(count - ids.free)
                assert evicted, f"cached ids of {pool} belong to evictable nodes"
        return True

    def offer(self, wanted: Mapping[PoolId, int], worth: float) -> bool:
        """See `MemoryBroker.offer`."""
        if not self.fits(wanted):
            return False
        for pool, count in wanted.items():
            ids, reclaim = self._pools[pool]
            while ids.free < count:
                least = reclaim.worth()
                if least is None or least >= worth or not reclaim.evict(1):
                    return False
        return True

    def must_evict(self, wanted: Mapping[PoolId, int]) -> bool:
        """See `MemoryBroker.must_evict`."""
        return any(n > self._pools[pool][0].free for pool, n in wanted.items())

    def max_free(self, pool: PoolId) -> int:
        """See `MemoryBroker.max_free`."""
        ids = self._pools[pool][0]
        return ids.free + ids.cached

    def usage(self) -> float:
        """Share in use of the fullest pool; what is cached does not count."""
        shares = [ids.live / (ids.capacity - 1) for ids, _ in self._pools.values()]
        return max(shares, default=0.0)

    def mapped_bytes(self) -> dict[PoolId, int]:
        """Nothing moves."""
        return {}

    def notice(self) -> str | None:
        """Nothing moves."""
        return None
