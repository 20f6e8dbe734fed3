# SPDX-License-Identifier: Apache-2.0
"""OuterTier: what the core asks of a tier behind host memory, such as a disk.

The tier says what it has and takes, and keeps the books of it; the bytes are moved by
the ranks, by `Write`, `Fetch` and `Discard`, between its storage and host rows.  It
lives where the core lives.  Where each rank has a core, all of these must hear and
answer the same.  No method does I/O, or waits.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

from hybrid_plugin.core.stats import OuterStats
from hybrid_plugin.core.tree.tokens import Tokens


@dataclass(frozen=True, slots=True)
class StoredBundle:
    """A bundle that every rank can have: KV of tokens `start` to `end`, and the state
    at `end`."""

    key: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Storing:
    """That a bundle may be written."""

    key: str
    discard: tuple[str, ...] = ()
    """Keys of bundles that make room for it; they are not found any more."""


class OuterTier(Protocol):
    """Bundles of a replica in one place beyond the host."""

    @property
    def name(self) -> str:
        """Names it in commands, counters and logs: "disk", or a peer's name."""

    @property
    def stats(self) -> OuterStats:
        """Its counters, which the core counts."""

    @property
    def keeps_bundles(self) -> bool:
        """Whether it ever takes bundles; at most one tier of a cache does."""

    @property
    def offers_bundles(self) -> bool:
        """Whether other servers read bundles from host rows; at most one tier of a
        cache has such.  What it begins to store is then an offer, from token 0 on,
        which counts as stored when somebody has read it."""

    @property
    def is_divisible(self) -> bool:
        """Whether a fetch may leave out the beginning of a bundle, at any page; `find`
        returns one bundle then."""

    @property
    def used_bytes(self) -> int:
        """Bytes of what it keeps, on all ranks whose storage it is, or offers."""

    @property
    def version(self) -> int:
        """Grows whenever the result of a `find` could change."""

    @property
    def reads_at_once(self) -> int:
        """Fetches that run beside each other on each rank; others wait for these."""

    def read_seconds(self, key: str, size: int) -> float:
        """What a fetch should take once it runs, as measured; 0 where nothing was.

        Args:
            key: of its last bundle, as it was found.
            size: bytes of the host rows on one rank that it fills.
        """

    def token_seconds(self, key: str) -> float | None:
        """What a token's prefill takes where a bundle was made; None if nobody says.

        Args:
            key: of it, as it was found.
        """

    def patience(self, computing: float) -> float:
        """Seconds that a sequence waits for a fetch at most; then it computes.

        Args:
            computing: seconds that this takes; infinite before it was measured.
        """

    def find(
        self, namespace: Hashable, tokens: Tokens, limit: int
    ) -> Sequence[StoredBundle]:
        """The bundles of the longest prefix that it has; changes nothing.

        Args:
            namespace: what besides tokens must be equal.
            tokens: of a sequence.
            limit: the last position at which the prefix may end.

        Returns:
            A chain: the first one starts at 0, and each of the others where the one
            before it ends.  Empty if there is none.
        """

    def begin_store(
        self, namespace: Hashable, tokens: Tokens, start: int, size: int
    ) -> Storing | None:
        """Make room for a bundle, which is not found before `stored`.

        There may be one of that key, not found because the one before it is gone: this
        one takes its place.

        Args:
            namespace: of its sequence.
            tokens: from the start of the sequence to the end of the bundle.
            start: where the bundle before it ends, as `find` said; that one stays.
            size: bytes of its host rows on each rank.

        Returns:
            None if the tier does not take it, with nothing changed.
        """

    def stored(self, key: str, seconds: float | None) -> None:
        """Find a bundle from now on: every rank has written it.

        Args:
            key: of `begin_store`.
            seconds: what it took the slowest rank; None if nobody measured.
        """

    def store_failed(self, key: str, reason: str) -> Sequence[str]:
        """Forget a bundle that not every rank has written.

        Args:
            key: of `begin_store`.
            reason: in words, for the log.

        Returns:
            Keys to discard on all ranks.
        """

    def fetch_refused(self, key: str, computing: float) -> None:
        """Note that a waiting sequence is to compute what could be fetched.

        Each look-up of the sequence says so again, until it is admitted.

        Args:
            key: of the last bundle, as it was found.
            computing: seconds that this takes.
        """

    def begin_fetch(self, key: str, size: int) -> None:
        """Note that a fetch begins; `fetched` or `fetch_failed` say that it is over.

        Args:
            key: of its last bundle, as it was found.
            size: bytes of the host rows on one rank that it fills.
        """

    def fetched(self, keys: Sequence[str], size: int, seconds: float | None) -> None:
        """Note that bundles were of use: every rank has read them.

        Args:
            keys: in the order of the sequence.
            size: bytes of the host rows on one rank that they filled.
            seconds: what it took the slowest rank; None if nobody measured.
        """

    def fetch_failed(self, key: str, reason: str) -> Sequence[str]:
        """Find a bundle no more that a rank could not read.

        Args:
            key: as it was found; it may be gone by now.
            reason: in words, for the log.

        Returns:
            Keys to discard on all ranks.
        """

    def clear(self) -> Sequence[str]:
        """Find nothing any more.

        What is being stored is reported as failed, when it is over.

        Returns:
            Keys to discard on all ranks.
        """
