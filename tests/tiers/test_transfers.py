# SPDX-License-Identifier: Apache-2.0
"""A rank's threads: order, what is in use, and that every ticket comes back."""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from hybrid_plugin.core.commands import (
    BundleRows,
    Decline,
    Discard,
    Fetch,
    Offer,
    PageRows,
    Pool,
    Withdraw,
    Write,
    WriteRecord,
)
from hybrid_plugin.tiers.agreement import Lost, Outcome
from hybrid_plugin.tiers.bundle import Bundle
from hybrid_plugin.tiers.failure import Failure, Reason
from hybrid_plugin.tiers.transfers import RankTransfers, check_rows
from tests.tiers.support import layouts

PATIENCE = 60.0
"""Seconds after which a ticket counts as lost."""
TOKENS = array("q", range(10))


class Memory:
    """Host rows of 32 bytes each, and copies that are over when the test says so."""

    def __init__(self) -> None:
        self.rows = {
            Pool.host(pool): np.zeros((8, size), np.uint8)
            for pool, size in ((Pool.KV, 32), (Pool.STATE, 24))
        }
        self.copied = threading.Event()
        self.copied.set()

    def row_bytes(self, pool: str) -> int:
        return self.rows[pool].shape[1]

    def views(self, pool: str, rows: Sequence[int]) -> list[Any]:
        return [self.rows[pool][row : row + 1] for row in rows]

    def copies_over(self) -> Callable[[], None]:
        def wait() -> None:
            assert self.copied.wait(PATIENCE)

        return wait


class Keeper:
    """Keeps what is written, behind a gate."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.begun = threading.Event()
        self.order: list[str] = []
        self.kept: dict[str, bytes] = {}
        self.failure: Failure | None = None

    def _pass(self, what: str) -> None:
        self.begun.set()
        assert self.gate.wait(PATIENCE)
        self.order.append(what)

    def write(self, bundle: Bundle) -> Any:
        self._pass(f"write {bundle.key}")
        rows = bundle.pages[Pool.KV].rows
        self.kept[bundle.key] = b"".join(row.tobytes() for row in rows)
        return self.failure

    def record(self, name: str, text: str | None) -> Any:
        self._pass(f"record {name} {text}")
        return self.failure

    def discard(self, keys: Sequence[str]) -> None:
        self._pass(f"discard {' '.join(keys)}")
        for key in keys:
            if key == "bad":
                raise RuntimeError("on purpose")
            del self.kept[key]


class Giver:
    """Gives what a keeper kept, behind a gate of its own."""

    at_once = 1

    def __init__(self, keeper: Keeper) -> None:
        self.keeper = keeper
        self.gate = threading.Event()
        self.gate.set()
        self.begun = threading.Event()

    def fetch(self, bundles: Sequence[Bundle]) -> Lost | None:
        self.begun.set()
        assert self.gate.wait(PATIENCE)
        for place, bundle in enumerate(bundles):
            self.keeper.order.append(f"fetch {bundle.key}")
            if bundle.key == "bad":
                raise RuntimeError("on purpose")
            if bundle.key not in self.keeper.kept:
                return Lost(place, Failure(Reason.MISSING, bundle.key))
            content = np.frombuffer(self.keeper.kept[bundle.key], np.uint8)
            for row, part in zip(
                bundle.pages[Pool.KV].rows, np.split(content, 2), strict=True
            ):
                row[:] = part
        return None


class Lending:
    """Offers that end when the test says so."""

    def __init__(self) -> None:
        self.offers: dict[int, Future[Lost | None]] = {}
        self.bundles: list[Bundle] = []
        self.over: list[int] = []
        """Whose leases end when somebody looks."""

    def offer(
        self, ticket: int, bundle: Bundle, copies_over: Callable[[], None]
    ) -> Future[Lost | None]:
        self.bundles.append(bundle)
        self.offers[ticket] = Future()
        return self.offers[ticket]

    def withdraw(self, tickets: Iterable[int]) -> None:
        for ticket in tickets:
            self.offers[ticket].set_result(Lost(0, Failure(Reason.CLEARED)))

    def expire(self) -> None:
        while self.over:
            lost = Lost(0, Failure(Reason.UNREAD))
            self.offers[self.over.pop()].set_result(lost)


class Declining:
    """Tells peers, behind a gate of its own."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.told: list[str] = []

    def decline(self, key: str, begun: float) -> None:
        assert begun <= time.monotonic() and self.gate.wait(PATIENCE)
        self.told.append(key)


class Rank:
    def __init__(self) -> None:
        self.lending, self.declining = Lending(), Declining()
        self.memory = Memory()
        self.keeper = Keeper()
        self.disk, self.peer = Giver(self.keeper), Giver(self.keeper)
        self.transfers = RankTransfers(
            self.memory,
            self.keeper,
            {"disk": self.disk, "peer": self.peer},
            lender=self.lending,
            decliner=self.declining,
        )

    @property
    def gates(self) -> list[threading.Event]:
        gates = [self.keeper.gate, self.disk.gate, self.peer.gate, self.memory.copied]
        return [*gates, self.declining.gate]

    def write(self, ticket: int, key: str, rows: tuple[int, ...] = (1, 2)) -> None:
        self.transfers.run(Write(ticket, bundle_rows(key, rows)))

    def fetch(self, ticket: int, source: str, *keys: str) -> None:
        rows = tuple(bundle_rows(key, (3, 4)) for key in keys)
        self.transfers.run(Fetch(ticket, source, rows))

    def outcomes(self, count: int) -> dict[int, Outcome]:
        found: dict[int, Outcome] = {}
        deadline = time.monotonic() + PATIENCE
        while len(found) < count and time.monotonic() < deadline:
            found |= {outcome.ticket: outcome for outcome in self.transfers.poll()}
            time.sleep(0.001)
        return found


def bundle_rows(key: str, rows: tuple[int, ...]) -> BundleRows:
    return BundleRows(key, None, TOKENS, 0, {Pool.KV: PageRows(0, rows)}, 5)


@pytest.fixture
def rank() -> Iterator[Rank]:
    made = Rank()
    yield made
    for gate in made.gates:
        gate.set()
    made.transfers.close()


def test_peers_are_told_beside_all_that_is_out(rank: Rank) -> None:
    """A peer that is silent holds up nothing, and nothing holds up what it is told."""
    rank.write(1, "a")
    rank.outcomes(1)
    rank.declining.gate.clear()
    rank.transfers.run(Decline(("x", "y")))
    assert rank.transfers.is_idle, "no outcome is awaited"
    rank.fetch(2, "peer", "a")
    assert rank.outcomes(1)[2].is_ok and not rank.declining.told
    rank.peer.gate.clear()
    rank.fetch(3, "peer", "a")
    rank.declining.gate.set()
    end = time.monotonic() + PATIENCE
    while rank.declining.told != ["x", "y"]:
        assert time.monotonic() < end
        time.sleep(0.001)


def test_without_peers_nobody_is_told() -> None:
    with pytest.raises(TypeError, match="there are no peers"):
        RankTransfers(Memory(), Keeper(), {}).run(Decline(("x",)))


def test_what_was_written_is_fetched(rank: Rank) -> None:
    kv = rank.memory.rows[Pool.host(Pool.KV)]
    kv[1:3] = [[1], [2]]
    rank.write(1, "a")
    (done,) = rank.outcomes(1).values()
    assert (done.lost, done.bytes) == (None, 2 * 32 + 24)
    rank.fetch(2, "disk", "a")
    (done,) = rank.outcomes(1).values()
    assert (done.ticket, done.lost, done.bytes) == (2, None, 2 * 32 + 24)
    assert np.array_equal(kv[3:5], kv[1:3])
    assert rank.transfers.is_idle and rank.transfers.poll() == []


def test_what_is_written_is_what_the_copies_before_leave(rank: Rank) -> None:
    rank.memory.copied.clear()
    rank.write(1, "a")
    assert not rank.keeper.begun.wait(0.05)
    rank.memory.rows[Pool.host(Pool.KV)][1:3] = 7
    rank.memory.copied.set()
    assert rank.outcomes(1)[1].is_ok
    assert set(rank.keeper.kept["a"]) == {7}


def test_nothing_is_filled_before_the_copies_before_are_over(rank: Rank) -> None:
    rank.write(1, "a")
    rank.outcomes(1)
    rank.memory.copied.clear()
    rank.fetch(2, "disk", "a")
    assert not rank.disk.begun.wait(0.05)
    rank.memory.copied.set()
    assert rank.outcomes(1)[2].is_ok


def test_nobody_waits_for_another_source_or_for_a_write(rank: Rank) -> None:
    rank.write(1, "a")
    rank.outcomes(1)
    rank.keeper.gate.clear()
    rank.write(2, "b")
    rank.disk.gate.clear()
    rank.fetch(3, "disk", "a")
    rank.fetch(4, "peer", "a")
    assert list(rank.outcomes(1)) == [4]
    assert not rank.transfers.is_idle
    rank.disk.gate.set()
    assert list(rank.outcomes(1)) == [3]
    rank.keeper.gate.set()
    assert list(rank.outcomes(1)) == [2]


def test_writes_keep_their_order_and_discards_come_behind_all(rank: Rank) -> None:
    rank.write(1, "a")
    rank.outcomes(1)
    rank.disk.gate.clear()
    rank.fetch(2, "disk", "a")
    rank.write(3, "b")
    rank.transfers.run(Discard(("a", "b")))
    rank.write(4, "c")
    assert rank.disk.begun.wait(PATIENCE)
    assert list(rank.outcomes(1)) == [3]
    assert set(rank.keeper.kept) == {"a", "b"}
    rank.disk.gate.set()
    assert rank.outcomes(2).keys() == {2, 4}
    assert rank.keeper.order == [
        "write a",
        "write b",
        "fetch a",
        "discard a b",
        "write c",
    ]
    assert set(rank.keeper.kept) == {"c"}


def test_a_fetch_says_which_bundle_was_lost(
    rank: Rank, caplog: pytest.LogCaptureFixture
) -> None:
    rank.write(1, "a")
    rank.outcomes(1)
    for ticket in (2, 3):
        rank.fetch(ticket, "disk", "a", "gone", "a")
        assert rank.outcomes(1)[ticket].lost == Lost(1, Failure(Reason.MISSING))
    rank.fetch(4, "disk", "a")
    rank.outcomes(1)
    rank.fetch(5, "disk", "gone")
    rank.outcomes(1)
    lines = [record.getMessage() for record in caplog.records]
    assert lines == ["hybrid-plugin: a bundle is lost: the file is gone: gone"] * 2


def test_a_write_that_fails_is_told(rank: Rank) -> None:
    rank.keeper.failure = Failure(Reason.DISK_FULL)
    rank.write(1, "a")
    assert rank.outcomes(1)[1].lost == Lost(0, rank.keeper.failure)


def test_threads_survive_faults(rank: Rank, caplog: pytest.LogCaptureFixture) -> None:
    rank.fetch(1, "disk", "bad")
    lost = rank.outcomes(1)[1].lost
    assert lost is not None and lost.failure.reason is Reason.INTERNAL
    assert "Traceback" in caplog.text
    rank.transfers.run(Discard(("bad",)))
    rank.write(2, "a")
    assert rank.outcomes(1)[2].is_ok
    rank.fetch(3, "disk", "a")
    assert rank.outcomes(1)[3].is_ok


def test_closing_finishes_what_runs_and_drops_the_rest(rank: Rank) -> None:
    rank.keeper.gate.clear()
    rank.write(1, "a")
    assert rank.keeper.begun.wait(PATIENCE)
    rank.write(2, "b")
    closing = threading.Thread(target=rank.transfers.close)
    closing.start()
    closing.join(0.05)
    assert closing.is_alive()
    rank.keeper.gate.set()
    closing.join(PATIENCE)
    assert rank.keeper.order == ["write a"]


def test_an_offer_is_out_until_its_lease_ends(rank: Rank) -> None:
    for ticket in (1, 2, 3, 4):
        rank.transfers.run(Offer(ticket, bundle_rows("a", (1, 2))))
    assert rank.lending.bundles[0].key == "a" and not rank.transfers.is_idle
    assert rank.transfers.poll() == []
    rank.lending.offers[2].set_result(None)
    (read,) = rank.transfers.poll()
    assert (read.ticket, read.lost, read.bytes) == (2, None, 2 * 32 + 24)
    rank.lending.over.append(1)
    rank.transfers.run(Withdraw((4,)))
    ended = {one.ticket: one.lost for one in rank.transfers.poll()}
    assert ended == {
        1: Lost(0, Failure(Reason.UNREAD)),
        4: Lost(0, Failure(Reason.CLEARED)),
    }
    with pytest.raises(ValueError, match="ticket 3 is out"):
        rank.transfers.run(Offer(3, bundle_rows("a", (1, 2))))
    rank.transfers.wait(PATIENCE)  # for nothing: nobody waits for a lease


def test_what_is_discarded_does_not_wait_for_leases(rank: Rank) -> None:
    rank.write(1, "a")
    rank.outcomes(1)
    rank.transfers.run(Offer(2, bundle_rows("b", (1, 2))))
    rank.transfers.run(Discard(("a",)))
    _until(lambda: not rank.keeper.kept)
    rank.transfers.close()
    rank.lending.offers[2].set_result(None)  # nobody hears of it any more


def test_what_cannot_be_run_is_an_error(rank: Rank) -> None:
    with pytest.raises(KeyError):
        rank.fetch(1, "elsewhere", "a")
    rank.memory.copied.clear()
    rank.write(1, "a")
    with pytest.raises(ValueError, match="ticket 1 is out"):
        rank.fetch(1, "disk", "a")
    bare = RankTransfers(rank.memory, None, {})
    for command in (Write(1, bundle_rows("a", (1,))), Discard(("a",))):
        with pytest.raises(TypeError, match="keeps no bundles"):
            bare.run(command)
    for offer in (Offer(1, bundle_rows("a", (1,))), Withdraw((1,))):
        with pytest.raises(TypeError, match="offers nothing to peers"):
            bare.run(offer)
    bare.close()


def test_layouts_are_those_of_the_rows(rank: Rank) -> None:
    check_rows(layouts(4), rank.memory)
    with pytest.raises(ValueError, match="rows of kv have 32 bytes, not 40"):
        check_rows(layouts(5), rank.memory)


def test_ranks_hear_of_a_ticket_when_all_are_done() -> None:
    ranks = [Rank(), Rank()]
    try:
        ranks[1].keeper.gate.clear()
        ranks[1].keeper.failure = Failure(Reason.IO)
        for each in ranks:
            each.write(1, "a")
            each.write(2, "b")
        _until(lambda: len(ranks[0].keeper.kept) == 2)
        assert settle(ranks) == []
        ranks[1].keeper.gate.set()
        heard: list[Outcome] = []

        def both() -> bool:
            heard.extend(settle(ranks))
            return len(heard) == 2

        _until(both)
        assert [outcome.ticket for outcome in heard] == [1, 2]
        assert all(one.lost == Lost(0, Failure(Reason.IO)) for one in heard)
        assert all(each.transfers.is_idle for each in ranks)
    finally:
        for each in ranks:
            each.keeper.gate.set()
            each.transfers.close()


def settle(ranks: list[Rank]) -> list[Outcome]:
    """What all ranks hear, each in a thread of its own."""
    barrier = threading.Barrier(len(ranks))
    given: list[list[int]] = [[] for _ in ranks]
    heard: list[list[Outcome]] = [[] for _ in ranks]

    def run(index: int) -> None:
        def all_reduce(values: list[int]) -> list[int]:
            given[index] = values
            barrier.wait(PATIENCE)
            return [max(each) for each in zip(*given, strict=True)]

        heard[index] = ranks[index].transfers.settle(all_reduce)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(each == heard[0] for each in heard)
    return heard[0]


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_record_comes_behind_the_bundles_that_it_names(rank: Rank) -> None:
    rank.keeper.gate.clear()
    rank.write(1, "a")
    rank.transfers.run(WriteRecord(2, "tea", "of a"))
    rank.transfers.run(WriteRecord(3, "tea", None))
    assert not rank.transfers.poll()
    rank.keeper.gate.set()
    done = rank.outcomes(3)
    assert [done[ticket].is_ok for ticket in (1, 2, 3)] == [True] * 3
    assert rank.keeper.order == ["write a", "record tea of a", "record tea None"]


def test_a_record_that_is_not_kept_is_told_of(rank: Rank) -> None:
    rank.keeper.failure = Failure(Reason.DISK_FULL)
    rank.transfers.run(WriteRecord(1, "tea", "of a"))
    (done,) = rank.outcomes(1).values()
    assert done.lost is not None and done.lost.failure.reason == Reason.DISK_FULL
