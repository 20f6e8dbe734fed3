# SPDX-License-Identifier: Apache-2.0
"""The core on a real disk tier: real indices, threads, files and rows, on fake systems.

The fake device says what rows must hold; real rows follow it (`Mirror`).  What comes
from the disk must have come through real files, on a file system that fails.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hybrid_plugin.core.cache import HybridCache
from hybrid_plugin.core.commands import (
    BundleRows,
    Discard,
    Fetch,
    Pool,
    PoolId,
    Write,
    WriteRecord,
)
from hybrid_plugin.core.tiers.host_plan import HostPlan
from hybrid_plugin.tiers.agreement import Outcome, Reduce
from hybrid_plugin.tiers.bundle import Layouts
from hybrid_plugin.tiers.disk import DiskTier
from hybrid_plugin.tiers.failure import Reason
from hybrid_plugin.tiers.header import ALIGNMENT
from hybrid_plugin.tiers.row_layout import RowLayout
from hybrid_plugin.tiers.shelf import BundleShelf
from hybrid_plugin.tiers.stock import TierFolder
from hybrid_plugin.tiers.transfers import RankTransfers
from tests.core.device import HostMemory
from tests.core.outer import FakeRanks
from tests.core.traffic import Traffic
from tests.device.later_thread import LaterThread
from tests.device.mirror import Mirror, real_row_bytes
from tests.tiers.memory_files import Faults, MemoryFiles
from tests.tiers.support import IDENTITY

_OTHER_FAILS = 0.05
"""Chance that another rank fails where this one does not."""


class OtherRank:
    """Another rank that does the same, at other times, and fails by itself."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def reduce(self, values: list[int]) -> list[int]:
        """The greatest of both."""
        found = list(values)
        for first in range(0, len(values), 4):
            if self._rng.random() < 0.3:
                found[first] = 1  # it is not done
            elif self._rng.random() < _OTHER_FAILS and not found[first]:
                found[first + 1] = max(found[first + 1], _FAILED)
        return found


class RealRanks(FakeRanks):
    """One real rank, whose outcomes the fake host rows follow."""

    def __init__(
        self, host: HostMemory, rng: random.Random, mirror: DiskMirror, trouble: float
    ) -> None:
        super().__init__(host, 1, rng, trouble)
        self._mirror = mirror
        self._contents: dict[str, dict[tuple[PoolId, int], Any]] = {}
        """What was ever written, by key: pool, place and content of each row."""
        self.fetched = self.failed = 0

    def work(self) -> None:
        """Run some job of some thread, on a disk that somebody harms."""
        mirror = self._mirror
        if self.rng.random() < self.trouble:
            mirror.harm(self.rng)
        writer, reader = mirror.threads
        if self.rng.random() < 0.5:
            reader.step()
            return
        while writer.discards and reader.step():
            pass  # what discards files waits for what reads them
        writer.step()

    def report(self, cache: HybridCache) -> Iterator[None]:
        """Tell the core what all ranks are done with; yields behind each outcome."""
        other = OtherRank(self.rng) if self.trouble else None
        for outcome in self._mirror.settle(other.reduce if other else _same):
            command = self.host.out.pop(outcome.ticket)
            if outcome.lost is None:
                self._follow(command)
                cache.lower_tiers.done(outcome.ticket, True, seconds=outcome.seconds)
                yield
                continue
            self.failed += 1
            reason, bundle = outcome.lost.failure.reason, outcome.lost.bundle
            cache.lower_tiers.done(outcome.ticket, False, reason=reason, bundle=bundle)
            yield

    def _follow(self, command: Write | Fetch) -> None:
        """Change the fake rows as the real ones were changed."""
        if isinstance(command, Write):
            rows = command.rows
            self._contents[rows.key] = {
                place: self.host.read(place[0], row) for place, row in places(rows)
            }
            return
        self.fetched += 1
        filled = {}
        for rows in command.rows:
            for place, row in places(rows):
                content = self._contents[rows.key][place]
                own = list(content) if isinstance(content, list) else content
                filled[place[0], row] = own
        self.host.rows.update(filled)
        for (pool, row), content in filled.items():
            self._mirror.compare_host(pool, row, content)


class DiskMirror(Mirror):
    """Real rows, with real files behind them."""

    def __init__(
        self,
        traffic: Traffic,
        rng: random.Random,
        files: MemoryFiles,
        path: Path,
        trouble: float,
    ) -> None:
        """Follow traffic on a cache of `disk_cache`, from its start.

        Args:
            traffic: on it.
            rng: decides in which order queues and threads run.
            files: of the rank.
            path: of the tier.
            trouble: chance that the disk is harmed before a job.
        """
        self.traffic = traffic
        self.files = files
        device = traffic.engine.device
        super().__init__(device, rng)
        assert device.host is not None
        (tier,) = traffic.engine.cache.lower_tiers.outer
        assert isinstance(tier, DiskTier)
        shelf = BundleShelf(
            path, IDENTITY.rank_name, tier._layouts[IDENTITY.rank_name], files=files
        )
        threads = {name: LaterThread() for name in ("write", "disk")}
        self.threads = list(threads.values())
        self._transfers = RankTransfers(
            self._copies, shelf, {"disk": shelf}, lambda name, count: threads[name]
        )
        self.ranks = RealRanks(device.host, rng, self, trouble)
        traffic.engine.ranks = self.ranks

    def settle(self, all_reduce: Reduce) -> list[Outcome]:
        """What all ranks are done with."""
        return self._transfers.settle(all_reduce)

    def compare_host(self, pool: PoolId, row: int, content: Any) -> None:
        """Compare a row of the host that was fetched."""
        wanted = self.numbers(content)
        (found,) = self._copies.views(Pool.host(pool), [row])
        numbers = found.reshape(-1)[: 8 * len(wanted)].view("<i8").tolist()
        if numbers != wanted:
            self.wrong.append(f"row {row} of {pool} is {numbers}, not {wanted}")

    def harm(self, rng: random.Random) -> None:
        """Do something to the disk, or have a later call fail."""
        paths = self.files.paths()
        what = rng.randrange(4)
        if what == 0 or not paths:
            self.files.faults.calls_until_failure = rng.randrange(9)
            self.files.faults.error = rng.choice([errno.EIO, errno.ENOSPC])
            return
        path = rng.choice(paths)
        content = self.files.content(path)
        if what == 1:
            faults, self.files.faults = self.files.faults, Faults()
            self.files.remove(path)
            self.files.faults = faults
        elif what == 2:
            del content[rng.randrange(len(content) + 1) :]
        elif content:
            first = rng.choice([0, ALIGNMENT]) % len(content)  # of the header, or data
            content[rng.randrange(first, len(content))] ^= 1 << rng.randrange(8)

    def _follow_outer(self, command: Write | Fetch | Discard | WriteRecord) -> None:
        self._transfers.run(command)
        assert self._device.host is not None
        self._device.host.queue.clear()
        if self._rng.random() < 0.5:  # before queues come to what was ordered before
            self.ranks.work()


def places(rows: BundleRows) -> list[tuple[tuple[PoolId, int], int]]:
    """Pool and place of each row of a bundle, and the row."""
    found = [
        ((pool, index), row)
        for pool, pages in rows.pages.items()
        for index, row in enumerate(pages.rows)
    ]
    return found + ([] if rows.state is None else [((Pool.STATE, 0), rows.state)])


def disk_cache(
    path: Path, files: MemoryFiles, budget: int, opened: list[TierFolder]
) -> Callable[..., HybridCache]:
    """What makes a cache with a disk tier.

    Args:
        path: of the tier.
        files: of the rank.
        budget: bytes of the files.
        opened: gets the folder, to be closed.
    """

    def make(**fields: Any) -> HybridCache:
        own = layouts_of(fields["host"].plan, fields["page_size"])
        ranks = {IDENTITY.rank_name: own}
        opened.append(TierFolder(path, ranks, files=files))
        entries = opened[-1].entries()
        tier = DiskTier(entries, budget, IDENTITY, ranks, 1e9)
        return HybridCache(**{**fields, "tiers": (tier,)})

    return make


def layouts_of(plan: HostPlan, page_size: int) -> Layouts:
    """Of the rows of a mirror."""
    sizes = real_row_bytes(plan, page_size)
    state = sizes.pop(Pool.STATE, None)
    return Layouts(
        {pool: RowLayout(size, page_size, opaque=pool) for pool, size in sizes.items()},
        None if state is None else RowLayout(state, 0, opaque="state"),
    )


def _same(values: list[int]) -> list[int]:
    return values


def _code(reason: Reason) -> int:
    return ((1 << 40) - 0) * len(Reason) + list(Reason).index(reason)


_FAILED = _code(Reason.IO)
"""How a rank says that its first bundle failed."""
