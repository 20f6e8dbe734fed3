# SPDX-License-Identifier: Apache-2.0
"""Two ranks of one process: they talk over real sockets, and read by copying memory."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from hybrid_plugin.core.tree.tokens import Tokens
from hybrid_plugin.tiers.agreement import Lost
from hybrid_plugin.tiers.bundle import Bundle, Layouts, PageBytes
from hybrid_plugin.tiers.bundle_file import Rows
from hybrid_plugin.tiers.failure import Failure, Reason
from hybrid_plugin.tiers.identity import Identity
from hybrid_plugin.tiers.keys import keys_at
from hybrid_plugin.tiers.peers.leases import Done, Leases
from hybrid_plugin.tiers.peers.messages import Introduction
from hybrid_plugin.tiers.peers.params import PeerOffer
from hybrid_plugin.tiers.peers.ranges import Range
from hybrid_plugin.tiers.peers.server import PeerServer
from hybrid_plugin.tiers.peers.source import PeerSource
from tests.tiers.support import (
    IDENTITY,
    STATE_BYTES,
    WINDOW,
    Bytes,
    as_tokens,
    bundle,
)

HOST = "127.0.0.1"
PATIENCE = 60.0
NAMES = (format(n, "032x") for n in range(1 << 20))


class MemoryPlane:
    """A `DataPlane` within one process."""

    def __init__(self, size: int = 0) -> None:
        """Register memory of its own, of so many bytes."""
        self.memory = np.zeros(max(size, 1), np.uint8)
        self.metadata = b"of a process"
        self.region = (self.memory.ctypes.data, self.memory.nbytes)
        self.scratches = 0
        self.before: Callable[[], Failure | None] = lambda: None
        """Called before a read, which fails if it returns a failure."""
        self.after: Callable[[], object] = lambda: None
        self.is_bad = False
        """Whether a byte changes on the way."""

    @contextmanager
    def scratch(self, rows: Rows) -> Iterator[None]:
        self.scratches += 1
        yield

    def read(
        self,
        metadata: bytes,
        theirs: Sequence[Range],
        own: Sequence[Range],
        meanwhile: Callable[[], None],
    ) -> Failure | None:
        assert metadata == self.metadata
        failure = self.before()
        if failure is not None:
            return failure
        meanwhile()
        for (start, count), (address, size) in zip(theirs, own, strict=True):
            assert count == size
            ctypes.memmove(address, start, size)
        if self.is_bad:
            last, size = own[-1]
            ctypes.memset(last + size - 1, 0xAB, 1)
        self.after()
        return None

    def stop(self) -> None:
        """Nothing goes on."""

    def close(self) -> None:
        """Nothing is held."""


class Clock:
    """Time that passes when the test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class PeerPair:
    """One rank that offers, and another one that reads."""

    def __init__(
        self,
        theirs: Layouts,
        own: Layouts,
        *,
        identity: Identity = IDENTITY,
        secrets: tuple[bytes, bytes] = (b"", b""),
        rank: int = 0,
    ) -> None:
        self.theirs, self.own = theirs, own
        self.clock = Clock()
        self.plane = MemoryPlane()
        self.leases = Leases(30.0, self.clock)
        self.server = PeerServer(
            (HOST, 0),
            secrets[0],
            Introduction.of(IDENTITY, theirs, self.plane.metadata),
            self.leases,
        )
        self.source = PeerSource(
            self.plane,
            Introduction.of(identity, own, self.plane.metadata),
            rank,
            secrets[1],
        )
        self._tickets = 0

    def close(self) -> None:
        self.server.close()

    def name(self, tokens: Tokens, namespace: Hashable = None) -> PeerOffer:
        """An offer of the whole of a sequence, which nobody has made yet."""
        fingerprint, end = IDENTITY.fingerprint(), len(tokens)
        key = keys_at(fingerprint, namespace, tokens, [end])[end]
        return PeerOffer(HOST, (self.server.port,), next(NAMES), key, fingerprint, end)

    def make(
        self,
        offer: PeerOffer,
        tokens: Tokens,
        namespace: Hashable = None,
        copies_over: Callable[[], None] = lambda: None,
    ) -> Done:
        """Make it."""
        made = bundle(self.theirs, namespace, tokens)
        self.rows = made.pages
        whole = Bundle(offer.text, tokens, 0, made.pages, made.state)
        self._tickets += 1
        return self.leases.offer(self._tickets, whole, copies_over)

    def offer(
        self, tokens: Tokens, namespace: Hashable = None
    ) -> tuple[PeerOffer, Done]:
        """Offer the whole of a sequence."""
        offer = self.name(tokens, namespace)
        return offer, self.make(offer, tokens, namespace)

    def fetch(
        self,
        offer: PeerOffer,
        tokens: Tokens,
        start: int = 0,
        window_start: int | None = None,
    ) -> tuple[dict[str, Bytes], Bytes] | Failure:
        """Read an offer from a token on; whole pages of each pool, and the state."""
        end = len(tokens)
        if window_start is None:
            window_start = max(end - WINDOW, 0)
        state = np.zeros(STATE_BYTES, np.uint8)
        pools, pages = {}, {}
        for pool, layout in self.own.pages.items():
            begin = start if pool == "kv" else window_start
            first, count = begin // layout.tokens, -(-end // layout.tokens)
            rows = np.zeros((count, layout.row_bytes), np.uint8)
            pools[pool] = rows
            pieces = [rows[first : first + 2], *rows[first + 2 :]]
            pages[pool] = PageBytes(begin, pieces)
        wanted = Bundle(offer.text, tokens, start, pages, state)
        lost = self.source.fetch([wanted])
        return (pools, state) if lost is None else lost.failure


def outcome(done: Done) -> Lost | None:
    """What became of an offer."""
    return done.result(PATIENCE)


def refused(found: Any) -> Reason:
    """Why a fetch failed."""
    assert isinstance(found, Failure), found
    return found.reason


TOKENS = as_tokens(*range(100, 123))
OTHER_MODEL = replace(IDENTITY, weights="others")
MORE_RANKS = replace(IDENTITY, tensor_ranks=2)


def in_thread(work: Callable[[], object]) -> threading.Thread:
    """Run work beside the test."""
    thread = threading.Thread(target=work)
    thread.start()
    return thread
