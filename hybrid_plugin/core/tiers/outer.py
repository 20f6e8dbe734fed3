# SPDX-License-Identifier: Apache-2.0
"""OuterTiers: what lies behind the host, and all that is on its way there or back.

Copies to the host are ordered by streams and nobody reports them.  I/O fails, and takes
any time: so each write, fetch and offer has a ticket, under which the ranks report what
became of it.  Nothing is found, and no row is anybody else's, before that.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from hybrid_plugin.core.commands import Decline, Discard, WriteRecord
from hybrid_plugin.core.sequence import LookUp
from hybrid_plugin.core.tiers.fetches import Fetches, Fetching
from hybrid_plugin.core.tiers.host_tier import HostTier
from hybrid_plugin.core.tiers.offers import Offers
from hybrid_plugin.core.tiers.outer_tier import OuterTier
from hybrid_plugin.core.tiers.restores import Restore, TransferRates
from hybrid_plugin.core.tiers.saves import Saves, Saving
from hybrid_plugin.core.tiers.writes import Writes
from hybrid_plugin.core.tree.tokens import Tokens

Awaited: TypeAlias = Restore | Fetching
"""What a waiting sequence waits for."""


@dataclass(slots=True, eq=False)
class Recording:
    """A text on its way beside the bundles of the outer tier, or away from there."""

    is_over: bool = False
    """Whether all ranks have written or removed it, or one could not."""
    reason: str = ""
    """Why not."""


class OuterTiers:
    """The outer tiers of one cache."""

    def __init__(
        self, host: HostTier, tiers: Sequence[OuterTier], rates: TransferRates
    ) -> None:
        """Begin with nothing on its way.

        Args:
            host: through whose rows everything goes.
            tiers: in the order in which they are asked.
            rates: what loads from the host and computing take.

        Raises:
            ValueError: if two have one name, two keep bundles, or two offer them.
        """
        if len({tier.name for tier in tiers}) < len(tiers):
            raise ValueError("two outer tiers have the same name")
        keeping = [tier for tier in tiers if tier.keeps_bundles]
        offering = [tier for tier in tiers if tier.offers_bundles]
        if len(keeping) > 1 or len(offering) > 1:
            raise ValueError("only one outer tier keeps bundles, and one offers them")
        self.tiers = tuple(tiers)
        self._host = host
        self._last_ticket = 0
        self._fetches = Fetches(host, tiers, rates, self._new_ticket)
        self._writes: Writes | None = None
        self._saves: Saves | None = None
        self._recordings: dict[int, Recording] = {}
        """By ticket."""
        if keeping:
            self._writes = Writes(host, keeping[0], self._new_ticket)
            self._saves = Saves(host, keeping[0], self._writes)
        self._offers = Offers(host, offering[0], self._new_ticket) if offering else None
        self._is_declining = False

    @property
    def fetching(self) -> int:
        """Fetches whose outcome was not reported yet."""
        return len(self._fetches.running)

    @property
    def writing(self) -> int:
        """Writes whose outcome was not reported yet, those of texts included."""
        bundles = 0 if self._writes is None else len(self._writes.running)
        return bundles + len(self._recordings)

    @property
    def to_write(self) -> int:
        """Bundles that are to be written: if the host keeps them until then, and those
        that somebody waits for."""
        waiting = 0 if self._writes is None else self._writes.waiting
        return waiting + (0 if self._saves is None else len(self._saves.running))

    @property
    def offering(self) -> int:
        """Offers whose outcome was not reported yet."""
        return 0 if self._offers is None else len(self._offers.running)

    @property
    def is_unsent(self) -> bool:
        """Whether ranks hear of an offer with the next commands only."""
        if self._offers is None:
            return False
        return self._offers.is_unsent or self._is_declining

    def fetch(self, found: LookUp, now: float, queued: float) -> Fetching | None:
        """Begin to fetch what a waiting sequence lacks; see `Fetches.begin`."""
        return self._fetches.begin(found, now, queued)

    def is_awaited(self, fetch: Fetching, now: float) -> bool:
        """Whether sequences wait for a running fetch, and do not compute instead."""
        return now < self._fetches.awaited_until(fetch)

    def left(self, fetch: Fetching) -> None:
        """Note that one sequence less has yet to come to a fetch."""
        self._fetches.left(fetch)

    def bring(self, found: LookUp, now: float) -> Fetching | None:
        """Begin to fetch a prefix that nobody waits for; see `Fetches.bring`."""
        return self._fetches.bring(found, now)

    def offer(self, namespace: Hashable, tokens: Tokens) -> str | None:
        """Offer a prefix to other servers; see `Offers.begin`."""
        return None if self._offers is None else self._offers.begin(namespace, tokens)

    def decline(self, key: str) -> None:
        """Tell another server that its offer is not needed; see `Decline`."""
        self._host.send(Decline((key,)))
        self._is_declining = True

    def before_commands(self) -> None:
        """Begin the writes that may run now: commands are drained next."""
        if self._writes is not None:
            self._writes.begin()
        if self._offers is not None:
            self._offers.is_unsent = self._is_declining = False

    def save(
        self, namespace: Hashable, tokens: Tokens, on_device: int
    ) -> Saving | None:
        """Begin to save a prefix; see `Saves.begin`.

        Raises:
            ValueError: if no tier keeps bundles.
        """
        if self._saves is None:
            raise ValueError("no outer tier keeps bundles")
        return self._saves.begin(namespace, tokens, on_device)

    def go_on_saving(self, store: Callable[[Hashable, Tokens], None]) -> None:
        """Go on with saves; see `Saves.go_on`."""
        if self._saves is not None and self._saves.running:
            self._saves.go_on(store)

    def record(self, name: str, text: str | None, discard: Sequence[str]) -> Recording:
        """Have a text kept beside the bundles; see `LowerTiers.record`."""
        if self._writes is None:
            raise ValueError("no outer tier keeps bundles")
        self._discard(discard)
        ticket, recording = self._new_ticket(), Recording()
        self._recordings[ticket] = recording
        self._host.send(WriteRecord(ticket, name, text))
        return recording

    def done(
        self,
        ticket: int,
        ok: bool,
        now: float,
        *,
        reason: str,
        bundle: int | None,
        seconds: float | None,
    ) -> None:
        """Take a report; see `LowerTiers.done`."""
        discarded: Sequence[str] = ()
        if ticket in self._fetches.running:
            if ok:
                self._fetches.succeeded(ticket, now, seconds)
            else:
                discarded = self._fetches.failed(ticket, now, reason, bundle)
        elif self._writes is not None and ticket in self._writes.running:
            discarded = (
                self._writes.succeeded(ticket, seconds)
                if ok
                else self._writes.failed(ticket, reason)
            )
            assert self._saves is not None, "who writes saves"
            self._saves.settle()
        elif ticket in self._recordings:
            recording = self._recordings.pop(ticket)
            recording.is_over, recording.reason = True, "" if ok else reason
        elif self._offers is not None and ticket in self._offers.running:
            if ok:
                self._offers.succeeded(ticket, seconds)
            else:
                self._offers.failed(ticket, reason)
        else:
            raise ValueError(f"nothing is on its way under ticket {ticket}")
        self._discard(discarded)

    def flush(self) -> None:
        """Have every tier forget everything, and nobody find what is on its way."""
        self._fetches.flush()
        if self._saves is not None:
            self._saves.flush()
        if self._offers is not None:  # before writes, whose rows are theirs alone then
            self._offers.withdraw()
        if self._writes is not None:
            self._writes.flush()
        for tier in self.tiers:
            self._discard(tier.clear())

    def discard(self, keys: Sequence[str]) -> None:
        """Remove bundles that a tier does not find any more."""
        self._discard(keys)

    def _discard(self, keys: Sequence[str]) -> None:
        if keys:
            self._host.send(Discard(tuple(keys)))

    def _new_ticket(self) -> int:
        self._last_ticket += 1
        return self._last_ticket
