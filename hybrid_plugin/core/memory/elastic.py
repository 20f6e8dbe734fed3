# SPDX-License-Identifier: Apache-2.0
"""ElasticBroker: one byte budget for all pools, moved to where it is needed.

A pool that runs dry asks it to expand.  It takes, in this order: what the budget has
left; idle granules of the pools that use theirs least; what is cached, the pool's own
or another's, whichever is worth less; and then what another pool can spare at all.  No
pool loses what a live sequence uses, nor goes below its floor.

Every move costs a wait for the device, however much moves.  So memory moves in few
large steps: of what nobody uses a pool takes half at once, up to a part of the budget
that takes about as long to move as the wait.  Content makes way for another pool's only
if the difference in worth, for as long as content is kept, repays the wait.

Decides only; memory moves when the commands are executed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from hybrid_plugin.core.commands import Command, Map, PoolId, Unmap
from hybrid_plugin.core.memory.broker import MoveStats, Reclaim
from hybrid_plugin.core.memory.id_space import IdSpace
from hybrid_plugin.core.policy.costs import MOVE_TOKENS

STEPS_IN_BUDGET = 128
"""A move takes at least this part of the budget, where that can be had: a step."""
MOVES_IN_BUDGET = 8
"""Of what nobody uses it takes at most this part of the budget.  A driver needs 6 to 13
ms for it (`engine/memory_blocks.py`), about as long as the pass that it waits for."""
BATCHES_IN_POOL = 1024
"""What is evicted at least is this part of a pool."""
NOTICEABLE = 0.1
"""Change of a pool's part of the memory that `notice` reports."""


@dataclass(frozen=True, slots=True)
class PoolBudget:
    """What a pool takes of the budget."""

    granule_bytes: int
    floor: int = 1
    """Granules that it never goes below."""


@dataclass(slots=True, eq=False)
class PoolState:
    pool: PoolId
    ids: IdSpace
    budget: PoolBudget
    reclaim: Reclaim
    wanted: int = 0
    """Ids that it must have free at the end of a call."""
    least: int = 0
    """Granules that it must have at the end of a call."""
    to_map: list[int] = field(default_factory=list)
    to_unmap: list[int] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        return self.ids.mapped * self.budget.granule_bytes

    @property
    def row_bytes(self) -> float:
        """Bytes of an id."""
        return self.budget.granule_bytes / self.ids.per_granule

    def least_granules(
        self, wanted: int, pinned: Iterable[int], returned: Sequence[int] = ()
    ) -> int:
        """Granules that hold `wanted` more ids, once all else is evicted.

        Live ids that are `returned` are evicted as well.
        """
        ids = self.ids.live - len(returned) + 1 + wanted
        granules = self.ids.pinned_granules - self.ids.pinned_by(returned)
        if pinned := list(pinned):
            ids += len(pinned)
            granules += self.ids.newly_pinned(pinned)
        return max(self.budget.floor, granules, -(-ids // self.ids.per_granule))

    def spare_granules(self, kept: int) -> int:
        """Granules whose worth of ids is free, `kept` ids not counted."""
        most = (self.ids.free - kept) // self.ids.per_granule
        return max(min(most, self.ids.mapped - self.least), 0)

    @property
    def batch(self) -> int:
        """Ids to evict at least, so that not each new one asks for it."""
        return self.ids.mapped * self.ids.per_granule // BATCHES_IN_POOL

    def takes_memory(self) -> bool:
        """Whether there are addresses left to map."""
        return self.ids.mapped < self.ids.granules


class ElasticBroker:
    """Divides a byte budget between pools, granule by granule."""

    moves_memory = True

    def __init__(
        self,
        budget: int,
        budgets: Mapping[PoolId, PoolBudget],
        *,
        compacts: bool = True,
        moves_cost: bool = True,
    ) -> None:
        """Prepare for the pools of `budgets`, which `register` brings.

        Args:
            budget: bytes that may be mapped at once.
            budgets: what each pool takes, in the order in which they are served.
            compacts: whether cached ids may be moved to empty a granule.
            moves_cost: whether a move makes the device wait, so that memory moves in
                few large steps, and only where that repays.
        """
        self.budget = budget
        self.stats = MoveStats()
        self._budgets = dict(budgets)
        self._compacts = compacts
        self._step = budget // STEPS_IN_BUDGET if moves_cost else 0
        self._move_tokens = MOVE_TOKENS if moves_cost else 0
        self._members: dict[PoolId, PoolState] = {}
        self._enqueue: Callable[[Command], None] = _lose
        self._noticed: dict[PoolId, float] = {}

    def register(self, pool: PoolId, ids: IdSpace, reclaim: Reclaim) -> None:
        """Take charge of a pool's memory: what is mapped stays, up to the floor more.

        Raises:
            ValueError: if that exceeds the budget.
        """
        member = PoolState(pool, ids, self._budgets[pool], reclaim)
        self._members[pool] = member
        while ids.mapped < min(member.budget.floor, ids.granules):
            self._map(member)
        self._flush()
        if self.slack < 0:
            raise ValueError(
                f"the pools start with {self.budget - self.slack} bytes, but the "
                f"budget is {self.budget}"
            )
        self._noticed = self._parts()

    def send_to(self, order: Callable[[Command], None]) -> None:
        """Have commands go to `order`."""
        self._enqueue = order

    @property
    def slack(self) -> int:
        """Bytes of the budget that are not mapped."""
        return self.budget - sum(member.bytes for member in self._members.values())

    def mapped_bytes(self) -> dict[PoolId, int]:
        """Bytes each pool has now."""
        return {pool: member.bytes for pool, member in self._members.items()}

    def used_bytes(self) -> int:
        """Bytes of ids that live sequences use."""
        return sum(
            m.ids.live * m.budget.granule_bytes // m.ids.per_granule
            for m in self._members.values()
        )

    def usage(self) -> float:
        """Share of the budget that live sequences use."""
        return self.used_bytes() / self.budget

    def notice(self) -> str | None:
        """A sentence, if the balance moved by much since the last one."""
        parts = self._parts()
        if all(abs(parts[p] - self._noticed[p]) <= NOTICEABLE for p in parts):
            return None
        self._noticed = parts
        now = ", ".join(
            f"{pool} {part:.0%} ({self._members[pool].bytes / 2**20:.0f} MiB)"
            for pool, part in parts.items()
        )
        return f"Cache memory moved between the pools: {now}"

    # ---------------------------------------------------------------- requests

    def fits(
        self,
        wanted: Mapping[PoolId, int],
        pinned: Mapping[PoolId, Iterable[int]] | None = None,
        returned: Mapping[PoolId, Sequence[int]] | None = None,
    ) -> bool:
        """Whether pools can have so many free ids each; changes nothing.

        Args:
            wanted: ids per pool.
            pinned: cached ids that must stay, per pool.
            returned: live ids that count as if they were free, per pool.
        """
        if self._are_free(wanted):
            return True
        pinned, returned = pinned or {}, returned or {}
        total = 0
        for pool, member in self._members.items():
            granules = member.least_granules(
                wanted.get(pool, 0), pinned.get(pool, ()), returned.get(pool, ())
            )
            if granules > member.ids.granules:
                return False
            total += granules * member.budget.granule_bytes
        return total <= self.budget

    def must_evict(self, wanted: Mapping[PoolId, int]) -> bool:
        """See `MemoryBroker.must_evict`."""
        missing = -float(self.slack)
        for pool, member in self._members.items():
            missing += (wanted.get(pool, 0) - member.ids.free) * member.row_bytes
        return missing > 0

    def max_free(self, pool: PoolId) -> int:
        """Ids of a pool that could be free at once, if all that is cached went."""
        member, rest = self._members[pool], self.budget
        for other in self._members.values():
            if other is not member:
                rest -= other.least_granules(0, ()) * other.budget.granule_bytes
        granules = min(rest // member.budget.granule_bytes, member.ids.granules)
        return granules * member.ids.per_granule - member.ids.live - 1

    def provide(
        self,
        wanted: Mapping[PoolId, int],
        pinned: Mapping[PoolId, Iterable[int]] | None = None,
    ) -> bool:
        """Make so many ids free in each pool, at the price of all that is cached.

        Args:
            wanted: ids per pool.
            pinned: cached ids that cannot be evicted now, per pool.

        Returns:
            False if it cannot be done, with nothing changed.
        """
        if self._are_free(wanted):
            return True
        if not self.fits(wanted, pinned):
            return False
        served = self._serve(wanted, pinned or {})
        assert served, "what is neither live nor reserved can be evicted"
        return True

    def offer(self, wanted: Mapping[PoolId, int], worth: float) -> bool:
        """See `MemoryBroker.offer`."""
        if self._are_free(wanted):
            return True
        return self.fits(wanted) and self._serve(wanted, {}, limit=worth)

    # ---------------------------------------------------------------- internal

    def _are_free(self, wanted: Mapping[PoolId, int]) -> bool:
        """Whether pools have so many free ids as they are."""
        for pool, count in wanted.items():
            if self._members[pool].ids.free < count:
                return False
        return True

    def _serve(
        self,
        wanted: Mapping[PoolId, int],
        pinned: Mapping[PoolId, Iterable[int]],
        *,
        limit: float = math.inf,
    ) -> bool:
        begin = time.perf_counter()
        for pool, member in self._members.items():
            member.wanted = wanted.get(pool, 0)
            kept = pinned.get(pool, ())
            member.least = member.least_granules(member.wanted, kept)
        served = all(self._fill(m, limit) for m in self._members.values())
        self._flush()
        self.stats.seconds += time.perf_counter() - begin
        return served

    def _fill(self, member: PoolState, limit: float) -> bool:
        """Get a pool the free ids that it wants for what is worth less than that."""
        while member.ids.free < member.wanted:
            if not self._gain(member, limit):
                return False
        return True

    def _gain(self, member: PoolState, limit: float) -> bool:
        """Do one thing that brings a pool nearer to free ids; False if none does."""
        maps = member.takes_memory()
        some = self._at_once(self.slack)
        if maps and (
            self._map_slack(member, some) or self._take_idle(member, last=False)
        ):
            return True
        own = member.reclaim.worth()
        if maps and self._take_cheaper(
            member, min(limit, math.inf if own is None else own)
        ):
            return True
        count = max(member.wanted - member.ids.free, member.batch)
        if own is not None and own < limit and member.reclaim.evict(count):
            return True
        return (
            limit == math.inf
            and maps
            and (self._take_idle(member, last=True) or self._shrink_another(member))
        )

    def _shrink_another(self, member: PoolState) -> bool:
        """Take one granule from any other pool; False if none can give one."""
        return any(self._shrink(donor) for donor in self._donors(member))

    def _map_slack(self, member: PoolState, some: int) -> bool:
        """Map some bytes of what the budget has left; more if the pool wants more."""
        size, per = member.budget.granule_bytes, member.ids.per_granule
        holes = member.ids.granules - member.ids.mapped
        enough = -(-(member.wanted - member.ids.free) // per)
        count = min(max(some // size, enough), self.slack // size, holes)
        for _ in range(count):
            self._map(member)
        return count > 0

    def _take_idle(self, member: PoolState, *, last: bool) -> bool:
        """Take idle granules of other pools for one, and map them for it.

        Args:
            member: the pool that gets them.
            last: whether this is the last resort: then up to one step.  If not, up to
                what moves at once, and the others keep what they promised and a
                granule's worth of free ids.
        """
        spare: list[tuple[PoolState, int]] = []
        for donor in self._donors(member):
            kept = 0 if last else donor.reclaim.promised() + donor.ids.per_granule
            most = min(donor.ids.idle, donor.spare_granules(donor.wanted + kept))
            spare.append((donor, most))
        idle = sum(most * donor.budget.granule_bytes for donor, most in spare)
        some = self._step if last else self._at_once(idle)
        missing = max(some, member.budget.granule_bytes) - self.slack
        plan: list[tuple[PoolState, int]] = []
        for donor, most in spare:
            count = min(most, -(-missing // donor.budget.granule_bytes))
            plan.append((donor, count))
            missing -= count * donor.budget.granule_bytes
            if missing <= 0:
                break
        gained = sum(count * donor.budget.granule_bytes for donor, count in plan)
        if self.slack + gained < member.budget.granule_bytes:
            return False
        for donor, count in plan:
            for _ in range(count):
                self._unmap(donor)
        return self._map_slack(member, gained if self._step else 0)

    def _take_cheaper(self, member: PoolState, limit: float) -> bool:
        """Shrink pools whose content is worth less than `limit`, up to one step."""
        missing = max(self._step, member.budget.granule_bytes) - self.slack
        gained = 0
        while gained < missing:
            donor = self._cheapest_donor(member, limit)
            if donor is None or not self._shrink(donor, limit):
                break
            gained += donor.budget.granule_bytes
        return gained > 0

    def _cheapest_donor(self, member: PoolState, limit: float) -> PoolState | None:
        """The pool with content worth least, if moving its memory repays the move.

        It saves the difference for as long as content is kept.
        """
        least, found = limit, None
        for donor in self._donors(member):
            worth = donor.reclaim.worth()
            if worth is not None and worth < least:
                least, found = worth, donor
        moved = max(self._step, member.budget.granule_bytes)
        gain = (limit - least) * moved * member.reclaim.lifetime()
        return found if gain > self._move_tokens else None

    def _shrink(self, donor: PoolState, limit: float = math.inf) -> bool:
        """Take one granule from a pool, evicting what is worth least.

        Returns:
            False if it cannot, or if it would take what is worth `limit` or more.
        """
        if donor.ids.mapped <= donor.least:
            return False
        while not (donor.ids.idle and donor.spare_granules(donor.wanted)):
            if self._compacts and donor.spare_granules(donor.wanted):
                granule = donor.ids.emptiest()
                if granule is not None:
                    self._flush()  # the copies may go to what was just mapped
                    donor.reclaim.migrate_granule(granule)
                    self.stats.granules_emptied += 1
                    continue
            worth = donor.reclaim.worth()
            if worth is None or worth >= limit:
                return False
            donor.reclaim.evict(donor.ids.per_granule)
        self._unmap(donor)
        return True

    def _donors(self, member: PoolState) -> list[PoolState]:
        """Other pools with more than they must have, those with most idle first."""
        others = [m for m in self._members.values() if m is not member]
        return sorted(
            (m for m in others if m.ids.mapped > m.least),
            key=lambda m: -m.ids.idle * m.budget.granule_bytes,
        )

    def _at_once(self, unused: int) -> int:
        """How many of the bytes that nobody uses move at once; 0 if moves are free."""
        if not self._step:
            return 0
        return max(self._step, min(unused // 2, self.budget // MOVES_IN_BUDGET))

    def _map(self, member: PoolState) -> None:
        granule = member.ids.lowest_hole()
        assert granule is not None, "callers check that there is one"
        member.ids.map(granule)
        member.to_map.append(granule)

    def _unmap(self, member: PoolState) -> None:
        granule = member.ids.highest_idle()
        assert granule is not None, "callers check that there is one"
        member.ids.unmap(granule)
        if granule in member.to_map:
            member.to_map.remove(granule)
        else:
            member.to_unmap.append(granule)

    def _flush(self) -> None:
        """Order what was decided: first all that leaves, then all that comes."""
        for member in self._members.values():
            self._count(member, member.to_unmap)
            if member.to_unmap:
                self._enqueue(Unmap(member.pool, tuple(sorted(member.to_unmap))))
                member.to_unmap = []
        for member in self._members.values():
            self._count(member, member.to_map)
            if member.to_map:
                self._enqueue(Map(member.pool, tuple(sorted(member.to_map))))
                member.to_map = []

    def _count(self, member: PoolState, granules: list[int]) -> None:
        self.stats.moves += len(granules)
        self.stats.moved_bytes += len(granules) * member.budget.granule_bytes

    def _parts(self) -> dict[PoolId, float]:
        total = self.budget - self.slack
        return {pool: m.bytes / total for pool, m in self._members.items()}


def _lose(command: Command) -> None:
    raise RuntimeError(f"nobody takes {command}: call send_to first")
