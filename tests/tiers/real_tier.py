# SPDX-License-Identifier: Apache-2.0
"""Random traffic with a real tier in the place of the fake one.

The checks are those of `tests/core/test_outer_traffic.py`; the ranks are late and fail.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Generic, TypeVar

from hybrid_plugin.core.cache import HybridCache
from hybrid_plugin.core.commands import Pool
from hybrid_plugin.core.tiers.host_plan import HostPlan
from hybrid_plugin.tiers.bundle import Layouts
from hybrid_plugin.tiers.disk import DiskTier
from hybrid_plugin.tiers.keys import BundleName
from hybrid_plugin.tiers.store.tier import StoreTier
from tests.core.profiles import SOAK_FACTOR
from tests.core.support import Tiers
from tests.core.test_outer_traffic import EXERCISED, traffic_of
from tests.core.traffic import Traffic
from tests.tiers.support import IDENTITY, STATE, page_layout

KINDS = ("fixed", "elastic windows")
EPISODES = 12 * SOAK_FACTOR
OPERATIONS = 400

Tier = TypeVar("Tier", DiskTier, StoreTier)


class TierTraffic(Generic[Tier]):
    """Traffic of a seed whose cache has a real tier."""

    def __init__(
        self,
        kind: str,
        seed: int,
        make: Callable[[HostPlan, Mapping[str, Layouts], float], Tier],
    ) -> None:
        """Build engine and cache.

        Args:
            kind: of engine, as in `tests/core/test_outer_traffic.py`.
            seed: of the traffic, which chooses the pages' size too.
            make: a tier, of the host's plan, the layouts of each rank, and bytes read
                in a second.
        """
        found: list[Tier] = []

        class Cache(HybridCache):
            def __post_init__(self, tiers: Tiers) -> None:
                HybridCache.__post_init__(self, ())
                assert self.host is not None
                (fake,) = tiers
                rank = {IDENTITY.rank_name: layouts_of(self, self.host.plan)}
                found.append(make(self.host.plan, rank, fake.read_bytes_per_second))
                self.lower_tiers.use_outer(found)

        traffic = traffic_of(kind, seed, (1, 4, 16)[seed % 3], Cache)
        assert traffic.engine.ranks is not None
        traffic.engine.ranks.file_of = file_of
        traffic.engine.check_files = self.check  # type: ignore[method-assign]
        traffic.engine.watch_refusals = False
        self.traffic: Traffic = traffic
        (self.tier,) = found

    def known(self) -> list[str]:
        """Keys of the bundles that the tier counts, the least recently used first."""
        return [entry.name.key for entry in self.tier._index.oldest()]

    def check(self) -> None:
        """With nothing left to do, there is what the tier counts."""
        ranks = self.traffic.engine.ranks
        assert ranks is not None
        assert not self.tier._pending and not ranks.reports
        assert set(self.known()) == set(ranks.files), "files leak, or are missing"

    def operate(self) -> Iterator[int]:
        """Do all operations; whoever iterates checks between them."""
        for number in range(OPERATIONS):
            self.traffic.operate()
            yield number
        self.traffic.engine.check()

    def drain(self, totals: Counter[str]) -> None:
        """Serve what is left; counts what the tier did."""
        self.traffic.drain()
        totals.update(self.tier.stats.as_dict("disk"))


def layouts_of(cache: HybridCache, plan: HostPlan) -> Layouts:
    """Of the rows that a cache's host has."""
    pages = [pool for pool in plan.row_bytes if pool != Pool.STATE]
    return Layouts(
        {pool: page_layout(cache.page_size) for pool in pages},
        STATE if cache.slots.needed else None,
    )


def file_of(key: str) -> str:
    """What the fake ranks call a bundle."""
    return BundleName.from_text(key).key


def missing(totals: Counter[str], never: Iterable[str] = ()) -> list[str]:
    """What the traffic did not exercise, but for what never happens."""
    wanted = [name for name in EXERCISED if name not in never]
    return [name for name in wanted if not totals[f"disk_{name}"]]
