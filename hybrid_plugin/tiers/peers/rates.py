# SPDX-License-Identifier: Apache-2.0
"""How fast each peer is read from, and when to try a slow one again.

A peer from which reading takes longer than computing is not read from, so nothing tells
that it has become faster.  It is tried again when requests have computed, in place of
reading, for as long as one read should take: then trying costs no more time than
computing did.
"""

from __future__ import annotations

from collections import OrderedDict

from hybrid_plugin.tiers.last_reads import LastReads
from hybrid_plugin.tiers.peers.params import PeerOffer

_REMEMBERED = 1024
"""Peers, the last that were read from; any other counts as new."""


class PeerRate:
    """Of one peer."""

    def __init__(self) -> None:
        """Nothing was measured."""
        self._reads = LastReads()
        self._computed = 0.0
        """Seconds that requests have computed in place of reads, since the last one."""
        self._is_trial = False
        """Whether the next read that ends says how fast the peer is now."""

    def seconds(self, size: int) -> float:
        """What a read of so many bytes should take; 0 if it should be tried."""
        return 0.0 if self._is_due(size) else self._reads.seconds(size)

    def computed(self, seconds: float) -> None:
        """Note that a request has computed what the peer offered, for so long."""
        self._computed += seconds

    def begin(self, size: int) -> None:
        """Note that a read begins: if it is a trial, others are refused meanwhile."""
        self._is_trial |= self._is_due(size)
        self._computed = 0.0

    def read(self, size: int, seconds: float) -> None:
        """Note what a read took; where it was a trial, those before say nothing."""
        if self._is_trial:
            self._reads.clear()
        self._is_trial = False
        self._reads.add(size, seconds)

    def _is_due(self, size: int) -> bool:
        return self._computed >= self._reads.seconds(size)


class PeerRates:
    """Of all peers, by where they listen."""

    def __init__(self) -> None:
        """Nothing was measured."""
        self._rates: OrderedDict[tuple[str, tuple[int, ...]], PeerRate] = OrderedDict()

    def __len__(self) -> int:
        return len(self._rates)

    def of(self, offer: PeerOffer) -> PeerRate:
        """That of the peer which has made an offer; of one that was never read from it
        is not kept: a client may name any."""
        return self._rates.get(_peer(offer)) or PeerRate()

    def read(self, offer: PeerOffer, size: int, seconds: float) -> None:
        """Note what it took to read an offer.

        Args:
            offer: of the peer.
            size: bytes.
            seconds: above 0.
        """
        rate = self._rates.setdefault(_peer(offer), PeerRate())
        rate.read(size, seconds)
        self._rates.move_to_end(_peer(offer))
        if len(self._rates) > _REMEMBERED:
            self._rates.popitem(last=False)


def _peer(offer: PeerOffer) -> tuple[str, tuple[int, ...]]:
    return offer.host, offer.ports
