# SPDX-License-Identifier: Apache-2.0
"""A fake outer tier, and fake ranks that write and read its bundles.

The tier is an index with a budget.  The ranks work on `HostMemory` and keep files, and
they do it in any order, late and badly: a write is lost or torn, a file is damaged or
gone, a fetch leaves garbage behind.  What they report is always true.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from hybrid_plugin.core.cache import HybridCache
from hybrid_plugin.core.commands import (
    BundleRows,
    Discard,
    Fetch,
    Offer,
    Pool,
    PoolId,
    Write,
    WriteRecord,
)
from hybrid_plugin.core.stats import OuterStats
from hybrid_plugin.core.tiers.outer_tier import StoredBundle, Storing
from hybrid_plugin.core.tree.tokens import Tokens
from tests.core.device import GARBAGE, ContentError, HostMemory, State


@dataclass(frozen=True, slots=True)
class Entry:
    """What the index knows of a bundle."""

    namespace: Hashable
    tokens: Tokens
    start: int
    size: int


class FakeTier:
    """The index of a tier with a budget; the least recently used goes first."""

    keeps_bundles = True
    offers_bundles = False
    is_divisible = False
    reads_at_once = 1

    def __init__(
        self, budget: int, read_bytes_per_second: float = 1e9, name: str = "disk"
    ) -> None:
        """Start empty.

        Args:
            budget: bytes of all bundles.
            read_bytes_per_second: as if it had been measured.
            name: of the tier.
        """
        self.name = name
        self.budget = budget
        self.read_bytes_per_second = read_bytes_per_second
        self.stats = OuterStats()
        self.version = 0
        self.entries: dict[str, Entry] = {}
        self.begun: dict[str, Entry] = {}

    token_seconds_there: float | None = None
    """What a token's prefill takes who has the bundles."""

    def read_seconds(self, key: str, size: int) -> float:
        """See `OuterTier`."""
        return size / self.read_bytes_per_second

    def token_seconds(self, key: str) -> float | None:
        """See `OuterTier`."""
        return self.token_seconds_there

    def patience(self, computing: float) -> float:
        """See `OuterTier`."""
        return computing

    @property
    def used_bytes(self) -> int:
        """Bytes of what is there, and of what is being stored."""
        return sum(one.size for one in (*self.entries.values(), *self.begun.values()))

    def find(
        self, namespace: Hashable, tokens: Tokens, limit: int
    ) -> Sequence[StoredBundle]:
        """See `OuterTier`."""
        best: Sequence[StoredBundle] = ()
        for one in self.entries.values():
            end = len(one.tokens)
            longer = end > (best[-1].end if best else 0)
            fits = one.namespace == namespace and end <= limit and longer
            if fits and tokens[:end] == one.tokens:
                best = self._chain(namespace, one.tokens) or best
        return best

    def _chain(self, namespace: Hashable, tokens: Tokens) -> Sequence[StoredBundle]:
        chain: list[StoredBundle] = []
        end = len(tokens)
        while end:
            key = key_of(namespace, tokens[:end])
            if key not in self.entries:
                return ()
            chain.insert(0, StoredBundle(key, self.entries[key].start, end))
            end = self.entries[key].start
        return chain

    def begin_store(
        self, namespace: Hashable, tokens: Tokens, start: int, size: int
    ) -> Storing | None:
        """See `OuterTier`."""
        key = key_of(namespace, tokens)
        assert key not in self.begun, "stored twice"
        before = self.find(namespace, tokens, start)
        assert start == (before[-1].end if before else 0), "it begins elsewhere"
        kept = {one.key for one in before}
        others = [old for old in self.entries if old not in kept and old != key]
        orphan = self.entries.pop(key, None)  # the one before it is gone
        assert orphan is None or self.find(namespace, tokens, len(tokens)) == before
        least = self.used_bytes - sum(self.entries[old].size for old in others)
        if least + size > self.budget:
            if orphan is not None:
                self.entries[key] = orphan
            return None
        discard = [] if orphan is None else [key]
        for old in others:
            if self.used_bytes + size <= self.budget:
                break
            del self.entries[old]
            discard.append(old)
        self._use([one.key for one in before])
        self.version += 1
        self.begun[key] = Entry(namespace, tokens, start, size)
        return Storing(key, tuple(discard))

    def stored(self, key: str, seconds: float | None) -> None:
        """See `OuterTier`."""
        self.entries[key] = self.begun.pop(key)
        self.version += 1

    def store_failed(self, key: str, reason: str) -> Sequence[str]:
        """See `OuterTier`."""
        del self.begun[key]
        return (key,)

    def fetch_refused(self, key: str, computing: float) -> None:
        """See `OuterTier`."""

    def begin_fetch(self, key: str, size: int) -> None:
        """See `OuterTier`."""

    def fetched(self, keys: Sequence[str], size: int, seconds: float | None) -> None:
        """See `OuterTier`."""
        self._use(keys)

    def fetch_failed(self, key: str, reason: str) -> Sequence[str]:
        """See `OuterTier`."""
        self.version += 1
        return (key,) if self.entries.pop(key, None) is not None else ()

    def clear(self) -> Sequence[str]:
        """See `OuterTier`."""
        keys = tuple(self.entries)
        self.entries.clear()
        self.version += 1
        return keys

    def _use(self, keys: Sequence[str]) -> None:
        for key in reversed(keys):
            if key in self.entries:
                self.entries[key] = self.entries.pop(key)


class FakePeers:
    """Servers that read what is offered to them, and offer it back.

    What was fetched from them, or could not be, they offer no more.
    """

    name = "peer"
    keeps_bundles = False
    offers_bundles = True
    is_divisible = True
    reads_at_once = 2

    def __init__(self, most: float, read_bytes_per_second: float = 1e9) -> None:
        """Start with nothing offered.

        Args:
            most: seconds that a sequence waits at most.
            read_bytes_per_second: as if it had been measured, of each fetch.
        """
        self.most = most
        self.read_bytes_per_second = read_bytes_per_second
        self.stats = OuterStats()
        self.version = 0
        self.entries: dict[str, Entry] = {}
        """What can be fetched."""
        self.begun: dict[str, Entry] = {}
        """What is offered to them."""
        self.refused: dict[str, float] = {}
        """What was to be computed instead, and how long that takes."""
        self.fetching: dict[str, int] = {}
        """Bytes of what is being fetched."""
        self._outdated: set[str] = set()
        """Of that, what was offered before a flush."""
        self._count = 0

    token_seconds_there: float | None = None
    """What a token's prefill takes who has the bundles."""

    def read_seconds(self, key: str, size: int) -> float:
        """See `OuterTier`."""
        assert key in self.entries
        return size / self.read_bytes_per_second

    def token_seconds(self, key: str) -> float | None:
        """See `OuterTier`."""
        return self.token_seconds_there

    def patience(self, computing: float) -> float:
        """See `OuterTier`."""
        return min(computing, self.most)

    @property
    def used_bytes(self) -> int:
        """Bytes of what is offered."""
        return sum(one.size for one in self.begun.values())

    def find(
        self, namespace: Hashable, tokens: Tokens, limit: int
    ) -> Sequence[StoredBundle]:
        """See `OuterTier`."""
        best, end = "", 0
        for key, one in self.entries.items():
            size = len(one.tokens)
            fits = one.namespace == namespace and end < size <= limit
            if fits and tokens[:size] == one.tokens:
                best, end = key, size
        return (StoredBundle(best, 0, end),) if best else ()

    def begin_store(
        self, namespace: Hashable, tokens: Tokens, start: int, size: int
    ) -> Storing | None:
        """See `OuterTier`: the beginning of an offer."""
        assert start == 0 and len(tokens) > 0
        self._count += 1
        if self._count % 7 == 0:
            return None
        key = f"{self._count} {key_of(namespace, tokens)}"
        self.begun[key] = Entry(namespace, tokens, 0, size)
        return Storing(key)

    def stored(self, key: str, seconds: float | None) -> None:
        """See `OuterTier`: somebody has read an offer."""
        entry = self.begun.pop(key)
        if key in self._outdated:
            self._outdated.discard(key)
            return
        self.entries[key] = entry
        self.version += 1

    def store_failed(self, key: str, reason: str) -> Sequence[str]:
        """See `OuterTier`: nobody has."""
        del self.begun[key]
        self._outdated.discard(key)
        return ()

    def fetch_refused(self, key: str, computing: float) -> None:
        """See `OuterTier`."""
        assert key in self.entries
        self.refused[key] = computing

    def begin_fetch(self, key: str, size: int) -> None:
        """See `OuterTier`."""
        assert key in self.entries and key not in self.fetching
        self.fetching[key] = size

    def fetched(self, keys: Sequence[str], size: int, seconds: float | None) -> None:
        """See `OuterTier`."""
        (key,) = keys
        assert self.fetching.pop(key) == size
        self._drop(key)

    def fetch_failed(self, key: str, reason: str) -> Sequence[str]:
        """See `OuterTier`."""
        del self.fetching[key]
        self._drop(key)
        return ()

    def clear(self) -> Sequence[str]:
        """See `OuterTier`."""
        self.entries.clear()
        self._outdated |= self.begun.keys()
        self.version += 1
        return ()

    def _drop(self, key: str) -> None:
        if self.entries.pop(key, None) is not None:
            self.version += 1


@dataclass(slots=True)
class _File:
    """What a rank has written."""

    bundle: BundleRows
    cells: dict[tuple[PoolId, int], int]
    """By pool and position, the number of the prefix that its KV was computed from."""
    state: State | None
    is_sound: bool = True
    """Whether its checksum is right."""


@dataclass(slots=True)
class FakeRanks:
    """The I/O of all ranks, as one: they do the same, and agree on what they report."""

    host: HostMemory
    page_size: int
    rng: random.Random
    trouble: float
    """Chance of a write or a fetch to fail, and of a file to be damaged afterwards."""
    file_of: Callable[[str], str] = str
    """The name of the file that has the bundle of a key."""
    files: dict[str, _File] = field(default_factory=dict)
    """By their names."""
    records: dict[str, str] = field(default_factory=dict)
    """Texts beside them."""
    peers: dict[str, _File] = field(default_factory=dict)
    """What other servers have read, by the keys of offers."""
    reports: list[tuple[int, bool, dict[str, Any]]] = field(default_factory=list)
    """Ticket, whether it was done, and what else is said of it."""

    def work(self) -> None:
        """Do something of what was ordered, in an order of one's own."""
        queue = self.host.queue
        while queue and isinstance(queue[0], Discard):
            for key in queue.pop(0).keys:  # type: ignore[union-attr]
                self.files.pop(self.file_of(key), None)
        kinds = [isinstance(one, Discard | WriteRecord) for one in queue]
        if queue and isinstance(queue[0], WriteRecord):
            self._record(queue.pop(0))  # type: ignore[arg-type]
            return
        free = kinds.index(True) if True in kinds else len(queue)
        if not free:
            return
        command = queue.pop(self.rng.randrange(free))
        if isinstance(command, Write):
            self._write(command)
        elif isinstance(command, Offer):
            self._read_by_peer(command)
        elif isinstance(command, Fetch):
            self._fetch(command)

    def report(self, cache: HybridCache) -> Iterator[None]:
        """Tell the core of one outcome, in any order; yields behind it."""
        if not self.reports:
            return
        ticket, ok, details = self.reports.pop(self.rng.randrange(len(self.reports)))
        del self.host.out[ticket]
        self.host.withdrawn.discard(ticket)
        cache.lower_tiers.done(ticket, ok, **details)
        yield

    def _record(self, command: WriteRecord) -> None:
        if self._fails():
            self.reports.append((command.ticket, False, {"reason": "disk full"}))
            return
        self.records.pop(command.name, None)
        if command.text is not None:
            self.records[command.name] = command.text
        self.reports.append((command.ticket, True, {}))

    def _fails(self) -> bool:
        return self.rng.random() < self.trouble

    # ------------------------------------------------------------------- write

    def _write(self, command: Write) -> None:
        bundle = command.rows
        has_states = Pool.STATE in self.host.plan.row_bytes
        if (bundle.state is None) == has_states:
            raise ContentError(f"{bundle.key} is written without its state")
        file = _File(bundle, self._cells(bundle), self._state(bundle))
        if bundle.start and not self._has_parent(bundle):
            raise ContentError(f"{bundle.key} is written without the one before it")
        seconds = self.rng.random()
        if not self._fails():
            file.is_sound = not self._fails()
            self.files[self.file_of(bundle.key)] = file
            self.reports.append((command.ticket, True, {"seconds": seconds}))
            return
        if self.rng.random() < 0.5:  # on some ranks
            self.files[self.file_of(bundle.key)] = file
        self.reports.append((command.ticket, False, {"reason": "disk full"}))

    def _read_by_peer(self, command: Offer) -> None:
        """A peer reads an offer, unless it was withdrawn, or nobody comes."""
        if command.ticket in self.host.withdrawn or self._fails():
            self.reports.append((command.ticket, False, {"reason": "unread"}))
            return
        bundle = command.rows
        has_states = Pool.STATE in self.host.plan.row_bytes
        assert bundle.start == 0 and (bundle.state is None) != has_states
        file = _File(bundle, self._cells(bundle), self._state(bundle))
        file.is_sound = not self._fails()
        self.peers[bundle.key] = file
        self.reports.append((command.ticket, True, {"seconds": self.rng.random()}))

    def _has_parent(self, bundle: BundleRows) -> bool:
        before = bundle.namespace, bundle.tokens[: bundle.start]
        return any(
            before == (file.bundle.namespace, file.bundle.tokens)
            for file in self.files.values()
        )

    def _cells(self, bundle: BundleRows) -> dict[tuple[PoolId, int], int]:
        assert Pool.KV in bundle.pages and bundle.pages[Pool.KV].start == bundle.start
        return {
            (pool, position): self.host.read(pool, row)[cell]
            for pool in bundle.pages
            for position, row, cell in self._places(bundle, pool)
        }

    def _state(self, bundle: BundleRows) -> State | None:
        if bundle.state is None:
            return None
        state = self.host.read(Pool.STATE, bundle.state)
        assert isinstance(state, State)
        return state

    def _places(self, bundle: BundleRows, pool: PoolId) -> list[tuple[int, int, int]]:
        """Position, row and place in the row of each token that counts."""
        part, size, end = bundle.pages[pool], self.page_size, len(bundle.tokens)
        first = part.start // size
        assert len(part.rows) == max(-(-end // size) - first, 0), "not one for each"
        return [
            (position, part.rows[position // size - first], position % size)
            for position in range(part.start, end)
        ]

    # ------------------------------------------------------------------- fetch

    def _fetch(self, command: Fetch) -> None:
        files = self.files if command.source == "disk" else self.peers
        assert command.rows
        filled: dict[tuple[PoolId, int], Any] = {}
        for index, bundle in enumerate(command.rows):
            of_disk = command.source == "disk"
            file = files.get(self.file_of(bundle.key) if of_disk else bundle.key)
            if file is None:
                raise ContentError(f"{bundle.key} is fetched, but was never written")
            reason = self._fault(file, bundle, is_whole=of_disk)
            if reason:
                details = {"reason": reason, "bundle": index}
                if self.rng.random() < 0.5:
                    del details["bundle"]
                self.reports.append((command.ticket, False, details))
                return
            self._fill(bundle, file, filled)
        self.host.rows.update(filled)
        seconds = {"seconds": self.rng.random()}
        self.reports.append((command.ticket, True, seconds))

    def _fault(self, file: _File, bundle: BundleRows, *, is_whole: bool) -> str:
        same = (
            file.bundle.tokens == bundle.tokens
            and (file.bundle.start == bundle.start or not is_whole)
            and file.bundle.namespace == bundle.namespace
        )
        assert same, "it asks for another bundle than there is"
        if not file.is_sound:
            return "corrupt"
        return "io" if self._fails() else ""

    def _fill(
        self, bundle: BundleRows, file: _File, filled: dict[tuple[PoolId, int], Any]
    ) -> None:
        for pool in bundle.pages:
            for position, row, cell in self._places(bundle, pool):
                content = filled.setdefault((pool, row), [GARBAGE] * self.page_size)
                content[cell] = file.cells[pool, position]
        if bundle.state is not None:
            filled[Pool.STATE, bundle.state] = file.state


def key_of(namespace: Hashable, tokens: Tokens) -> str:
    """A name that nothing else has."""
    return f"{namespace}/{tokens.tolist()}"
