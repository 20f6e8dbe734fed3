# SPDX-License-Identifier: Apache-2.0
"""What became of stores and loads: numbers for metrics, and lines for the log."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field

from hybrid_plugin.tiers.failure import Failure, Reason

_EXPECTED = (Reason.NO_PARENT, Reason.NO_ROOM, Reason.CLEARED)
"""No fault of the disk, and not worth a line in the log."""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Outcomes:
    """Counted since the folder was opened."""

    stored: int = 0
    stored_bytes: int = 0
    """Of files."""
    loaded: int = 0
    loaded_bytes: int = 0
    """Of tensors."""
    evicted: int = 0
    evicted_bytes: int = 0
    """Of files."""
    failures: Counter[Reason] = field(default_factory=Counter)
    _told: set[Reason] = field(default_factory=set)

    def was_stored(self, size: int) -> None:
        """Count a file of so many bytes."""
        self.stored += 1
        self.stored_bytes += size
        self._told.clear()

    def was_loaded(self, size: int) -> None:
        """Count tensors of so many bytes."""
        self.loaded += 1
        self.loaded_bytes += size
        self._told.clear()

    def was_evicted(self, size: int) -> None:
        """Count a file of so many bytes."""
        self.evicted += 1
        self.evicted_bytes += size

    def failed(self, failure: Failure) -> None:
        """Count a failure; the first of its kind since a success is logged."""
        self.failures[failure.reason] += 1
        if failure.reason not in _EXPECTED and failure.reason not in self._told:
            self._told.add(failure.reason)
            logger.warning("hybrid-plugin: a bundle is lost: %s", failure)
