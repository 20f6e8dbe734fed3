# SPDX-License-Identifier: Apache-2.0
"""Peers as a tier: what requests say that peers offer, and what is offered to them.

It asks no peer what it has.  A router sends a request first to one server, which offers
the prefix that it has computed, and then to another one with that offer.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from hashlib import sha256

from hybrid_plugin.core.stats import OuterStats
from hybrid_plugin.core.tiers.outer_tier import StoredBundle, Storing
from hybrid_plugin.core.tree.tokens import Tokens
from hybrid_plugin.tiers.failure import Failure, Reason
from hybrid_plugin.tiers.identity import Identity
from hybrid_plugin.tiers.keys import keys_at
from hybrid_plugin.tiers.peers.leases import LEASE_SECONDS
from hybrid_plugin.tiers.peers.params import PeerOffer
from hybrid_plugin.tiers.peers.rates import PeerRates
from hybrid_plugin.tiers.peers.source import AT_ONCE


@dataclass(slots=True)
class _Expected:
    """An offer of a peer for requests of this server."""

    text: str
    """`PeerOffer.text`."""
    namespace: Hashable
    tokens: Tokens
    """Of the prefix."""
    requests: int = 1
    """That came with it and are not over."""
    computing: float = 0.0
    """Seconds that computing it takes, where that was decided for."""


class PeerTier:
    """What `OuterTier` asks for, of all peers together."""

    name = "peer"
    keeps_bundles = False
    offers_bundles = True
    is_divisible = True
    reads_at_once = AT_ONCE

    def __init__(
        self, identity: Identity, host: str, ports: Sequence[int], mark: str
    ) -> None:
        """Nothing is offered.

        Args:
            identity: of any rank.
            host: address at which the ranks listen.
            ports: theirs, in their order.
            mark: a random text, equal on all ranks; names of offers are made of it.
        """
        self.stats = OuterStats()
        self.version = 0
        self._fingerprint = identity.fingerprint()
        self._host = host
        self._ports = tuple(ports)
        self._mark = mark
        self._is_closed = False
        self._count = 0
        """Offers so far."""
        self._expected: dict[str, _Expected] = {}
        """By the offers' names."""
        self._fetching: set[str] = set()
        """Names of the offers that are being read: a read ends a lease itself."""
        self._rates = PeerRates()
        self._sizes: dict[str, int] = {}
        """Bytes of what is offered on all ranks, by `PeerOffer.text`."""

    @property
    def used_bytes(self) -> int:
        """Bytes of host rows that are offered, on all ranks."""
        return sum(self._sizes.values())

    @property
    def offers(self) -> int:
        """Offers whose leases have not ended."""
        return len(self._sizes)

    def close(self) -> None:
        """Offer nothing and expect nothing any more: the weights are other ones now."""
        self._is_closed = True
        self._expected.clear()
        self.version += 1

    def read_seconds(self, key: str, size: int) -> float:
        """See `OuterTier.read_seconds`: by what reads from the same peer took."""
        return self._rates.of(PeerOffer.from_text(key)).seconds(size)

    def token_seconds(self, key: str) -> float | None:
        """See `OuterTier.token_seconds`: the server that computed it says so."""
        return PeerOffer.from_text(key).token_seconds

    def patience(self, computing: float) -> float:
        """As long as computing takes: nobody is served later than twice the time.

        Before that was measured, as long as an offer holds unread.
        """
        return LEASE_SECONDS if math.isinf(computing) else computing

    # ----------------------------------------------------------------- finding

    def expect(
        self, namespace: Hashable, tokens: Tokens, offer: PeerOffer
    ) -> Failure | None:
        """Find what a peer offers for a request, until `forget`.

        Args:
            namespace: of the request.
            tokens: all of the request.
            offer: that came with it.

        Returns:
            Why it is of no use; None if it is.
        """
        failure = self.refusal(namespace, tokens, offer)
        if failure is not None:
            return failure
        known = self._expected.get(offer.name)
        if known is not None:
            known.requests += 1
            return None
        self._expected[offer.name] = _Expected(
            offer.text, namespace, tokens[: offer.end]
        )
        self.version += 1
        return None

    def forget(self, offer: PeerOffer) -> bool:
        """Note that a request is admitted, or over, which came with an offer.

        Returns:
            Whether nobody here will read the offer, so that its peer may be told.
        """
        known = self._expected.get(offer.name)
        if known is None:
            return False
        known.requests -= 1
        if known.requests:
            return False
        self._rates.of(offer).computed(known.computing)
        self._drop(offer.name)
        return not self.reads(offer)

    def reads(self, offer: PeerOffer) -> bool:
        """Whether an offer is read here, or may be."""
        return offer.name in self._expected or offer.name in self._fetching

    def find(
        self, namespace: Hashable, tokens: Tokens, limit: int
    ) -> Sequence[StoredBundle]:
        """See `OuterTier.find`."""
        best: _Expected | None = None
        for one in self._expected.values():
            end = len(one.tokens)
            if (
                end <= min(limit, len(tokens))
                and (best is None or end > len(best.tokens))
                and one.namespace == namespace
                and tokens[end - 1] == one.tokens[-1]
                and tokens[:end] == one.tokens
            ):
                best = one
        return () if best is None else (StoredBundle(best.text, 0, len(best.tokens)),)

    def fetch_refused(self, key: str, computing: float) -> None:
        """See `OuterTier.fetch_refused`."""
        self._note_computing(PeerOffer.from_text(key), computing)

    def begin_fetch(self, key: str, size: int) -> None:
        """See `OuterTier.begin_fetch`."""
        offer = PeerOffer.from_text(key)
        self._rates.of(offer).begin(size)
        self._fetching.add(offer.name)
        self._note_computing(offer, 0.0)

    def fetched(self, keys: Sequence[str], size: int, seconds: float | None) -> None:
        """See `OuterTier.fetched`: its lease is over."""
        (key,) = keys
        offer = PeerOffer.from_text(key)
        if seconds:
            self._rates.read(offer, size, seconds)
        self._ended(offer)

    def fetch_failed(self, key: str, reason: str) -> Sequence[str]:
        """See `OuterTier.fetch_failed`."""
        self._ended(PeerOffer.from_text(key))
        return ()

    # ---------------------------------------------------------------- offering

    def begin_store(
        self, namespace: Hashable, tokens: Tokens, start: int, size: int
    ) -> Storing | None:
        """Name an offer; see `OuterTier.begin_store`.

        Refused is what has no name that another process knows.
        """
        end = len(tokens)
        if self._is_closed or start:
            return None
        try:
            key = keys_at(self._fingerprint, namespace, tokens, [end])[end]
        except TypeError:
            return None
        self._count += 1
        name = sha256(f"{self._mark} {self._count}".encode()).hexdigest()[:32]
        offer = PeerOffer(self._host, self._ports, name, key, self._fingerprint, end)
        self._sizes[offer.text] = size * len(self._ports)
        return Storing(offer.text)

    def stored(self, key: str, seconds: float | None) -> None:
        """See `OuterTier.stored`: a peer has read it."""
        del self._sizes[key]

    def store_failed(self, key: str, reason: str) -> Sequence[str]:
        """See `OuterTier.store_failed`: nobody has."""
        del self._sizes[key]
        return ()

    def clear(self) -> Sequence[str]:
        """See `OuterTier.clear`."""
        self._expected.clear()
        self.version += 1
        return ()

    # ---------------------------------------------------------------- internal

    def refusal(
        self, namespace: Hashable, tokens: Tokens, offer: PeerOffer
    ) -> Failure | None:
        """Why an offer is none of what a request wants; None if it is.

        Args:
            namespace: of the request.
            tokens: all of the request.
            offer: that came with it.
        """
        if self._is_closed:
            return Failure(Reason.CLOSED, "the weights were updated")
        if len(offer.ports) != len(self._ports):
            said = f"it has {len(offer.ports)}, this server {len(self._ports)}"
            return Failure(Reason.PEER_RANKS, said)
        if offer.fingerprint != self._fingerprint:
            return Failure(Reason.PEER_MODEL)
        if offer.end > len(tokens):
            return Failure(Reason.OTHER_TOKENS, "it has more than the request")
        try:
            keys = keys_at(self._fingerprint, namespace, tokens, [offer.end])
        except TypeError as error:
            return Failure(Reason.OTHER_TOKENS, str(error))
        if keys[offer.end] != offer.key:
            return Failure(Reason.OTHER_TOKENS)
        return None

    def _ended(self, offer: PeerOffer) -> None:
        """Expect an offer no more that was read, or could not be."""
        self._fetching.discard(offer.name)
        self._drop(offer.name)

    def _note_computing(self, offer: PeerOffer, seconds: float) -> None:
        """Note what computing an offer takes, in place of what was noted before."""
        known = self._expected.get(offer.name)
        if known is not None:
            known.computing = seconds

    def _drop(self, name: str) -> None:
        if self._expected.pop(name, None) is not None:
            self.version += 1
