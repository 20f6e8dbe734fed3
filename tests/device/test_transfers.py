# SPDX-License-Identifier: Apache-2.0
"""What is written from host rows and fetched into them, with real files and threads."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hybrid_plugin.core.commands import (
    Await,
    BundleRows,
    Discard,
    Fetch,
    Load,
    PageRows,
    Pool,
    Store,
    Write,
    WriteRecord,
)
from hybrid_plugin.core.tiers.host_plan import HostPlan
from hybrid_plugin.device.arena import Arena
from hybrid_plugin.device.executor import Executor
from hybrid_plugin.tiers.agreement import Outcome
from hybrid_plugin.tiers.bundle import Layouts
from hybrid_plugin.tiers.disk import DiskTier
from hybrid_plugin.tiers.failure import Reason
from hybrid_plugin.tiers.shelf import SUFFIX, BundleShelf
from hybrid_plugin.tiers.stock import TierFolder
from hybrid_plugin.tiers.transfers import RankTransfers, check_rows
from tests.tiers.support import IDENTITY, STATE, Unsynced, page_layout

PAGE = 4
LAYOUTS = Layouts({Pool.KV: page_layout(PAGE)}, STATE)
ROW_BYTES = {
    Pool.KV: LAYOUTS.pages[Pool.KV].row_bytes,
    Pool.STATE: STATE.row_bytes,
}
PLAN = HostPlan(ROW_BYTES, block_bytes=96, blocks=12)
PATIENCE = 60.0
"""Seconds after which a ticket counts as lost."""


class Rank:
    """A rank with a disk behind its host memory, and the one who decides for it."""

    def __init__(self, path: Path) -> None:
        generator = torch.Generator().manual_seed(1)
        self.pools = {
            pool: torch.randint(-128, 128, (16, size), generator=generator).to(
                torch.int8
            )
            for pool, size in ROW_BYTES.items()
        }
        self.executor = Executor({p: Arena([rows]) for p, rows in self.pools.items()})
        self.host = self.executor.attach_host(PLAN)
        rank = IDENTITY.rank_name
        self.folder = TierFolder(path, {rank: LAYOUTS}, files=Unsynced())
        self.tier = DiskTier(
            self.folder.entries(), 1 << 20, IDENTITY, {rank: LAYOUTS}, 1e9
        )
        shelf = BundleShelf(path, rank, LAYOUTS, files=Unsynced())
        check_rows(LAYOUTS, self.host)
        self.transfers = RankTransfers(self.host, shelf, {"disk": shelf})
        self.executor.transfers = self.transfers
        self.path = shelf.path

    def close(self) -> None:
        self.transfers.close()
        self.host.close()
        self.folder.close()

    def outcome(self) -> Outcome:
        (outcome,) = self.outcomes(1).values()
        return outcome

    def outcomes(self, count: int) -> dict[int, Outcome]:
        """The next ones by their tickets."""
        done: dict[int, Outcome] = {}
        deadline = time.monotonic() + PATIENCE
        while len(done) < count:
            assert time.monotonic() < deadline, f"only {done}"
            done |= {outcome.ticket: outcome for outcome in self.transfers.poll()}
            time.sleep(0.001)
        return done


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    made = Rank(tmp_path)
    yield made
    made.close()


TOKENS = array("q", range(100, 111))


def rows_of(key: str, pages: tuple[int, ...], state: int) -> BundleRows:
    return BundleRows(key, None, TOKENS, 0, {Pool.KV: PageRows(0, pages)}, state)


def stored(rank: Rank) -> str:
    """Have pages 3, 1, 2 and slot 5 of the device on the disk."""
    storing = rank.tier.begin_store(None, TOKENS, 0, 3 * 32 + 24)
    assert storing is not None
    rank.executor.run(
        [
            Store(Pool.KV, (3, 1, 2), (1, 2, 0)),
            Store(Pool.STATE, (5,), (3,)),
            Write(7, rows_of(storing.key, (1, 2, 0), 3)),
        ]
    )
    outcome = rank.outcome()
    assert (outcome.ticket, outcome.is_ok) == (7, True)
    rank.tier.stored(storing.key, outcome.seconds)
    return storing.key


def test_what_is_written_comes_back_to_other_rows(rank: Rank) -> None:
    key = stored(rank)
    (found,) = rank.tier.find(None, array("q", [*TOKENS, 0]), len(TOKENS))
    assert (found.key, found.start, found.end) == (key, 0, 11)
    before = {pool: rows.clone() for pool, rows in rank.pools.items()}
    rank.executor.run([Fetch(8, "disk", (rows_of(key, (2, 0, 1), 2),))])
    outcome = rank.outcome()
    assert (outcome.ticket, outcome.lost, outcome.bytes) == (8, None, 3 * 32 + 24)
    rank.executor.run(
        [
            Load(Pool.KV, (2, 0, 1), (8, 9, 10), 1),
            Load(Pool.STATE, (2,), (11,), 1),
            Await(1),
        ]
    )
    kv, state = rank.pools[Pool.KV], rank.pools[Pool.STATE]
    assert torch.equal(kv[8:11], before[Pool.KV][[3, 1, 2]])
    assert torch.equal(state[11], before[Pool.STATE][5])
    assert torch.equal(kv[:8], before[Pool.KV][:8])


def test_a_discarded_bundle_is_missing(rank: Rank) -> None:
    """It goes behind what came before; fetches that come later do not wait for that."""
    key = stored(rank)
    fetch = Fetch(8, "disk", (rows_of(key, (2, 0, 1), 2),))
    rank.executor.run([fetch, Discard((key,)), WriteRecord(9, "behind it", "a text")])
    done = rank.outcomes(2)
    assert [done[ticket].lost for ticket in (8, 9)] == [None, None]
    assert not list(rank.path.glob("*" + SUFFIX))
    rank.executor.run([replace(fetch, ticket=10)])
    lost = rank.outcomes(1)[10].lost
    assert lost is not None and lost.failure.reason is Reason.MISSING
