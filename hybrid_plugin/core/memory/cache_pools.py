# SPDX-License-Identifier: Apache-2.0
"""What a `HybridCache` is built from: its pools, and the broker between them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from hybrid_plugin.core.memory.broker import FixedBroker, MemoryBroker
from hybrid_plugin.core.memory.pools import PagePool, SlotPool
from hybrid_plugin.core.memory.scratch import ScratchRows
from hybrid_plugin.core.memory.window_tables import WindowGroup


class CachePools(Protocol):
    """Pools of one cache; `ElasticPlan.build` makes those that share memory."""

    @property
    def pages(self) -> PagePool:
        """Pages of the layers with full attention."""

    @property
    def slots(self) -> SlotPool:
        """Slots of the state layers; `NoSlots()` for a model without."""

    @property
    def windows(self) -> tuple[WindowGroup, ...]:
        """Groups of attention layers that look back only so far."""

    @property
    def broker(self) -> MemoryBroker:
        """Finds free ids in all of them."""

    @property
    def scratch(self) -> ScratchRows | None:
        """Rows in which drafts are verified, where they share the pools' memory."""


@dataclass(frozen=True, slots=True)
class FixedPools:
    """Pools that keep their memory."""

    pages: PagePool
    slots: SlotPool
    windows: tuple[WindowGroup, ...] = ()
    broker: FixedBroker = field(default_factory=FixedBroker)
    scratch: ScratchRows | None = None
