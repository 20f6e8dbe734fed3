# SPDX-License-Identifier: Apache-2.0
"""Tells peers where the rows of offers are: one listener for each rank."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Final

from hybrid_plugin.core.commands import Pool
from hybrid_plugin.errors import ConfigError
from hybrid_plugin.tiers.agreement import Lost
from hybrid_plugin.tiers.bundle import Bundle, Layouts
from hybrid_plugin.tiers.bundle_file import Rows, checksum
from hybrid_plugin.tiers.failure import Failure, Reason
from hybrid_plugin.tiers.manifest import STATE, Run
from hybrid_plugin.tiers.peers.channel import Conversation, PeerError
from hybrid_plugin.tiers.peers.leases import Lease, Leases
from hybrid_plugin.tiers.peers.messages import (
    CLOSE,
    DECLINE,
    MEET,
    OPEN,
    REFUSED,
    RENEW,
    Introduction,
    Opened,
)
from hybrid_plugin.tiers.peers.params import PeerOffer
from hybrid_plugin.tiers.peers.ranges import ranges_of
from hybrid_plugin.tiers.row_layout import integer, text

MOST_CONVERSATIONS: Final = 64
"""At once; others wait."""
MOST_STRANGERS: Final = 64
"""Callers at once who wait, or have not shown that they know the secret; of more, the
one that has waited longest is hung up on."""
_FIRST_WORDS = 5.0
"""Seconds that a caller has for its first message; peers send it at once."""
OFFER_PATIENCE: Final = 10.0
"""Seconds within which a rank must hear of an offer that its peers know already: the
step that tells it may have to wait for a long one."""
_SILENCE = 60.0
"""Seconds after which a peer that says nothing is hung up on; it renews its lease more
often than that."""

logger = logging.getLogger(__name__)


class PeerServer:
    """Answers peers, in threads of its own."""

    def __init__(
        self,
        address: tuple[str, int],
        secret: bytes,
        introduction: Introduction,
        leases: Leases,
    ) -> None:
        """Listen.

        Args:
            address: IP address and port; port 0 for any that is free.
            secret: that peers must know; empty for none.
            introduction: of this rank.
            leases: what it offers.

        Raises:
            ConfigError: if nobody can listen there.
        """
        self._secret = secret
        self._leases = leases
        self.introduction = introduction
        """Of this rank; set another one when its weights change."""
        self._open: set[socket.socket] = set()
        self._strangers: OrderedDict[socket.socket, None] = OrderedDict()
        """Of those, all without a place; the one that called first is first."""
        self._meeting = threading.Lock()
        self._places = threading.BoundedSemaphore(MOST_CONVERSATIONS)
        self._closing = False
        self._warned: set[Reason] = set()
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        try:
            self._listener = socket.create_server(address, family=family)
        except OSError as error:
            raise ConfigError(
                f"peers.listen: nobody can listen at {address[0]} port {address[1]} "
                f"({error.strerror}); give another address or port."
            ) from error
        threading.Thread(
            target=self._listen, name="hybrid-plugin peers", daemon=True
        ).start()

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._listener.getsockname()[1])

    def close(self) -> None:
        """Answer nobody any more."""
        self._closing = True
        # A thread that accepts does not notice that its socket was closed.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in list(self._open):
            _hang_up(connection)

    # ---------------------------------------------------------------- internal

    def _listen(self) -> None:
        while not self._closing:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                continue
            self._open.add(connection)
            with self._meeting:
                self._strangers[connection] = None
                if len(self._strangers) > MOST_STRANGERS:
                    _hang_up(self._strangers.popitem(last=False)[0])
            threading.Thread(
                target=self._serve,
                args=(connection,),
                name="hybrid-plugin peer",
                daemon=True,
            ).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                peer = Conversation(connection, self._secret, called=True)
                asked = peer.hear(_FIRST_WORDS)
                with self._places:
                    self._no_stranger(connection)
                    _Talk(self, peer).run(asked)
        except PeerError as error:
            self._tell(error.failure)
        except Exception:
            logger.exception("hybrid-plugin: a peer is not answered")
        finally:
            self._no_stranger(connection)
            self._open.discard(connection)

    def _no_stranger(self, connection: socket.socket) -> None:
        with self._meeting:
            self._strangers.pop(connection, None)

    def _tell(self, failure: Failure) -> None:
        """Log why a conversation ended, the first of each kind."""
        gone = failure.reason is Reason.PEER_GONE
        if not gone and failure.reason not in self._warned:
            self._warned.add(failure.reason)
            logger.warning("hybrid-plugin refuses a peer: %s.", failure)


class _Talk:
    """One conversation."""

    def __init__(self, server: PeerServer, peer: Conversation) -> None:
        self._server = server
        self._leases = server._leases
        self._peer = peer
        self._lease: Lease | None = None
        self._sums: dict[str, str] = {}
        """Checksums of what was opened."""

    def run(self, asked: Mapping[str, Any]) -> None:
        """Answer until the peer hangs up.

        What it has opened and not closed it will not use: nothing is kept for it.

        Args:
            asked: what it has said first.
        """
        try:
            while True:
                self._answer(asked)
                asked = self._peer.hear(_SILENCE)
        finally:
            if self._lease is not None:
                self._finish(Lost(0, Failure(Reason.DECLINED, "it hung up")))

    def _answer(self, asked: Mapping[str, Any]) -> None:
        try:
            answers = {
                MEET: self._meet,
                OPEN: self._open,
                RENEW: self._renew,
                CLOSE: self._close,
                DECLINE: self._decline,
            }
            answers[text(asked.get("do"))](asked)
        except (KeyError, ValueError) as error:
            self._refuse(Reason.PEER_MALFORMED)
            raise PeerError(Reason.PEER_MALFORMED, str(error)) from None

    def _meet(self, asked: Mapping[str, Any]) -> None:
        own = self._server.introduction
        refusal = own.refusal(text(asked["rank"]), text(asked["fingerprint"]))
        if refusal is not None:
            # The other one finds out by itself, and says what it is.
            self._server._tell(refusal)
        self._peer.say(own.message())

    def _open(self, asked: Mapping[str, Any]) -> None:
        name, start = text(asked["offer"]), integer(asked["start"])
        wanted = text(asked["key"]), integer(asked["end"])
        own = self._server.introduction
        if self._lease is not None or self._is_other(asked):
            return self._refuse(Reason.PEER_MODEL)
        lease = self._leases.find(name, OFFER_PATIENCE)
        if lease is None:
            return self._refuse(Reason.LEASE_OVER)
        offer = PeerOffer.from_text(lease.bundle.key)
        # The reader knows of the prefix what a client has told it: with the name of one
        # offer and the key of another one, what the first holds would be read as the
        # second's.
        if wanted != (offer.key, offer.end):
            return self._refuse(Reason.OTHER_TOKENS)
        if not 0 <= start < lease.bundle.end:
            raise ValueError(f"an offer has no token {start}")
        if not self._leases.open(lease):
            return self._refuse(Reason.LEASE_OVER)
        self._lease = lease
        lease.copies_over()
        tensors = tensors_from(lease.bundle, start, own.layouts)
        opened = opened_of(lease.bundle, start, own.layouts, tensors)
        self._peer.say(opened.message())
        # While the peer reads.
        self._sums = {name: checksum(rows) for name, rows in tensors.items()}
        return None

    def _renew(self, asked: Mapping[str, Any]) -> None:
        holds = self._lease is not None and self._leases.renew(self._lease)
        self._peer.say({"holds": holds})

    def _close(self, asked: Mapping[str, Any]) -> None:
        if self._lease is None:
            return self._refuse(Reason.LEASE_OVER)
        used = asked["used"] is True
        held = self._finish(None if used else Lost(0, Failure(Reason.DECLINED)))
        return self._peer.say({"holds": held, "sums": self._sums})

    def _decline(self, asked: Mapping[str, Any]) -> None:
        if self._is_other(asked):
            return self._refuse(Reason.PEER_MODEL)
        self._leases.decline(text(asked["offer"]))
        return self._peer.say({})

    def _is_other(self, asked: Mapping[str, Any]) -> bool:
        """Whether the peer exchanges nothing with this rank."""
        own, rank = self._server.introduction, text(asked["rank"])
        return own.refusal(rank, text(asked["fingerprint"])) is not None

    def _finish(self, lost: Lost | None) -> bool:
        lease, self._lease = self._lease, None
        assert lease is not None
        return self._leases.finish(lease, lost)

    def _refuse(self, reason: Reason) -> None:
        self._peer.say({REFUSED: reason.value})


def _hang_up(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it may have been closed
        connection.shutdown(socket.SHUT_RDWR)


def tensors_from(bundle: Bundle, start: int, layouts: Layouts) -> dict[str, Rows]:
    """Rows of a bundle by the names of its tensors, KV from the page of a token on.

    Args:
        bundle: from token 0 on.
        start: the token.
        layouts: of this rank.
    """
    found: dict[str, Rows] = {}
    for pool, pages in bundle.pages.items():
        layout = layouts.pages[pool]
        skipped = start // layout.tokens if pool == Pool.KV else 0
        rows = []
        for piece in pages.rows:
            piece = piece.reshape(-1, layout.row_bytes)
            rows.append(piece[skipped:])
            skipped = max(skipped - len(piece), 0)
        found[pool] = rows
    if bundle.state is not None:
        found[STATE] = [bundle.state]
    return found


def opened_of(
    bundle: Bundle, start: int, layouts: Layouts, tensors: Mapping[str, Rows]
) -> Opened:
    """Where those rows are.

    Args:
        bundle: from token 0 on.
        start: its first token that is wanted.
        layouts: of this rank.
        tensors: `tensors_from`.
    """
    runs = [
        Run(pool, start if pool == Pool.KV else pages.start, layouts.pages[pool])
        for pool, pages in bundle.pages.items()
    ]
    places = {name: ranges_of(rows) for name, rows in tensors.items()}
    return Opened(start, bundle.end, runs, layouts.state, places)
