# SPDX-License-Identifier: Apache-2.0
"""A rank's part of writes, fetches and offers: runs commands, keeps their outcomes.

Files and peers take any time and fail, and neither the host nor the model's stream
waits for them.  So each source has threads of its own, and what is written another
one.  What a command reads and writes is its own until its outcome was polled.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import (
    FIRST_COMPLETED,
    Executor,
    Future,
    ThreadPoolExecutor,
    wait,
)
from functools import partial
from typing import Protocol

from hybrid_plugin.core.commands import (
    BundleRows,
    Decline,
    Discard,
    Fetch,
    Offer,
    OuterCommand,
    Pool,
    PoolId,
    Withdraw,
    Write,
    WriteRecord,
)
from hybrid_plugin.tiers.agreement import Lost, Outcome, Reduce, agree
from hybrid_plugin.tiers.bundle import Bundle, Layouts, PageBytes, Row
from hybrid_plugin.tiers.bundle_file import Rows
from hybrid_plugin.tiers.failure import Failure, Reason
from hybrid_plugin.tiers.manifest import Manifest
from hybrid_plugin.tiers.row_layout import RowLayout

logger = logging.getLogger(__name__)

Threads = Callable[[str, int], Executor]
"""Makes what runs jobs in order, by a name: so many at once."""


class HostMemory(Protocol):
    """A rank's rows of host memory."""

    def row_bytes(self, pool: PoolId) -> int:
        """Bytes of a row of a host pool."""

    def views(self, pool: PoolId, rows: Sequence[int]) -> Rows:
        """The memory of rows of a host pool, in their order, for reading and writing.

        Returns:
            Contiguous `[rows, row bytes]` each; they stay valid for as long as nobody
            moves or frees the rows.

        Raises:
            ValueError: for a row without memory.
        """

    def copies_over(self) -> Callable[[], None]:
        """What waits, in any thread, for all copies so far from and to all rows."""


class Source(Protocol):
    """Where a rank gets bundles from: a disk, or a peer."""

    @property
    def at_once(self) -> int:
        """Fetches that may run beside each other."""

    def fetch(self, bundles: Sequence[Bundle]) -> Lost | None:
        """Fill memory with bundles, in the order of the sequence: all, or it failed.

        Runs in a thread for the source alone and may take any time, but must end.  When
        it does, nothing touches the memory any more, which after a failure holds
        anything.
        """


class Sink(Protocol):
    """Where a rank keeps bundles."""

    def write(self, bundle: Bundle) -> Manifest | Failure:
        """Keep a bundle; in part it is never found."""

    def discard(self, keys: Sequence[str]) -> None:
        """Remove bundles, where they are there."""

    def record(self, name: str, text: str | None) -> Failure | None:
        """Keep a text, in the place of any other of its name; None removes it."""


class Lender(Protocol):
    """What lets peers of a rank read bundles from its host rows."""

    def offer(
        self, ticket: int, bundle: Bundle, copies_over: Callable[[], None]
    ) -> Future[Lost | None]:
        """Let a bundle be read, once the copies are over that fill its rows.

        Returns:
            What becomes of it: lost, if nobody has read it when its lease ends.
        """

    def withdraw(self, tickets: Iterable[int]) -> None:
        """Have nobody use what is read of these offers from now on."""

    def expire(self) -> None:
        """End the leases whose time is over."""


class Decliner(Protocol):
    """What tells peers of a rank that it does not need what they offer."""

    def decline(self, key: str, begun: float) -> None:
        """Have an offer end, if its peer answers and the offer holds still.

        Runs in a thread for this alone, and raises nothing.

        Args:
            key: of the offer.
            begun: when that was decided, on Python's monotonic clock.
        """


class RankTransfers:
    """Runs every `OuterCommand`.

    `run` and `poll` are called by one thread, and do not wait for any disk or peer.
    """

    def __init__(
        self,
        memory: HostMemory,
        sink: Sink | None,
        sources: Mapping[str, Source],
        threads: Threads | None = None,
        lender: Lender | None = None,
        decliner: Decliner | None = None,
    ) -> None:
        """Start with nothing out.

        Args:
            memory: of this rank.
            sink: takes what is written; None where nothing is.
            sources: by the name that `Fetch` gives.
            threads: makes them; by default real ones.
            lender: takes what is offered; None where nothing is.
            decliner: tells peers what is not needed; None where there are none.
        """
        threads = _threads if threads is None else threads
        self._memory = memory
        self._sink = sink
        self._sources = dict(sources)
        self._lender = lender
        self._decliner = decliner
        self._refusing = None if decliner is None else threads("decline", 1)
        """A thread for itself: a peer that is silent holds up nothing else."""
        self._writer = threads("write", 1)
        self._readers = {
            name: threads(name, source.at_once) for name, source in sources.items()
        }
        self._out: dict[int, Future[Outcome]] = {}
        """By ticket, in the order of the commands: the same on all ranks."""
        self._offered: set[int] = set()
        """Tickets of offers among them."""
        self._told: set[Reason] = set()
        """Reasons that the log has of this rank since the last success."""

    @property
    def is_idle(self) -> bool:
        """Whether no outcome is still to be polled: the same on all ranks."""
        return not self._out

    def run(self, command: OuterCommand) -> None:
        """Begin what a command asks for.

        Raises:
            KeyError: for a source that there is not.
            TypeError: where nothing is kept, for a `Write`, `Discard` or `WriteRecord`,
                and without peers, for an `Offer`, `Withdraw` or `Decline`.
            ValueError: for a row without memory, and a ticket that is out.
        """
        match command:
            case Write(ticket, rows):
                sink, bundle = self._keeper(), self._bundle(rows)
                self._begin(ticket, self._writer, lambda: _write(sink, bundle))
            case Fetch(ticket, name, many):
                source, bundles = self._sources[name], [self._bundle(r) for r in many]
                thread = self._readers[name]
                self._begin(ticket, thread, lambda: _fetch(source, bundles))
            case WriteRecord(ticket, name, text):
                sink = self._keeper()
                work = partial(_record, sink, name, text)
                self._begin(ticket, self._writer, work)
            case Discard(keys):
                # Behind all that came before; the thread itself only has the writes.
                sink, before = self._keeper(), self._of_jobs()
                self._writer.submit(_discard, sink, keys, before)
            case Offer(ticket, rows):
                self._offer(ticket, self._bundle(rows))
            case Withdraw(tickets):
                self._lending().withdraw(tickets)
            case Decline(keys):
                self._decline(keys)

    def poll(self) -> list[Outcome]:
        """What is done since the last call, where this is the only rank."""
        return self.settle(lambda values: values)

    def settle(self, all_reduce: Reduce) -> list[Outcome]:
        """What all ranks are done with since the last call, the same on each.

        All of them call it at the same point of their commands, such as once a step
        behind its commands.  Nothing is reduced while nothing is out.

        Args:
            all_reduce: the greatest of all ranks, element by element.
        """
        if not self._out:
            return []
        if self._lender is not None:
            self._lender.expire()
        own = {
            ticket: job.result() if job.done() else None
            for ticket, job in self._out.items()
        }
        agreed = agree(own, all_reduce)
        for outcome in agreed:
            self._offered.discard(outcome.ticket)
            del self._out[outcome.ticket]
            self._log(own[outcome.ticket])
        return agreed

    def wait(self, seconds: float) -> None:
        """Return when anything that is out is done, or after so many seconds.

        Where nothing is out but offers, whose end nobody waits for, return at once.
        """
        wait(self._of_jobs(), seconds, FIRST_COMPLETED)

    def close(self) -> None:
        """Finish the jobs at hand and drop the others; nothing touches memory after.

        What was to be discarded is: it would be found at the next start.
        """
        for job in self._out.values():
            job.cancel()
        # The writer first: what a discard waits for goes on until then.
        for thread in (self._writer, *self._readers.values()):
            thread.shutdown(wait=True)
        if self._refusing is not None:  # it touches no memory
            self._refusing.shutdown(wait=False, cancel_futures=True)

    def _log(self, own: Outcome | None) -> None:
        """Log a failure of this rank, the first of its kind since a success."""
        assert own is not None, "all ranks are done"
        if own.lost is None:
            self._told.clear()
        elif own.lost.failure.reason not in self._told:
            self._told.add(own.lost.failure.reason)
            logger.warning("hybrid-plugin: a bundle is lost: %s", own.lost.failure)

    # ---------------------------------------------------------------- internal

    def _begin(
        self, ticket: int, thread: Executor, work: Callable[[], Lost | int]
    ) -> None:
        if ticket in self._out:
            raise ValueError(f"ticket {ticket} is out already")
        copies = self._memory.copies_over()
        self._out[ticket] = thread.submit(_outcome, ticket, copies, work)

    def _offer(self, ticket: int, bundle: Bundle) -> None:
        if ticket in self._out:
            raise ValueError(f"ticket {ticket} is out already")
        lender, begin = self._lending(), time.perf_counter()
        end: Future[Outcome] = Future()
        self._out[ticket] = end
        self._offered.add(ticket)
        size = _bytes(bundle)

        def note(done: Future[Lost | None]) -> None:
            lost, seconds = done.result(), time.perf_counter() - begin
            if not end.cancelled():
                moved = size if lost is None else 0
                end.set_result(Outcome(ticket, lost, moved, seconds))

        copies = self._memory.copies_over()
        lender.offer(ticket, bundle, copies).add_done_callback(note)

    def _decline(self, keys: Sequence[str]) -> None:
        if self._decliner is None or self._refusing is None:
            raise TypeError("there are no peers")
        for key in keys:
            self._refusing.submit(self._decliner.decline, key, time.monotonic())

    def _of_jobs(self) -> list[Future[Outcome]]:
        """What is out of writes and fetches."""
        return [job for ticket, job in self._out.items() if ticket not in self._offered]

    def _lending(self) -> Lender:
        if self._lender is None:
            raise TypeError("this rank offers nothing to peers")
        return self._lender

    def _keeper(self) -> Sink:
        if self._sink is None:
            raise TypeError("this rank keeps no bundles")
        return self._sink

    def _bundle(self, rows: BundleRows) -> Bundle:
        return Bundle(
            rows.key,
            rows.tokens,
            rows.start,
            self._pages(rows),
            self._state(rows),
        )

    def _pages(self, rows: BundleRows) -> dict[PoolId, PageBytes]:
        return {
            pool: PageBytes(
                pages.start, self._memory.views(Pool.host(pool), pages.rows)
            )
            for pool, pages in rows.pages.items()
        }

    def _state(self, rows: BundleRows) -> Row | None:
        if rows.state is None:
            return None
        (view,) = self._memory.views(Pool.host(Pool.STATE), [rows.state])
        return view.reshape(-1)


def check_rows(layouts: Layouts, memory: HostMemory) -> None:
    """Check that a rank's rows are those that its layouts describe.

    Raises:
        ValueError: if they are not.
    """
    rows: dict[PoolId, RowLayout] = dict(layouts.pages)
    if layouts.state is not None:
        rows[Pool.STATE] = layouts.state
    for pool, layout in rows.items():
        size = memory.row_bytes(Pool.host(pool))
        if size != layout.row_bytes:
            raise ValueError(
                f"rows of {pool} have {size} bytes, not {layout.row_bytes} as described"
            )


def _outcome(
    ticket: int, copies: Callable[[], None], work: Callable[[], Lost | int]
) -> Outcome:
    """What becomes of work, which gives the bytes that it moved."""
    copies()
    begin = time.perf_counter()
    try:
        result = work()
    except Exception as error:
        result = Lost(0, _fault(error))
    seconds = time.perf_counter() - begin
    if isinstance(result, Lost):
        return Outcome(ticket, result, 0, seconds)
    return Outcome(ticket, None, result, seconds)


def _write(sink: Sink, bundle: Bundle) -> Lost | int:
    result = sink.write(bundle)
    return Lost(0, result) if isinstance(result, Failure) else _bytes(bundle)


def _fetch(source: Source, bundles: Sequence[Bundle]) -> Lost | int:
    return source.fetch(bundles) or sum(_bytes(bundle) for bundle in bundles)


def _record(sink: Sink, name: str, text: str | None) -> Lost | int:
    failure = sink.record(name, text)
    return Lost(0, failure) if failure is not None else len(text or "")


def _discard(sink: Sink, keys: Sequence[str], before: list[Future[Outcome]]) -> None:
    wait(before)
    try:
        sink.discard(keys)
    except Exception as error:
        _fault(error)


def _threads(name: str, count: int) -> Executor:
    return ThreadPoolExecutor(count, f"hybrid-plugin {name}")


def _fault(error: Exception) -> Failure:
    """What whoever waits gets; the log has the traceback."""
    logger.exception("hybrid-plugin: a bundle is lost")
    return Failure(Reason.INTERNAL, repr(error))


def _bytes(bundle: Bundle) -> int:
    """Bytes of its memory."""
    pages = [row for each in bundle.pages.values() for row in each.rows]
    if bundle.state is not None:
        pages.append(bundle.state)
    return sum(row.nbytes for row in pages)
