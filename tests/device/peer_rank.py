# SPDX-License-Identifier: Apache-2.0
"""A rank with host memory and peers over real NIXL; alone, it offers what it is told.

    python -m tests.device.peer_rank PAGES LEASE_SECONDS

It prints where it listens, and then reads lines: `offer FIRST COUNT` offers that many
pages of its device, `settle` prints what became of offers.
"""

from __future__ import annotations

import json
import sys
import time
from array import array
from typing import Any

import torch

from hybrid_plugin.config import PeerOptions
from hybrid_plugin.core.commands import (
    BundleRows,
    Fetch,
    Map,
    Offer,
    PageRows,
    Pool,
    Store,
)
from hybrid_plugin.core.tiers.host_plan import HostPlan
from hybrid_plugin.core.tree.tokens import Tokens
from hybrid_plugin.device.arena import Arena
from hybrid_plugin.device.executor import Executor
from hybrid_plugin.engine.rank_peers import RankPeers
from hybrid_plugin.engine.rank_tiers import RankTiers
from hybrid_plugin.tiers.agreement import Outcome
from hybrid_plugin.tiers.bundle import Layouts
from hybrid_plugin.tiers.identity import Identity
from hybrid_plugin.tiers.peers.tier import PeerTier
from hybrid_plugin.tiers.row_layout import Axis, Field, RowLayout

PAGE, STATE = 16, 3 << 10
KV_BYTES = 16 << 10
"""Of a page."""
PATIENCE = 120.0


def plain(size: int, tokens: int, name: str) -> RowLayout:
    """Rows whose bytes are those of one tensor."""
    axes = [Axis("token", tokens, size // tokens)] if tokens else []
    axes.append(Axis("dim", size // max(tokens, 1), 1))
    return RowLayout(size, tokens, (Field(name, "uint8", 0, tuple(axes)),))


LAYOUTS = Layouts({Pool.KV: plain(KV_BYTES, PAGE, "0.key")}, plain(STATE, 0, "1.s"))
IDENTITY = Identity("these", "0" * 64, ("0 full", "1 state"), "uint8")


class PeerRank:
    """One rank, and what decides for it."""

    def __init__(
        self,
        pages: int,
        seed: int,
        lease_seconds: float = 30.0,
        identity: Identity = IDENTITY,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        sizes = {Pool.KV: KV_BYTES, Pool.STATE: STATE}
        self.pools = {
            pool: torch.randint(
                -128, 128, (pages, size), generator=generator, dtype=torch.int8
            )
            for pool, size in sizes.items()
        }
        self.executor = Executor({p: Arena([rows]) for p, rows in self.pools.items()})
        block = 8 * KV_BYTES
        self.plan = HostPlan(sizes, block, pages // 8 + 4)
        self.host = self.executor.attach_host(self.plan)
        granules = tuple(range(1, -(-pages // 8)))
        self.executor.run([Map(Pool.host(Pool.KV), granules)])
        self.peers = RankPeers(
            self.host,
            PeerOptions(),
            identity,
            LAYOUTS,
            lease_seconds=lease_seconds,
        )
        self.tiers = RankTiers(self.executor, lambda own: own, peers=self.peers)
        self._identity, self._seed = identity, seed
        self._tickets = 0
        self.listening(self)

    def listening(self, *ranks: PeerRank) -> None:
        """Say in offers from now on where the ranks of this server listen."""
        ports = [one.peers.port for one in ranks]
        mark = f"seed {self._seed} of {ports}"
        self.tier = PeerTier(self._identity, "127.0.0.1", ports, mark)

    def offer(self, first: int, count: int) -> str:
        """Offer pages of the device and a slot, by way of rows in another order."""
        rows = tuple(reversed(range(count)))
        tokens = tokens_of(count)
        storing = self.tier.begin_store(None, tokens, 0, 0)
        assert storing is not None
        self._tickets += 1
        bundle = rows_of(storing.key, tokens, rows, 1)
        self.executor.run(
            [
                Store(Pool.KV, tuple(range(first, first + count)), rows),
                Store(Pool.STATE, (first,), (1,)),
                Offer(self._tickets, bundle),
            ]
        )
        return storing.key

    def fetch(self, key: str, count: int) -> Outcome:
        """Read an offer into rows from the first one on, and wait."""
        self._tickets += 1
        bundle = rows_of(key, tokens_of(count), tuple(range(count)), 2)
        self.executor.run([Fetch(self._tickets, "peer", (bundle,))])
        (outcome,) = self.outcomes(1)
        return outcome

    def outcomes(self, count: int) -> list[Outcome]:
        """What becomes of so many tickets."""
        found: list[Outcome] = []
        deadline = time.monotonic() + PATIENCE
        while len(found) < count and time.monotonic() < deadline:
            found += self.tiers.settle()
            time.sleep(0.001)
        return found

    def row(self, pool: str, row: int) -> bytes:
        """What a row of the host holds."""
        (view,) = self.host.views(Pool.host(pool), [row])
        return view.tobytes()

    def close(self) -> None:
        self.tiers.close()
        self.host.close()


def tokens_of(pages: int) -> Tokens:
    """Of a prefix that ends before its last page does."""
    return array("q", range(pages * PAGE - 3))


def rows_of(key: str, tokens: Tokens, rows: tuple[int, ...], state: int) -> BundleRows:
    return BundleRows(key, None, tokens, 0, {Pool.KV: PageRows(0, rows)}, state)


def main(pages: int, lease_seconds: float) -> None:
    """Do what is told until nothing is."""
    rank = PeerRank(pages, 1, lease_seconds)

    def say(**what: Any) -> None:
        print(json.dumps(what), flush=True)

    say(port=rank.peers.port)
    for line in sys.stdin:
        word, *numbers = line.split()
        if word == "offer":
            say(key=rank.offer(*map(int, numbers)))
        else:
            (outcome,) = rank.outcomes(1)
            lost = outcome.lost
            why = None if lost is None else lost.failure.reason.name
            say(ticket=outcome.ticket, lost=why, bytes=outcome.bytes)
    rank.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
