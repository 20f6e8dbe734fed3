# SPDX-License-Identifier: Apache-2.0
"""Several agents of NIXL over the same memory, whose reads go on beside each other.

An agent serves one thread at a time.  What a process of the same machine has it copies
within the call that begins the transfer, with one core: other reads would wait for it.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from hybrid_plugin.errors import ConfigError
from hybrid_plugin.tiers.bundle_file import Rows
from hybrid_plugin.tiers.failure import Failure
from hybrid_plugin.tiers.peers.agent import DataPlane
from hybrid_plugin.tiers.peers.ranges import Range

logger = logging.getLogger(__name__)

_CORES = 4
"""Cores for each agent, which keeps a thread busy beside the engine's: not measured."""


def agents_that_fit(most: int) -> int:
    """How many agents this process has cores for.

    Args:
        most: that are of use.
    """
    return max(1, min(most, len(os.sched_getaffinity(0)) // _CORES))


class ReadingAgents:
    """A `DataPlane` that has an agent for each thread that reads.

    Peers know the first one, which is made at once.  The others are made by the threads
    that read when another one has taken those there are.
    """

    def __init__(self, make: Callable[[], DataPlane], most: int) -> None:
        """Make the first one.

        Args:
            make: an agent over the memory; all of them have the same.
            most: agents; threads beyond that share them.

        Raises:
            ConfigError: if it cannot be made.
        """
        self._make = make
        self._most = most
        self._agents = [make()]
        self._threads = 0
        """That have read."""
        self._own = threading.local()
        self._choosing = threading.Lock()
        self._stopped = False

    @property
    def metadata(self) -> bytes:
        """See `DataPlane.metadata`."""
        return self._agents[0].metadata

    @property
    def region(self) -> Range:
        """See `DataPlane.region`."""
        return self._agents[0].region

    def scratch(self, rows: Rows) -> AbstractContextManager[None]:
        """See `DataPlane.scratch`; this thread alone may read into it."""
        found: AbstractContextManager[None] = self._agent().scratch(rows)
        return found

    def read(
        self,
        metadata: bytes,
        theirs: Sequence[Range],
        own: Sequence[Range],
        meanwhile: Callable[[], None],
    ) -> Failure | None:
        """See `DataPlane.read`."""
        return self._agent().read(metadata, theirs, own, meanwhile)

    def stop(self) -> None:
        """See `DataPlane.stop`."""
        with self._choosing:
            self._stopped = True
            agents = self._agents[:]
        for agent in agents:
            agent.stop()

    def close(self) -> None:
        """See `DataPlane.close`."""
        for agent in self._agents:
            agent.close()

    def _agent(self) -> DataPlane:
        """That of this thread."""
        found: DataPlane | None = getattr(self._own, "agent", None)
        if found is None:
            with self._choosing:
                found = self._own.agent = self._choose()
        return found

    def _choose(self) -> DataPlane:
        place = self._threads
        self._threads += 1
        if len(self._agents) <= place < self._most and not self._stopped:
            try:
                self._agents.append(self._make())
            except ConfigError as error:
                self._most = len(self._agents)
                logger.warning(
                    "hybrid-plugin reads from peers with %d agents, for another one "
                    "cannot be made: %s",
                    self._most,
                    error,
                )
        return self._agents[place % len(self._agents)]
