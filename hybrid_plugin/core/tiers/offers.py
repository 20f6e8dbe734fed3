# SPDX-License-Identifier: Apache-2.0
"""Offers: prefixes of the host that another server may read.

An offered prefix is in use on the host, and nowhere else, until all ranks have reported
that a peer has read it or that its lease has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

from hybrid_plugin.core.commands import BundleRows, Offer, PageRows, Pool, Withdraw
from hybrid_plugin.core.tiers.host_tier import HostSource, HostTier
from hybrid_plugin.core.tiers.outer_tier import OuterTier
from hybrid_plugin.core.tree.tokens import Tokens


@dataclass(slots=True, eq=False)
class Offering:
    """One prefix that may be read."""

    key: str
    source: HostSource | None
    """None for one that was withdrawn."""
    size: int
    """Bytes of the rows on one rank."""


class Offers:
    """All offers of one cache."""

    def __init__(
        self, host: HostTier, tier: OuterTier, new_ticket: Callable[[], int]
    ) -> None:
        """Begin with none.

        Args:
            host: whose rows are read.
            tier: names offers, and counts them as what it stores.
            new_ticket: numbers offers, and what else is reported.
        """
        self._host = host
        self._tier = tier
        self._new_ticket = new_ticket
        self.running: dict[int, Offering] = {}
        """By ticket."""
        self.is_unsent = False
        """Whether the ranks hear of something with the next commands only."""

    def begin(self, namespace: Hashable, tokens: Tokens) -> str | None:
        """Offer the longest prefix of a sequence that the host has.

        Args:
            namespace: of the sequence.
            tokens: of it; no more of it is offered.

        Returns:
            The offer's key; None if the host has nothing of it, or if the tier does not
            take it.
        """
        match = self._host.match(namespace, tokens, len(tokens))
        if match.node is None or not match.length:
            self._tier.stats.stores_refused += 1
            return None
        tokens = tokens[: match.length]
        source = self._host.hold_bundle(match.node, 0)
        size = self._host.bytes_of(source)
        storing = self._tier.begin_store(namespace, tokens, 0, size)
        if storing is None:
            self._host.let_go(source)
            self._tier.stats.stores_refused += 1
            return None
        ticket = self._new_ticket()
        self.running[ticket] = Offering(storing.key, source, size)
        pages = {Pool.KV: PageRows(0, tuple(source.pages))}
        pages |= self._host.window_rows(len(tokens), source.windows)
        state = self._host.state_row(source.slot)
        rows = BundleRows(storing.key, namespace, tokens, 0, pages, state)
        self._host.send(Offer(ticket, rows))
        self.is_unsent = True
        return storing.key

    def succeeded(self, ticket: int, seconds: float | None) -> None:
        """Note that a peer has read an offer."""
        offering = self._end(ticket)
        self._tier.stored(offering.key, seconds)
        self._tier.stats.stores += 1
        self._tier.stats.stored_bytes += offering.size

    def failed(self, ticket: int, reason: str) -> None:
        """Note that the lease of an offer has ended, and nobody has read it."""
        self._tier.stats.store_failures[reason] += 1
        self._tier.store_failed(self._end(ticket).key, reason)

    def withdraw(self) -> None:
        """Have nobody use what it reads of running offers, and free their rows."""
        tickets = []
        for ticket, offering in self.running.items():
            if offering.source is not None:
                tickets.append(ticket)
                self._host.let_go(offering.source)
                offering.source = None
        if tickets:
            self._host.send(Withdraw(tuple(tickets)))
            self.is_unsent = True

    def _end(self, ticket: int) -> Offering:
        offering = self.running.pop(ticket)
        if offering.source is not None:
            self._host.let_go(offering.source)
        return offering
