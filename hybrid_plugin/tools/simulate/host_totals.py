# SPDX-License-Identifier: Apache-2.0
"""What host memory did in a simulation."""

from __future__ import annotations

from dataclasses import dataclass

from hybrid_plugin.core.commands import Pool
from hybrid_plugin.core.stats import HostStats
from hybrid_plugin.core.tiers.host_tier import HostTier
from hybrid_plugin.sizes import gib


@dataclass(frozen=True, slots=True)
class HostTotals:
    """Of all requests, those that only warm the cache up included."""

    memory_bytes: int
    most_tokens: int
    """Whose KV it holds, if it holds nothing else."""
    stats: HostStats

    @classmethod
    def of(cls, host: HostTier, page_size: int) -> HostTotals:
        """Of a host tier.

        Args:
            host: as it was left.
            page_size: tokens in a page.
        """
        plan = host.plan
        return cls(plan.budget, plan.rows(Pool.KV) * page_size, host.stats)

    def as_lines(self) -> list[str]:
        """For people."""
        stats = self.stats
        return [
            f"host memory        {gib(self.memory_bytes)}: {stats.hit_tokens:,} of "
            f"{stats.queried_tokens:,} tokens that the device lacked",
            f"copies             {stats.stores:,} to the host of "
            f"{gib(stats.stored_bytes)}, {stats.loads:,} back of "
            f"{gib(stats.loaded_bytes)}",
        ]
