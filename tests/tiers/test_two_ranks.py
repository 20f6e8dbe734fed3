# SPDX-License-Identifier: Apache-2.0
"""Two ranks with a disk each that fails by itself, and one who decides for both.

Whatever happens: what is fetched is right on both, and what one cannot read or write,
the other one does not keep.
"""

from __future__ import annotations

import errno
import random
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybrid_plugin.core.commands import (
    BundleRows,
    Discard,
    Fetch,
    PageRows,
    Pool,
    Write,
)
from hybrid_plugin.core.tree.tokens import Tokens
from hybrid_plugin.tiers import agreement
from hybrid_plugin.tiers.agreement import Outcome
from hybrid_plugin.tiers.bundle import pages_of
from hybrid_plugin.tiers.disk import DiskTier
from hybrid_plugin.tiers.shelf import SUFFIX, BundleShelf
from hybrid_plugin.tiers.stock import Stock, TierFolder
from hybrid_plugin.tiers.transfers import RankTransfers
from tests.core.profiles import SOAK_FACTOR
from tests.device.later_thread import LaterThread
from tests.tiers.failing_tier import random_digits
from tests.tiers.memory_files import MemoryFiles
from tests.tiers.support import IDENTITY, STATE_BYTES, as_tokens, bundle, layouts

OWN = layouts(4)
PAGE_BYTES = OWN.pages[Pool.KV].row_bytes
ROWS = 200
IDENTITIES = tuple(
    replace(IDENTITY, tensor_ranks=2, tensor_rank=rank) for rank in (0, 1)
)
NAMES = tuple(identity.rank_name for identity in IDENTITIES)
BUDGET = 90_000
"""About nine bundles of both."""


class Rank:
    """One rank, whose threads run when they are told to."""

    def __init__(self, path: Path, number: int, files: MemoryFiles) -> None:
        self.number = number
        self.files = files
        self.rows = {
            Pool.host(Pool.KV): np.zeros((ROWS, PAGE_BYTES), np.uint8),
            Pool.host(Pool.STATE): np.zeros((1, STATE_BYTES), np.uint8),
        }
        threads = {name: LaterThread() for name in ("write", "disk")}
        self.threads = threads
        shelf = BundleShelf(path, NAMES[number], OWN, files=files)
        self.transfers = RankTransfers(
            self, shelf, {"disk": shelf}, lambda name, count: threads[name]
        )

    def row_bytes(self, pool: str) -> int:
        return self.rows[pool].shape[1]

    def views(self, pool: str, rows: Sequence[int]) -> list[Any]:
        return [self.rows[pool][row : row + 1] for row in rows]

    def copies_over(self) -> Any:
        return lambda: None

    def model(self, namespace: str, tokens: Tokens, start: int) -> Any:
        """What this rank has computed: other bytes than the other rank."""
        return bundle(OWN, (namespace, str(self.number)), tokens, start)

    def step(self, rng: random.Random) -> None:
        """Run a job."""
        if rng.random() < 0.5:
            self.threads["disk"].step()
            return
        while self.threads["write"].discards and self.threads["disk"].step():
            pass
        self.threads["write"].step()

    @property
    def kept(self) -> set[str]:
        """Keys of its files."""
        paths = self.files.paths()
        return {path.stem for path in paths if path.suffix == SUFFIX}


class Both:
    """Both ranks, and who decides for them."""

    def __init__(self, path: Path, seed: int, trouble: float) -> None:
        self.rng = random.Random(seed)
        self.trouble = trouble
        self.path = path
        self.disks = [MemoryFiles(4 * BUDGET, seed + n) for n in (0, 1)]
        self.ticket = self.fetched = self.failed = 0
        self.open()

    def open(self) -> None:
        """Start; each rank sees its own folder."""
        self.folders = [
            TierFolder(self.path, {name: OWN}, files=files)
            for name, files in zip(NAMES, self.disks, strict=True)
        ]
        stocks: list[Stock] = [folder._stock for folder in self.folders]
        entries = [folder.entries(lambda _: stocks) for folder in self.folders]
        assert entries[0] == entries[1]
        every = dict.fromkeys(NAMES, OWN)
        self.tier = DiskTier(entries[0], BUDGET, IDENTITIES[0], every, 1e9)
        gone = self.tier.trim()
        for folder in self.folders:
            folder.discard(gone)
        self.ranks = [Rank(self.path, n, self.disks[n]) for n in (0, 1)]

    def restart(self) -> None:
        """Stop in good order, and start again."""
        self.close()
        self.open()

    def close(self) -> None:
        for folder in self.folders:
            folder.close()

    def store(self, namespace: str, tokens: Tokens, start: int) -> None:
        made = [rank.model(namespace, tokens, start) for rank in self.ranks]
        begun = self.tier.begin_store(namespace, tokens, start, made[0].size)
        if begun is None:
            return
        self.discard(begun.discard)
        rows = rows_for(begun.key, tokens, start)
        for rank, own in zip(self.ranks, made, strict=True):
            pages = rank.rows[Pool.host(Pool.KV)]
            pages[list(rows.pages[Pool.KV].rows)] = np.stack(own.pages["kv"].rows)
            rank.rows[Pool.host(Pool.STATE)][0] = own.state
        outcome = self.wait_for(Write(self.next_ticket(), rows))
        if outcome.is_ok:
            self.tier.stored(begun.key, outcome.seconds)
        else:
            assert outcome.lost is not None
            reason = outcome.lost.failure.reason
            self.discard(self.tier.store_failed(begun.key, reason))

    def fetch(self, namespace: str, tokens: Tokens) -> None:
        found = self.tier.find(namespace, tokens, len(tokens) - 1)
        if not found:
            return
        parts = []
        for rank in self.ranks:
            for memory in rank.rows.values():
                memory[:] = 0xAB
        for one in found:
            rows = rows_for(one.key, tokens[: one.end], one.start)
            state = 0 if one is found[-1] else None
            parts.append(replace(rows, state=state))
        outcome = self.wait_for(Fetch(self.next_ticket(), "disk", tuple(parts)))
        keys = [one.key for one in found]
        if outcome.lost is not None:
            self.failed += 1
            assert self.trouble, outcome
            key, reason = keys[outcome.lost.bundle], outcome.lost.failure.reason
            self.discard(self.tier.fetch_failed(key, reason))
            return
        self.fetched += 1
        self.tier.fetched(keys, outcome.bytes, outcome.seconds)
        for rank in self.ranks:
            made = rank.model(namespace, tokens[: found[-1].end], 0)
            got = rank.rows[Pool.host(Pool.KV)].reshape(-1)
            size = found[-1].end * PAGE_BYTES // 4
            wanted = np.concatenate(made.pages["kv"].rows)[:size]
            assert np.array_equal(got[:size], wanted), rank.number
            assert np.array_equal(rank.rows[Pool.host(Pool.STATE)][0], made.state)

    def discard(self, keys: Sequence[str]) -> None:
        for rank in self.ranks:
            if keys:
                rank.transfers.run(Discard(tuple(keys)))

    def next_ticket(self) -> int:
        self.ticket += 1
        return self.ticket

    def wait_for(self, command: Write | Fetch) -> Outcome:
        """Run a command on both, one perhaps long before the other."""
        for rank in self.ranks:
            rank.transfers.run(command)
        while True:
            if self.rng.random() < self.trouble:
                harm(self.rng.choice(self.disks), self.rng)
            self.rng.choice(self.ranks).step(self.rng)
            heard = self.settle()
            if heard:
                (outcome,) = heard
                return outcome

    def settle(self) -> list[Outcome]:
        given: list[list[int]] = []

        def note(values: list[int]) -> list[int]:
            given.append(values)
            return [1, 0, 0, 0] * (len(values) // 4)

        for rank in self.ranks:
            assert rank.transfers.settle(note) == []
        greatest = [max(each) for each in zip(*given, strict=True)]
        heard = [rank.transfers.settle(lambda _: greatest) for rank in self.ranks]
        assert heard[0] == heard[1]
        return heard[0]

    def check(self) -> None:
        """With nothing left to do, both keep what is found, and no more."""
        for rank in self.ranks:
            for thread in ("disk", "write"):
                while rank.threads[thread].step():
                    pass
        books = {entry.name.key for entry in self.tier._index.oldest()}
        if not self.trouble:
            assert all(rank.kept == books for rank in self.ranks)
            size = sum(
                len(disk.content(p)) for disk in self.disks for p in disk.paths()
            )
            assert size <= self.tier.used_bytes <= BUDGET
        for rank in self.ranks:
            # A disk that fails may keep what it was to remove, until the next write.
            stuck = {path.stem for path in rank.transfers._sink._stuck}  # type: ignore[union-attr]
            assert rank.kept <= books | stuck


def rows_for(key: str, tokens: Tokens, start: int) -> BundleRows:
    """Rows as far from the first one as pages from the start of the sequence."""
    place = pages_of(start, len(tokens), 4)
    rows = tuple(range(place.first, place.first + place.count))
    return BundleRows(key, None, tokens, start, {Pool.KV: PageRows(start, rows)}, 0)


def harm(files: MemoryFiles, rng: random.Random) -> None:
    """Flip a bit, or have a later call fail."""
    bundles = [path for path in files.paths() if path.suffix == SUFFIX]
    if bundles and rng.random() < 0.5:
        content = files.content(rng.choice(bundles))
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        return
    files.faults.calls_until_failure = rng.randrange(12)
    files.faults.error = rng.choice([errno.EIO, errno.ENOSPC])


def run(path: Path, seed: int, trouble: float) -> Both:
    both = Both(path, seed, trouble)
    rng = random.Random(seed)
    try:
        for _ in range(60):
            namespace = rng.choice(["a", "b"])
            if rng.random() < 0.5:
                digits = random_digits(rng, (5, 9, 12, 255, 257))
                start = min(rng.choice([0, 0, 5, 9, 12]), len(digits) - 1)
                both.store(namespace, as_tokens(*digits), start)
            elif rng.random() < 0.9:
                tokens = array("q", random_digits(rng, (300,)))
                both.fetch(namespace, tokens)
            elif not trouble:
                both.check()
                both.restart()
            both.check()
    finally:
        both.close()
    return both


@pytest.mark.parametrize("trouble", [0.0, 0.05])
def test_both_have_the_same(tmp_path: Path, trouble: float) -> None:
    ran = [run(tmp_path / str(n), n, trouble) for n in range(6 * SOAK_FACTOR)]
    assert sum(both.fetched for both in ran) > 20
    assert (sum(both.failed for both in ran) > 5) == bool(trouble)


# ------------------------------------------------------- deliberate breakages


def _the_other_ranks_failure_is_not_heard(patch: pytest.MonkeyPatch) -> None:
    real = agreement._from_numbers

    def from_numbers(ticket: int, code: int, *moved: int) -> Outcome:
        return real(ticket, 0, *moved)

    patch.setattr(agreement, "_from_numbers", from_numbers)


def _what_failed_stays(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DiskTier, "store_failed", _forgets_and_keeps)


def _forgets_and_keeps(self: Any, key: str, reason: str) -> tuple[str, ...]:
    self._pending.discard(key.split(".")[0])
    self._index.remove(key.split(".")[0])
    return ()


def _parts_may_be_lacking(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TierFolder, "_remove_all_but", lambda self, keys: None)
    patch.setattr(DiskTier, "store_failed", _forgets_and_keeps)


@pytest.fixture
def breakage(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    request.param(monkeypatch)
    yield


@pytest.mark.usefixtures("breakage")
@pytest.mark.parametrize(
    "breakage",
    [_the_other_ranks_failure_is_not_heard, _what_failed_stays, _parts_may_be_lacking],
    indirect=True,
    ids=lambda each: each.__name__,
)
def test_catches(tmp_path: Path) -> None:
    with pytest.raises((AssertionError, ValueError, KeyError)):
        for seed in range(12):
            run(tmp_path / str(seed), seed, 0.05)
