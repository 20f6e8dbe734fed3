# SPDX-License-Identifier: Apache-2.0
"""A shared store where the cache is: what is looked up there when a request comes."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotInTime
from functools import partial
from typing import Final

from hybrid_plugin.core.tree.tokens import Tokens
from hybrid_plugin.engine.front_door import FrontDoor, IncomingRequest
from hybrid_plugin.engine.rank_store import RanksInStore
from hybrid_plugin.tiers.index import Entry
from hybrid_plugin.tiers.store.directory import Directory, Found
from hybrid_plugin.tiers.store.objects import ObjectStore
from hybrid_plugin.tiers.store.tier import StoreTier

PATIENCE: Final = 0.02
"""Seconds that a request's arrival waits for the store: many times what it takes in one
network, and less than a pass of a large model."""
_MOST_OUT: Final = 8
"""Look-ups that may be out; beyond that none begins."""


def _thread() -> Executor:
    return ThreadPoolExecutor(1, "hybrid-plugin store")


class Store:
    """The store tier of one cache, and its directories.

    A look-up takes a millisecond, for which an arriving request waits.  One that takes
    longer is of use to later requests; until one is in time again, nobody waits.
    """

    patience = PATIENCE
    """Seconds that arrivals wait."""

    def __init__(
        self,
        ranks: RanksInStore,
        objects: ObjectStore,
        logger: logging.Logger,
        *,
        make: Callable[..., StoreTier] = StoreTier,
        thread: Callable[[], Executor] = _thread,
    ) -> None:
        """Look nothing up yet.

        Args:
            ranks: that have a part of each bundle.
            objects: of the store; only used by a thread of this.
            logger: the adapter's.
            make: the tier, of the first arguments of `StoreTier`.
            thread: makes it.
        """
        self.tier = make(ranks.identity, ranks.layouts, ranks.read_bytes_per_second)
        self._objects = objects
        self._directory = Directory(objects, list(ranks.layouts))
        self._logger = logger
        self._thread = thread()
        self._out: deque[tuple[str, Future[Found | None]]] = deque()
        """Look-ups in their order, with the fingerprint for which they were."""
        self._is_in_time = True
        self._has_told = False

    def arrived(self, front_door: FrontDoor, request: IncomingRequest) -> None:
        """Learn what the store has of a request that has just come.

        Args:
            front_door: of the cache.
            request: that is not admitted yet.
        """
        front_door.seek(request, self._look)

    def step(self) -> None:
        """Take what was looked up, and have directories list what is new."""
        while self._out and self._out[0][1].done():
            fingerprint, job = self._out.popleft()
            found = job.result()
            if found is not None and fingerprint == self.tier.fingerprint:
                self.tier.learn(found)
                self._is_in_time = True
        news, self.tier.news = self.tier.news, []
        for entry, is_there in news:
            self._thread.submit(self._try, partial(self._list, entry, is_there))

    def close(self) -> None:
        """Leave the store."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._objects.close()

    # ---------------------------------------------------------------- internal

    def _look(self, namespace: Hashable, tokens: Tokens) -> None:
        self.step()
        if len(self._out) >= _MOST_OUT:
            return
        fingerprint = self.tier.fingerprint
        work = partial(self._directory.look, fingerprint, namespace, tokens)
        job = self._thread.submit(self._try, work)
        self._out.append((fingerprint, job))
        if self._is_in_time:
            try:
                job.result(self.patience)
            except NotInTime:
                self._is_in_time = False
        self.step()

    def _list(self, entry: Entry, is_there: bool) -> None:
        if is_there:
            self._directory.add(entry)
        else:
            self._directory.drop(entry.name)

    def _try(self, work: Callable[[], Found | None]) -> Found | None:
        """What work gives; None where the store does not answer, or has no name."""
        try:
            found = work()
        except TypeError:  # a namespace without a name outside this process
            return Found((), ())
        except OSError as error:
            if not self._has_told:
                self._has_told = True
                self._logger.warning(
                    "hybrid-plugin: the store does not answer: %s.", error.strerror
                )
            return None
        self._has_told = False
        return found
