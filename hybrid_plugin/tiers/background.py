# SPDX-License-Identifier: Apache-2.0
"""A thread that reads and writes bundles: nobody who serves waits for a disk."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from hybrid_plugin.core.tree.tokens import Tokens
from hybrid_plugin.tiers.bundle import Bundle, Destination
from hybrid_plugin.tiers.failure import Failure, Reason
from hybrid_plugin.tiers.folder import BundleFolder
from hybrid_plugin.tiers.manifest import Manifest

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Part:
    """One bundle of a load."""

    manifest: Manifest
    destination: Destination


@dataclass(frozen=True, slots=True)
class Done:
    """What became of a job."""

    ticket: int
    failure: Failure | None
    """None if all was stored, or all was loaded.  A load that failed leaves anything
    in its destinations."""


@dataclass(frozen=True, slots=True)
class _Store:
    ticket: int
    bundle: Bundle


@dataclass(frozen=True, slots=True)
class _Load:
    ticket: int
    tokens: Tokens
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class _Clear:
    pass


class BackgroundFolder:
    """Runs jobs on a folder, one at a time.

    Loads go before stores, for requests wait for them; stores keep their order, so a
    bundle comes after the one before it.  Memory that was given with a job is in use
    until `poll` returns its ticket.
    """

    def __init__(self, folder: BundleFolder, capacity: int) -> None:
        """Start the thread.

        Args:
            folder: closed with this.
            capacity: jobs that may wait at once; further ones are refused.
        """
        self.folder = folder
        self._capacity = capacity
        self._stores: deque[_Store] = deque()
        self._loads: deque[_Load] = deque()
        self._done: deque[Done] = deque()
        self._tickets = 0
        self._closing = False
        self._is_clearing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(
            target=self._run, name="hybrid-plugin-bundles", daemon=True
        )
        self._thread.start()

    def store(self, bundle: Bundle) -> int | Failure:
        """Have a bundle stored; returns a ticket.

        Args:
            bundle: its memory stays as it is until the ticket is done.
        """
        with self._changed:
            refusal = self._refusal()
            if refusal is not None:
                return refusal
            job = _Store(self._ticket(), bundle)
            self._stores.append(job)
            self._changed.notify()
        return job.ticket

    def load(self, tokens: Tokens, parts: Sequence[Part]) -> int | Failure:
        """Have bundles loaded, all or none; returns a ticket.

        Args:
            tokens: of the sequence.
            parts: in the order of the sequence; their memory is the job's until the
                ticket is done.
        """
        with self._changed:
            refusal = self._refusal()
            if refusal is not None:
                return refusal
            job = _Load(self._ticket(), tokens, tuple(parts))
            self._loads.append(job)
            self._changed.notify()
        return job.ticket

    def poll(self) -> list[Done]:
        """The jobs that are done since the last call, without waiting."""
        with self._changed:
            done = list(self._done)
            self._done.clear()
        return done

    def clear(self) -> None:
        """Find nothing of this identity from now on, and fail the jobs that wait.

        Files are removed as soon as the job at hand is over.
        """
        self.folder.forget()
        with self._changed:
            self._fail_waiting(Reason.CLEARED)
            self._is_clearing = True
            self._changed.notify()

    def close(self) -> None:
        """Finish the job at hand, fail those that wait, and close the folder."""
        with self._changed:
            self._closing = True
            self._fail_waiting(Reason.CLOSED)
            self._changed.notify()
        self._thread.join()
        self.folder.close()

    def _fail_waiting(self, reason: Reason) -> None:
        waiting: list[_Load | _Store] = [*self._loads, *self._stores]
        self._done += [Done(job.ticket, Failure(reason)) for job in waiting]
        self._loads.clear()
        self._stores.clear()

    def _refusal(self) -> Failure | None:
        if self._closing:
            return Failure(Reason.CLOSED)
        waiting = len(self._stores) + len(self._loads)
        return Failure(Reason.BUSY) if waiting >= self._capacity else None

    def _ticket(self) -> int:
        self._tickets += 1
        return self._tickets

    def _run(self) -> None:
        while (job := self._next()) is not None:
            if isinstance(job, _Clear):
                self.folder.clear()
                continue
            done = Done(job.ticket, self._result(job))
            with self._changed:
                self._done.append(done)

    def _next(self) -> _Store | _Load | _Clear | None:
        """Wait for a job; None for the end."""
        with self._changed:
            while not (
                self._loads or self._stores or self._is_clearing or self._closing
            ):
                self._changed.wait()
            if self._is_clearing:
                self._is_clearing = False
                return _Clear()
            if self._closing:
                return None
            return self._loads.popleft() if self._loads else self._stores.popleft()

    def _result(self, job: _Store | _Load) -> Failure | None:
        try:
            return self._store(job) if isinstance(job, _Store) else self._load(job)
        except Exception as error:
            # Whoever waits for the ticket must get it; the log has the traceback.
            logger.exception("hybrid-plugin: a bundle is lost")
            return Failure(Reason.INTERNAL, repr(error))

    def _store(self, job: _Store) -> Failure | None:
        stored = self.folder.store(job.bundle)
        return stored if isinstance(stored, Failure) else None

    def _load(self, job: _Load) -> Failure | None:
        for part in job.parts:
            failure = self.folder.load(part.manifest, job.tokens, part.destination)
            if failure is not None:
                return failure
        return None
