# SPDX-License-Identifier: Apache-2.0
"""Reads what peers offer into host rows of this rank."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final, TypeVar

from hybrid_plugin.tiers.agreement import Lost
from hybrid_plugin.tiers.bundle import Bundle
from hybrid_plugin.tiers.bundle_file import Rows, checksum
from hybrid_plugin.tiers.failure import Failure, Reason
from hybrid_plugin.tiers.loading import conversions, fill
from hybrid_plugin.tiers.peers.agent import DataPlane
from hybrid_plugin.tiers.peers.channel import Conversation, PeerError
from hybrid_plugin.tiers.peers.leases import LEASE_SECONDS
from hybrid_plugin.tiers.peers.messages import (
    CLOSE,
    DECLINE,
    MEET,
    OPEN,
    RENEW,
    Introduction,
    Opened,
    refusal_in,
)
from hybrid_plugin.tiers.peers.params import PeerOffer
from hybrid_plugin.tiers.peers.ranges import Range, paired, ranges_of
from hybrid_plugin.tiers.peers.server import OFFER_PATIENCE

Found = TypeVar("Found")

AT_ONCE: Final = 4
"""Fetches from all peers together, so that none waits for another one's peer."""
_CONNECTING = 5.0
"""Seconds until a peer counts as gone."""
_ANSWERING = OFFER_PATIENCE + 10.0
"""The same for its answers; it may wait for copies to its host memory."""


class PeerSource:
    """A `Source` of what peers offer."""

    at_once = AT_ONCE

    def __init__(
        self,
        plane: DataPlane,
        introduction: Introduction,
        rank: int,
        secret: bytes,
        lease_seconds: float = LEASE_SECONDS,
    ) -> None:
        """Does nothing yet.

        Args:
            plane: with the host memory of this rank.
            introduction: of this rank.
            rank: its place among all.
            secret: that peers must know; empty for none.
            lease_seconds: after which a peer gives up what was not renewed.
        """
        self._plane = plane
        self.introduction = introduction
        """Of this rank; set another one when its weights change."""
        self._rank = rank
        self._secret = secret
        self._lease_seconds = lease_seconds

    def decline(self, key: str, begun: float) -> None:
        """See `Decliner.decline`; whoever does not hear it waits for the time to end.

        Later than that nobody is called any more.
        """
        if time.monotonic() - begun < self._lease_seconds:
            with suppress(PeerError):
                offer = PeerOffer.from_text(key)
                with self._talking(offer) as talk:
                    talk.decline(offer)

    def fetch(self, bundles: Sequence[Bundle]) -> Lost | None:
        """See `Source.fetch`; a peer offers one bundle."""
        (wanted,) = bundles
        try:
            failure = self._fetch(PeerOffer.from_text(wanted.key), wanted)
        except PeerError as error:
            failure = error.failure
        return None if failure is None else Lost(0, failure)

    # ---------------------------------------------------------------- internal

    @contextmanager
    def _talking(self, offer: PeerOffer) -> Iterator[_Talk]:
        """A conversation with the rank of the own place of whoever has made an offer.

        Raises:
            PeerError: if there cannot be one.
        """
        if not self._secret and not offer.is_local:
            raise PeerError(Reason.PEER_SECRET, f"{offer.host} needs one")
        if len(offer.ports) <= self._rank:
            raise PeerError(Reason.PEER_RANKS, f"it has {len(offer.ports)}")
        address = offer.host, offer.ports[self._rank]
        with _calling(address, self._secret) as peer:
            yield _Talk(peer, self.introduction, self._lease_seconds / 3)

    def _fetch(self, offer: PeerOffer, wanted: Bundle) -> Failure | None:
        with self._talking(offer) as talk:
            theirs = talk.meet()
            opened = talk.open(offer, wanted.start, theirs)
            reader = PeerReader(self._plane, theirs.metadata, opened, talk.keep)
            failure = self._fill(reader, wanted)
            sums = talk.close(used=failure is None)
        if failure is not None:
            return failure
        if sums != reader.sums:
            return Failure(Reason.CORRUPT, f"what {offer.host} has sent")
        return None

    def _fill(self, reader: PeerReader, wanted: Bundle) -> Failure | None:
        opened = reader.manifest
        starts = {run.pool: run.start for run in opened.runs}
        for pool, pages in wanted.pages.items():
            if starts.get(pool, opened.end + 1) > pages.start:
                return Failure(Reason.LAYOUT, f"{pool} begins behind {pages.start}")
        moves = conversions(opened, self.introduction.layouts, narrow=False)
        if isinstance(moves, Failure):
            return moves
        return fill(reader, moves, wanted)


class PeerReader:
    """A `Reader` of what a peer has opened."""

    def __init__(
        self,
        plane: DataPlane,
        metadata: bytes,
        opened: Opened,
        meanwhile: Callable[[], None],
    ) -> None:
        """Nothing was read.

        Args:
            plane: reads.
            metadata: of the peer.
            opened: where its rows are.
            meanwhile: called while a read goes on.
        """
        self._plane = plane
        self._metadata = metadata
        self.manifest = opened
        self._meanwhile = meanwhile
        self.sums: dict[str, str] = {}
        """Checksums of the tensors that were read."""

    def read(self, name: str, rows: Rows) -> Failure | None:
        """See `Reader.read`."""
        own = ranges_of(rows)
        if all(self._is_registered(one) for one in own):
            failure = self._read(name, own)
        else:
            with self._plane.scratch(rows):
                failure = self._read(name, own)
        if failure is None:
            self.sums[name] = checksum(rows)
        return failure

    def _read(self, name: str, own: Sequence[Range]) -> Failure | None:
        pairs = list(paired(self.manifest.places[name], own))
        if not pairs:
            return None
        theirs, ours = zip(*pairs, strict=True)
        return self._plane.read(self._metadata, theirs, ours, self._meanwhile)

    def _is_registered(self, one: Range) -> bool:
        address, size = self._plane.region
        return address <= one[0] and sum(one) <= address + size


class _Talk:
    """What a rank asks a peer, in turn."""

    def __init__(
        self, peer: Conversation, own: Introduction, renew_after: float
    ) -> None:
        self._peer = peer
        self._own = own
        self._renew_after = renew_after
        self._renewed = time.monotonic()

    def meet(self) -> Introduction:
        """Learn who the peer is, and refuse what does not fit."""
        answer = self._ask({"do": MEET, **self._who()})
        theirs = _read(lambda: Introduction.read(answer))
        refusal = self._own.refusal(theirs.rank, theirs.fingerprint)
        if refusal is not None:
            raise PeerError(refusal.reason, refusal.detail)
        return theirs

    def open(self, offer: PeerOffer, start: int, theirs: Introduction) -> Opened:
        """Learn where an offer's rows are, from a token on."""
        prefix = {"key": offer.key, "end": offer.end, "start": start}
        answer = self._ask({"do": OPEN, "offer": offer.name, **prefix, **self._who()})
        self._renewed = time.monotonic()
        return _read(lambda: Opened.read(answer, start, offer.end, theirs.layouts))

    def decline(self, offer: PeerOffer) -> None:
        """Say that nobody here needs an offer."""
        self._ask({"do": DECLINE, "offer": offer.name, **self._who()})

    def keep(self) -> None:
        """Have the lease hold on, now and then."""
        if time.monotonic() - self._renewed > self._renew_after:
            self._renewed = time.monotonic()
            self._check(self._ask({"do": RENEW}))

    def close(self, *, used: bool) -> Mapping[str, Any]:
        """Give an offer back; returns the checksums of its tensors."""
        answer = self._ask({"do": CLOSE, "used": used})
        if used:
            self._check(answer)
        sums = answer.get("sums")
        return sums if isinstance(sums, dict) else {}

    def _who(self) -> dict[str, str]:
        return {"rank": self._own.rank, "fingerprint": self._own.fingerprint}

    def _ask(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        self._peer.say(request)
        answer = self._peer.hear(_ANSWERING)
        refusal = _read(lambda: refusal_in(answer))
        if refusal is not None:
            raise PeerError(refusal.reason, refusal.detail)
        return answer

    @staticmethod
    def _check(answer: Mapping[str, Any]) -> None:
        if answer.get("holds") is not True:
            raise PeerError(Reason.LEASE_OVER)


@contextmanager
def _calling(address: tuple[str, int], secret: bytes) -> Iterator[Conversation]:
    try:
        connection = socket.create_connection(address, _CONNECTING)
    except OSError as error:
        raise PeerError(Reason.PEER_GONE, f"{address[0]}: {error}") from error
    with connection:
        yield Conversation(connection, secret, called=False)


def _read(read: Callable[[], Found]) -> Found:
    """What `read` makes of a message that may be anything."""
    try:
        return read()
    except ValueError as error:
        raise PeerError(Reason.PEER_MALFORMED, str(error)) from None
