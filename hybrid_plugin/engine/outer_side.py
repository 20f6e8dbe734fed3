# SPDX-License-Identifier: Apache-2.0
"""What is behind host memory, where the cache is: put there, told, and ended."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Any
from uuid import uuid4

from hybrid_plugin.core.cache import HybridCache
from hybrid_plugin.core.tiers.outer_tier import OuterTier
from hybrid_plugin.engine.disk import Disk
from hybrid_plugin.engine.peers import Peers
from hybrid_plugin.engine.session_desk import (
    Answer,
    SessionDesk,
    without_disk,
)
from hybrid_plugin.engine.store import Store
from hybrid_plugin.tiers.agreement import Outcome


class OuterSide:
    """The disk or the store, and the peers, of one cache."""

    def __init__(
        self,
        cache: HybridCache,
        *,
        disk: Disk | None = None,
        peers: Peers | None = None,
        store: Store | None = None,
    ) -> None:
        """Put them behind the cache's host memory.

        Args:
            cache: that has no outer tier yet.
            disk: asked first; None for none.
            peers: None for none.
            store: that servers share, in the place of a disk; None for none.
        """
        self._cache = cache
        self._disk = disk
        self.peers = peers
        self.store = store
        self.sessions: SessionDesk | None = None
        """Takes orders about saved sessions, where there is a disk."""
        tiers: list[OuterTier] = []
        if disk is not None:
            tiers.append(disk.tier)
            self.sessions = SessionDesk(cache, disk.tier, disk.book, disk.serving)
        if peers is not None:
            tiers.append(peers.tier)
        if store is not None:
            tiers.append(store.tier)
        cache.lower_tiers.use_outer(tiers)

    def take(self, outcomes: Iterable[Outcome]) -> None:
        """Tell the cache what became of writes, fetches and offers.

        Args:
            outcomes: on which all ranks agree, in order.
        """
        for outcome in outcomes:
            lost = outcome.lost
            if lost is None:
                self._cache.lower_tiers.done(
                    outcome.ticket, True, seconds=outcome.seconds
                )
            else:
                self._cache.lower_tiers.done(
                    outcome.ticket,
                    False,
                    reason=lost.failure.reason,
                    bundle=lost.bundle,
                    seconds=outcome.seconds,
                )
            # What is saved is kept before anything makes room.
            self.step()

    def step(self) -> None:
        """Go on with what was ordered about sessions, and with what a store has to
        know; between the cache's steps."""
        if self.store is not None:
            self.store.step()
        if self.sessions is not None:
            self.sessions.step()

    @property
    def is_busy(self) -> bool:
        """Whether steps are of use: something was ordered that is not over."""
        return self.sessions is not None and self.sessions.is_busy

    def take_session_order(
        self, order: Mapping[str, Any], namespace: Hashable
    ) -> Answer:
        """Take an order about saved sessions; see `SessionDesk.take`."""
        if self.sessions is None:
            return without_disk()
        return self.sessions.take(order, namespace)

    def renew(self, update: str | None = None) -> None:
        """Note that the weights are others from now on, which no other server has.

        Args:
            update: a name for them, equal on all ranks; by default a random one.
        """
        name = uuid4().hex if update is None else update
        if self._disk is not None:
            self._disk.tier.renew(name)
        if self.store is not None:
            self.store.tier.renew(name)
        if self.peers is not None:
            self.peers.tier.close()

    def close(self) -> None:
        """Let another server open the folder, and leave the store."""
        if self.store is not None:
            self.store.close()
        if self._disk is not None:
            self._disk.close()
