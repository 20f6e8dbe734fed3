# SPDX-License-Identifier: Apache-2.0
"""What a rank lets its peers read, and for how long.

An offer is a bundle in rows of host memory that stay as they are.  Its lease ends when
a peer has read it or does not need it, when the time is over, or when it is withdrawn.
A peer that has read asks whether the lease held until then: what it read counts only if
it did.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from hybrid_plugin.tiers.agreement import Lost
from hybrid_plugin.tiers.bundle import Bundle
from hybrid_plugin.tiers.failure import Failure, Reason
from hybrid_plugin.tiers.peers.params import PeerOffer

LEASE_SECONDS: Final = 30.0
"""That an offer holds if nobody renews it."""
_REMEMBERED = 1024
"""Names of offers that ended, or that a peer did not need before they were made: who
asks for one of them need not wait."""

Done: TypeAlias = "Future[Lost | None]"


@dataclass(slots=True, eq=False)
class Lease:
    """One offer."""

    name: str
    bundle: Bundle
    """In host rows, from token 0 on."""
    copies_over: Callable[[], None]
    """Waits until the rows hold it."""
    ends_at: float
    is_open: bool = False
    """Whether a peer reads it."""
    done: Done = field(default_factory=Future)
    """What became of it."""


class Leases:
    """All offers of one rank.

    Offers are made and withdrawn by the thread that runs commands, and read by others.
    """

    def __init__(
        self,
        seconds: float = LEASE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start without offers.

        Args:
            seconds: that an offer holds if nobody renews it.
            clock: the time in seconds.
        """
        self.seconds = seconds
        self._clock = clock
        self._changed = threading.Condition()
        self._by_name: dict[str, Lease] = {}
        self._by_ticket: dict[int, Lease] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_name)

    # ------------------------------------------- of the thread that runs commands

    def offer(
        self, ticket: int, bundle: Bundle, copies_over: Callable[[], None]
    ) -> Done:
        """See `Lender.offer`; the bundle's key is a `PeerOffer`.

        Args:
            ticket: under which it can be withdrawn.
            bundle: in host rows, from token 0 on.
            copies_over: waits, in any thread, until the rows hold it.
        """
        name = PeerOffer.from_text(bundle.key).name
        lease = Lease(name, bundle, copies_over, self._clock() + self.seconds)
        with self._changed:
            self._by_name[name] = self._by_ticket[ticket] = lease
            self._changed.notify_all()
        lease.done.add_done_callback(lambda _: self._by_ticket.pop(ticket, None))
        if name in self._ended:  # a peer was faster
            self._end(lease, Lost(0, Failure(Reason.DECLINED)))
        return lease.done

    def withdraw(self, tickets: Iterable[int]) -> None:
        """End leases; what anybody reads from now on does not count."""
        for ticket in tickets:
            lease = self._by_ticket.get(ticket)
            if lease is not None:
                self._end(lease, Lost(0, Failure(Reason.CLEARED)))

    def withdraw_all(self) -> None:
        """End all leases."""
        for lease in list(self._by_name.values()):
            self._end(lease, Lost(0, Failure(Reason.CLEARED)))

    def expire(self) -> None:
        """End the leases whose time is over."""
        now = self._clock()
        for lease in list(self._by_name.values()):
            if lease.ends_at <= now:
                self._end(lease, Lost(0, Failure(Reason.UNREAD)))

    # ------------------------------------------------------------ of other threads

    def find(self, name: str, patience: float) -> Lease | None:
        """The offer of a name; waits for one that is still to be made.

        Args:
            name: as the other server said it.
            patience: seconds; a peer may hear of an offer before this rank does.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: name in self._by_name or name in self._ended, patience
            )
            return self._by_name.get(name)

    def open(self, lease: Lease) -> bool:
        """Note that a peer reads an offer from now on, if it holds still."""
        with self._changed:
            lease.is_open = self.renew(lease)
            return lease.is_open

    def decline(self, name: str) -> None:
        """End the lease of an offer that a peer does not need.

        One that another peer reads goes on, and one that is still to be made ends when
        it is.

        Args:
            name: as the other server said it.
        """
        with self._changed:
            lease = self._by_name.get(name)
            if lease is None:
                self._remember(name)
        if lease is not None and not lease.is_open:
            self._end(lease, Lost(0, Failure(Reason.DECLINED)))

    def renew(self, lease: Lease) -> bool:
        """Have a lease hold on, if it does still."""
        with self._changed:
            if not self._holds(lease):
                return False
            lease.ends_at = self._clock() + self.seconds
            return True

    def finish(self, lease: Lease, lost: Lost | None) -> bool:
        """End a lease that was read, or could not be.

        Args:
            lease: of the offer.
            lost: why it was of no use; None if it was.

        Returns:
            Whether it held until now.
        """
        with self._changed:
            held = self._holds(lease)
        self._end(lease, lost if held else Lost(0, Failure(Reason.UNREAD)))
        return held

    # ---------------------------------------------------------------- internal

    def _holds(self, lease: Lease) -> bool:
        return self._by_name.get(lease.name) is lease and self._clock() < lease.ends_at

    def _end(self, lease: Lease, lost: Lost | None) -> None:
        with self._changed:
            if self._by_name.get(lease.name) is not lease:
                return
            del self._by_name[lease.name]
            self._remember(lease.name)
        lease.done.set_result(lost)

    def _remember(self, name: str) -> None:
        """Note that whoever waits for an offer waits for nothing."""
        self._ended[name] = None
        if len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)
        self._changed.notify_all()
